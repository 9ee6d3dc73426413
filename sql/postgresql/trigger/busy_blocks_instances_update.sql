-- Guards: any number that is written into busy_blocks.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call per statement and instance that names the column. Heartbeats and lock updates do not.
--
-- No WHEN: PostgreSQL reads the text of the condition anew in each statement, which costs more than the call
-- that it saves.
CREATE TRIGGER busy_blocks_instances_update
AFTER UPDATE OF id, busy_blocks ON instances
FOR EACH ROW
EXECUTE FUNCTION busy_blocks_collect_instances()
