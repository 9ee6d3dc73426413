-- Row trigger function of jobs: notes what one changed row changes on which instance.
--
-- Guards: the difference in blocks per instance, collected over all rows of the statement in the
--         transaction-local setting busy_blocks.pending, 48 characters an entry: the instance's id
--         (36) and the difference, padded (12). busy_blocks_apply, at the end of the same statement,
--         writes it. A rollback, also to a savepoint, takes the setting back with it.
-- Locks:  nothing; the instances are locked by busy_blocks_apply, all of them in one order.
-- Costs:  one JSON parse for the old row if it was attached, one for the new row if it is. The
--         setting has one entry per instance that the statement touches, however many jobs it moves.
CREATE FUNCTION busy_blocks_collect() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    instance_id uuid;
    difference integer;
    entry integer;
BEGIN
    FOREACH instance_id IN ARRAY ARRAY[old.instance_id, nullif(new.instance_id, old.instance_id)] LOOP
        CONTINUE WHEN instance_id IS NULL;
        difference := 0;
        IF new.instance_id = instance_id THEN
            difference := difference + coalesce(busy_blocks_of_job(new.job_runtime_data), 1);
        END IF;
        IF old.instance_id = instance_id THEN
            difference := difference - coalesce(busy_blocks_of_job(old.job_runtime_data), 1);
        END IF;
        entry := strpos(pending, instance_id::text);
        IF entry = 0 THEN
            pending := pending || instance_id::text || lpad(difference::text, 12);
        ELSE
            difference := difference + substr(pending, entry + 36, 12)::integer;
            pending := overlay(pending PLACING lpad(difference::text, 12) FROM entry + 36);
        END IF;
    END LOOP;
    PERFORM set_config('busy_blocks.pending', pending, true);
    RETURN NULL;
END
$$
