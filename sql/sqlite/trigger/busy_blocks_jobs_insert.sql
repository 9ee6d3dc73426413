-- Guards: a job inserted with instance_id already set. Naming the status makes
--         busy_blocks_instances_sum sum anew; not an addition, for REPLACE deletes the job before without
--         firing a trigger.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  two sums and two writes of the instance per inserted job that is attached; dstack inserts none.
CREATE TRIGGER busy_blocks_jobs_insert
AFTER INSERT ON jobs
WHEN new.instance_id IS NOT NULL
BEGIN
    UPDATE instances
    SET status = status
    WHERE id = new.instance_id;
END
