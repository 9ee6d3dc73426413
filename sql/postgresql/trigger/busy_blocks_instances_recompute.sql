-- Guards: a new instance and one whose status (or id) a statement names; see
--         function/busy_blocks_recompute.sql.
-- Locks:  nothing new at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call at commit for each such row.
CREATE CONSTRAINT TRIGGER busy_blocks_instances_recompute
AFTER INSERT OR UPDATE OF id, status ON instances
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_recompute()
