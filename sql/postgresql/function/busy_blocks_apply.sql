-- Deferred trigger function of jobs and of instances: writes what the transaction noted, at commit.
--
-- Guards: the counter of every instance that the transaction has put off. The first call writes it all,
--         those for the transaction's other rows find nothing left.
-- Locks:  see busy_blocks_write; until the commit is done, a moment later.
-- Costs:  nothing where the server's own number was right; else those of busy_blocks_write.
--
-- At commit and for each row, because a statement trigger is not sure to fire: PostgreSQL drops the one
-- that an UPDATE of jobs queued when a second UPDATE in the same WITH names other columns. After SET
-- CONSTRAINTS ALL IMMEDIATE triggers fire in the order of their names: hence those that collect (insert,
-- update, delete) come before those that write.
CREATE FUNCTION busy_blocks_apply() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF current_setting('busy_blocks.pending', true) <> '' THEN
        PERFORM busy_blocks_write();
    END IF;
    RETURN NULL;
END
$$
