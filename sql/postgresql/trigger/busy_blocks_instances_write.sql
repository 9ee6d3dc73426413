-- Guards: at commit, takes back what is written into busy_blocks and the jobs do not explain.
-- Locks:  nothing, or see function/busy_blocks_write.sql.
-- Costs:  one call at commit per statement and instance that names the column.
CREATE CONSTRAINT TRIGGER busy_blocks_instances_write
AFTER UPDATE OF id, busy_blocks ON instances
DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_apply()
