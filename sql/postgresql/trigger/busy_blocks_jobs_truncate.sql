-- Guards: TRUNCATE jobs, also by TRUNCATE instances CASCADE.
-- Locks:  see function/busy_blocks_truncate.sql.
-- Costs:  one call per TRUNCATE.
CREATE TRIGGER busy_blocks_jobs_truncate
AFTER TRUNCATE ON jobs
FOR EACH STATEMENT
EXECUTE FUNCTION busy_blocks_truncate()
