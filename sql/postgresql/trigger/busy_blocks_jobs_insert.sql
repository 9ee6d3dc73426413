-- Guards: a job inserted with instance_id already set (INSERT, COPY, upsert, MERGE).
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on jobs while it is created.
-- Costs:  one call per inserted job that is attached; nothing for the others.
CREATE TRIGGER busy_blocks_jobs_insert
AFTER INSERT ON jobs
FOR EACH ROW
WHEN (new.instance_id IS NOT NULL)
EXECUTE FUNCTION busy_blocks_collect_jobs()
