-- Guards: an attached job deleted, by hand or by a cascade from its instance, run or project.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on jobs while it is created.
-- Costs:  one call per deleted job that was attached; nothing for the others.
CREATE TRIGGER busy_blocks_jobs_delete
AFTER DELETE ON jobs
FOR EACH ROW
WHEN (old.instance_id IS NOT NULL)
EXECUTE FUNCTION busy_blocks_collect_jobs()
