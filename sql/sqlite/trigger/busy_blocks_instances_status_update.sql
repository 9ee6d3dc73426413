-- Guards: the status of an instance that is BUSY or IDLE: BUSY while a job is attached, IDLE while none is.
--         Every other is left alone. The triggers of jobs get here by writing busy_blocks. An instance that
--         becomes IDLE here has its idle time counted from now (last_job_processed_at, in UTC): dstack
--         would count from the job before, and could terminate at once what has just been busy. Not so
--         where it was IDLE before: dstack writes BUSY first and then attaches the job.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one look for an attached job per statement and instance that sets one of the columns, and one
--         write where the status is wrong.
CREATE TRIGGER busy_blocks_instances_status_update
AFTER UPDATE OF id, busy_blocks, status ON instances
WHEN
    new.status = CASE
        WHEN EXISTS (
            SELECT 1 FROM jobs
            WHERE jobs.instance_id = new.id
        ) THEN 'IDLE'
        ELSE 'BUSY'
    END
BEGIN
    UPDATE instances
    SET
        status = CASE WHEN new.status = 'BUSY' THEN 'IDLE' ELSE 'BUSY' END,
        last_job_processed_at = CASE
            WHEN new.status = 'BUSY' AND old.status <> 'IDLE' THEN datetime('now') || '.000000'
            ELSE last_job_processed_at
        END
    WHERE id = new.id;
END
