-- Row trigger function of instances: notes what somebody writes into busy_blocks, as so much to take back.
--
-- Guards: the counter against numbers that the attached jobs do not explain. dstack writes the number and
--         attaches or detaches the job in one transaction: where it counted right, what is noted here and
--         what busy_blocks_collect_jobs notes is 0 together, and nothing is left to do. Both are exact,
--         for a row trigger has the row as it was when it was locked, not as the server had read it.
--         A PENDING instance has 0 whatever its jobs explain: naming the status makes
--         busy_blocks_recompute see to it.
-- Locks:  as busy_blocks_collect_jobs.
-- Costs:  no query, but one UPDATE where a number is written into a PENDING instance; dstack writes 0.
CREATE FUNCTION busy_blocks_collect_instances() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
BEGIN
    IF
        current_setting('busy_blocks.writer', true) = new.id::text
        OR old.id = new.id AND old.busy_blocks = new.busy_blocks
    THEN
        RETURN NULL;
    END IF;
    pending := busy_blocks_noted(pending, new.id, old.busy_blocks - new.busy_blocks::bigint);
    -- Few expressions, as each is prepared again in every transaction: what is rare is asked for at once.
    IF
        octet_length(set_config('busy_blocks.pending', pending, true)) > 48000
        OR current_setting('busy_blocks.repeated', true) <> ''
        OR new.status = 'PENDING'
    THEN
        IF pg_trigger_depth() = 1 THEN
            -- No trigger's write: see busy_blocks_apply.
            PERFORM set_config('busy_blocks.repeated', '', true);
        END IF;
        IF octet_length(pending) > 48000 THEN
            PERFORM busy_blocks_write();
        END IF;
        IF new.status = 'PENDING' THEN
            UPDATE instances SET status = instances.status WHERE instances.id = new.id;
        END IF;
    END IF;
    RETURN NULL;
END
$$
