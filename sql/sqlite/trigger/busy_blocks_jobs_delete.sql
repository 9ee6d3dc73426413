-- Guards: an attached job deleted, by hand or by a cascade from its run or project. REPLACE fires
--         it only where recursive_triggers is on.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum and one write of the instance per deleted job that was attached: of many jobs of one
--         instance, each sum is over those that are left. dstack detaches first.
CREATE TRIGGER busy_blocks_jobs_delete
AFTER DELETE ON jobs
WHEN old.instance_id IS NOT NULL
BEGIN
    INSERT INTO busy_blocks_writer VALUES (old.instance_id);
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = old.instance_id
        )
    WHERE id = old.instance_id;
    DELETE FROM busy_blocks_writer
    WHERE instance_id = old.instance_id;
END
