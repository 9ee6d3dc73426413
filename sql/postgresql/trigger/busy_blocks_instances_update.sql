-- Guards: any number that is written into busy_blocks, and the change to or from PENDING.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call per instance whose busy_blocks or status really changes. Heartbeats and lock
--         updates set neither column.
CREATE TRIGGER busy_blocks_instances_update
BEFORE UPDATE OF busy_blocks, status ON instances
FOR EACH ROW
WHEN (
    old.busy_blocks IS DISTINCT FROM new.busy_blocks
    OR old.status IS DISTINCT FROM new.status
)
EXECUTE FUNCTION busy_blocks_guard()
