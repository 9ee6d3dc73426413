-- Guards: a job inserted with instance_id already set.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum and one write of the instance per inserted job that is attached.
CREATE TRIGGER busy_blocks_jobs_insert
AFTER INSERT ON jobs
WHEN new.instance_id IS NOT NULL
BEGIN
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = new.instance_id
        )
    WHERE id = new.instance_id;
END
