-- Adds a difference to the counter of one instance.
--
-- Guards: adding to the locked row is exact under READ COMMITTED: an UPDATE that waited for the row
--         reads it again before it adds. A sum computed here would not be: it would come from a
--         snapshot older than the wait. A PENDING instance has 0; busy_blocks_recompute sums when it
--         is promoted.
-- Locks:  the instance, as any UPDATE of it does, until the transaction ends.
-- Costs:  one UPDATE by primary key, however many jobs are attached.
--
-- The transaction-local setting busy_blocks.writer tells busy_blocks_guard whose number is ours.
CREATE FUNCTION busy_blocks_add(instance uuid, difference integer) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    writer_before text := coalesce(current_setting('busy_blocks.writer', true), '');
BEGIN
    PERFORM set_config('busy_blocks.writer', busy_blocks_add.instance::text, true);
    UPDATE instances
    SET busy_blocks = CASE
        WHEN instances.status = 'PENDING' THEN 0
        ELSE instances.busy_blocks + busy_blocks_add.difference
    END
    WHERE instances.id = busy_blocks_add.instance;
    PERFORM set_config('busy_blocks.writer', writer_before, true);
END
$$
