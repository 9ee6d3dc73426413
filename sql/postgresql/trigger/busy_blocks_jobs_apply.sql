-- Guards: at the end of each statement that can change attachments, writes what its rows collected.
-- Locks:  the instances concerned, in the order of their ids; see function/busy_blocks_apply.sql.
-- Costs:  one call per such statement. Heartbeats and lock updates are none.
CREATE TRIGGER busy_blocks_jobs_apply
AFTER INSERT OR DELETE OR UPDATE OF instance_id, job_runtime_data ON jobs
FOR EACH STATEMENT
EXECUTE FUNCTION busy_blocks_apply()
