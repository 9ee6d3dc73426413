-- Guards: attaching, detaching, moving a job, and a change of job_runtime_data while attached.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on jobs while it is created.
-- Costs:  one call per job that really changes so. A statement that sets neither column, as every
--         heartbeat and lock update, does not even look at the condition.
CREATE TRIGGER busy_blocks_jobs_update
AFTER UPDATE OF instance_id, job_runtime_data ON jobs
FOR EACH ROW
WHEN (
    old.instance_id IS DISTINCT FROM new.instance_id
    OR new.instance_id IS NOT NULL AND old.job_runtime_data IS DISTINCT FROM new.job_runtime_data
)
EXECUTE FUNCTION busy_blocks_collect()
