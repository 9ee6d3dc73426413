-- Guards: attaching, detaching, moving a job, and a change of job_runtime_data while attached.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum and one write of the instance per changed job, two if it moves. A statement that
--         sets neither column, as every heartbeat and lock update, is compiled without this trigger.
CREATE TRIGGER busy_blocks_jobs_update
AFTER UPDATE OF instance_id, job_runtime_data ON jobs
WHEN old.instance_id IS NOT new.instance_id OR old.job_runtime_data IS NOT new.job_runtime_data
BEGIN
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = instances.id
        )
    WHERE id IN (old.instance_id, new.instance_id);
END
