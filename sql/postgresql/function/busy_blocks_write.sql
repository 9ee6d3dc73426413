-- Adds what a transaction has noted to the counters.
--
-- Guards: adding to the locked row is exact under READ COMMITTED: an UPDATE that waited for the row
--         reads it again before it adds. A sum computed here would not be: it would come from a
--         snapshot older than the wait. A PENDING instance has 0; busy_blocks_recompute sums when it
--         is promoted.
-- Locks:  each of these instances, as any UPDATE of it does, until the transaction ends; in the order of
--         the ids, so that two transactions that each move many jobs do not wait for each other in a circle.
-- Costs:  one UPDATE by primary key per instance that is off, however many jobs are attached.
--
-- The transaction-local setting busy_blocks.writer tells the triggers of instances whose number is ours.
CREATE FUNCTION busy_blocks_write() RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
<<own>>
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    writer_before text := coalesce(current_setting('busy_blocks.writer', true), '');
    instance uuid;
    difference bigint;
BEGIN
    PERFORM set_config('busy_blocks.pending', '', true);
    FOR instance, difference IN
        SELECT
            substr(own.pending, entry, 36)::uuid AS id,
            substr(own.pending, entry + 36, 12)::bigint
        FROM generate_series(1, octet_length(own.pending), 48) AS entry
        ORDER BY id
    LOOP
        PERFORM set_config('busy_blocks.writer', own.instance::text, true);
        UPDATE instances
        SET busy_blocks = CASE
            WHEN instances.status = 'PENDING' THEN 0
            ELSE greatest(least(instances.busy_blocks + own.difference, 2147483647), -2147483648)
        END
        WHERE instances.id = own.instance;
    END LOOP;
    PERFORM set_config('busy_blocks.writer', writer_before, true);
END
$$
