-- Guards: a job inserted with instance_id already set. A sum and not an addition, for REPLACE deletes the job
--         before without firing a trigger.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum and one write of the instance per inserted job that is attached; dstack inserts none.
CREATE TRIGGER busy_blocks_jobs_insert
AFTER INSERT ON jobs
WHEN new.instance_id IS NOT NULL
BEGIN
    INSERT INTO busy_blocks_writer VALUES (new.instance_id);
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = new.instance_id
        )
    WHERE id = new.instance_id;
    DELETE FROM busy_blocks_writer
    WHERE instance_id = new.instance_id;
END
