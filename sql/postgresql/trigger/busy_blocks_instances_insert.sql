-- Guards: the number that a new instance is inserted with.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call per inserted instance.
CREATE TRIGGER busy_blocks_instances_insert
BEFORE INSERT ON instances
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_guard()
