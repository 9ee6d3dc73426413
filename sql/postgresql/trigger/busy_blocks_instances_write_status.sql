-- Guards: an instance that may be IDLE with a job attached or BUSY without one; see
--         function/busy_blocks_status.sql. One that is BUSY with a counter above 0 has a job.
-- Locks:  nothing new at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call at commit for each statement that names one of the columns and leaves the instance so.
CREATE CONSTRAINT TRIGGER busy_blocks_instances_write_status
AFTER INSERT OR UPDATE OF id, busy_blocks, status ON instances
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
WHEN (new.status = 'IDLE' OR new.busy_blocks = 0)
EXECUTE FUNCTION busy_blocks_status()
