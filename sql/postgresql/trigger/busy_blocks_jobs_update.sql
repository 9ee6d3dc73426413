-- Guards: attaching, detaching, moving a job, and a change of job_runtime_data while attached.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on jobs while it is created.
-- Costs:  one call per statement and job that names one of the columns. Heartbeats and lock updates name
--         neither.
--
-- No WHEN: PostgreSQL reads the text of the condition anew in each statement, which costs more than the call
-- that it saves.
CREATE TRIGGER busy_blocks_jobs_update
AFTER UPDATE OF instance_id, job_runtime_data ON jobs
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_collect_jobs()
