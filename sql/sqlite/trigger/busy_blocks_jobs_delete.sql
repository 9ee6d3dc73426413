-- Guards: an attached job deleted, by hand or by a cascade from its run or project. REPLACE fires
--         it only where recursive_triggers is on. Naming the status makes busy_blocks_instances_sum sum anew.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  two sums and two writes of the instance per deleted job that was attached: of many jobs of one
--         instance, each sum is over those that are left. dstack detaches first.
CREATE TRIGGER busy_blocks_jobs_delete
AFTER DELETE ON jobs
WHEN old.instance_id IS NOT NULL
BEGIN
    UPDATE instances
    SET status = status
    WHERE id = old.instance_id;
END
