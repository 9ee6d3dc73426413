-- Deferred trigger function of jobs: adds what busy_blocks_collect noted to the instances, at commit.
--
-- Guards: the counter of every instance whose jobs the transaction changed. The first call adds it all,
--         those for the transaction's other rows find nothing left.
-- Locks:  each of these instances until the commit is done, a moment later; in the order of the ids, so
--         that two transactions that each move many jobs do not wait for each other in a circle.
-- Costs:  one UPDATE per instance whose sum changes, and nothing where none does.
--
-- At commit and for each row, because a statement trigger is not sure to fire: PostgreSQL drops the one
-- that an UPDATE of jobs queued when a second UPDATE in the same WITH names other columns.
CREATE FUNCTION busy_blocks_apply() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
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
        PERFORM busy_blocks_add(substr(pending, entry * 48 + 1, 36)::uuid, difference);
    END LOOP;
    RETURN NULL;
END
$$
