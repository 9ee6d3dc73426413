-- Statement trigger function of jobs: adds what busy_blocks_collect noted to the instances.
--
-- Guards: the counter of every instance whose jobs the statement changed. Adding to the locked row is
--         exact under READ COMMITTED: an UPDATE that waited for the row reads it again before it adds.
--         A sum computed here would not be: it would come from a snapshot older than the wait.
-- Locks:  each instance, as any UPDATE of it does, until the transaction ends; in the order of the
--         ids, so that two statements that move many jobs cannot wait for each other.
-- Costs:  one UPDATE per instance whose sum changes; nothing else, however many jobs are attached.
--
-- busy_blocks.writer tells busy_blocks_guard that the number is ours. It is set for the length of
-- this call only.
CREATE FUNCTION busy_blocks_apply() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET "busy_blocks.writer" TO 'trigger'
AS $$
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    difference integer;
BEGIN
    IF pending = '' THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('busy_blocks.pending', '', true);
    IF length(pending) > 48 THEN
        pending := (
            SELECT string_agg(substr(pending, entry, 48), '' ORDER BY substr(pending, entry, 48))
            FROM generate_series(1, length(pending), 48) AS entry
        );
    END IF;
    FOR entry IN 0..length(pending) / 48 - 1 LOOP
        difference := substr(pending, entry * 48 + 37, 12)::integer;
        CONTINUE WHEN difference = 0;
        UPDATE instances
        SET busy_blocks = CASE WHEN status = 'PENDING' THEN 0 ELSE busy_blocks + difference END
        WHERE id = substr(pending, entry * 48 + 1, 36)::uuid;
    END LOOP;
    RETURN NULL;
END
$$
