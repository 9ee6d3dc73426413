-- Guards: any number that somebody else writes into busy_blocks: the one before is put back, for it is the
--         jobs that change it. Not where the status or id changes with it, which busy_blocks_instances_sum
--         sees to, nor where that one has corrected the number first (AND busy_blocks IS new.busy_blocks).
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one write per statement and instance that sets the column to something else, however many jobs are
--         attached. A heartbeat or lock update is compiled without this trigger.
CREATE TRIGGER busy_blocks_instances_update
AFTER UPDATE OF busy_blocks ON instances
WHEN
    new.busy_blocks IS NOT old.busy_blocks
    AND new.status IS old.status
    AND new.id IS old.id
    AND NOT EXISTS (
        SELECT 1 FROM busy_blocks_writer
        WHERE busy_blocks_writer.instance_id = new.id
    )
BEGIN
    INSERT INTO busy_blocks_writer VALUES (new.id);
    UPDATE instances
    SET busy_blocks = old.busy_blocks
    WHERE id = new.id AND busy_blocks IS new.busy_blocks;
    DELETE FROM busy_blocks_writer
    WHERE instance_id = new.id;
END
