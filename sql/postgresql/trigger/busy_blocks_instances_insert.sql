-- Guards: the number that a new instance is inserted with.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call per inserted instance whose busy_blocks is not 0.
CREATE TRIGGER busy_blocks_instances_insert
AFTER INSERT ON instances
FOR EACH ROW
WHEN (new.busy_blocks <> 0)
EXECUTE FUNCTION busy_blocks_collect_instances()
