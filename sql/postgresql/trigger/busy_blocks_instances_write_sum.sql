-- Guards: an instance that is inserted, or whose status (or id) a statement names; see
--         function/busy_blocks_recompute.sql.
-- Locks:  nothing new at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call at commit for each statement and row.
CREATE CONSTRAINT TRIGGER busy_blocks_instances_write_sum
AFTER INSERT OR UPDATE OF id, status ON instances
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_recompute()
