-- Guards: at commit, writes what the changed rows of jobs leave off.
-- Locks:  nothing, or see function/busy_blocks_write.sql.
-- Costs:  one call at commit for each row of a statement that can change attachments. Heartbeats and
--         lock updates are none.
CREATE CONSTRAINT TRIGGER busy_blocks_jobs_write
AFTER INSERT OR DELETE OR UPDATE OF instance_id, job_runtime_data ON jobs
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_apply()
