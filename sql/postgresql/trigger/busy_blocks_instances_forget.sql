-- Guards: an id that is used again in the transaction that deleted it.
-- Locks:  nothing at run time; SHARE ROW EXCLUSIVE on instances while it is created.
-- Costs:  one call per instance inserted by a transaction that has put a counter off before.
CREATE TRIGGER busy_blocks_instances_forget
BEFORE INSERT ON instances
FOR EACH ROW
WHEN (current_setting('busy_blocks.pending', TRUE) <> '')
EXECUTE FUNCTION busy_blocks_forget()
