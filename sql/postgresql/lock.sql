-- Taken at the start of every transaction that installs or removes: both tables at once, or neither.
--
-- Guards: against a deadlock with a server that holds one table's rows and waits for the other's; the
--         transaction's lock_timeout is below deadlock_timeout, so it is this side that gives up.
-- Locks:  SHARE ROW EXCLUSIVE, which CREATE TRIGGER needs: readers go on, writers wait. DROP TRIGGER then
--         takes ACCESS EXCLUSIVE, for which readers wait, too.
-- Costs:  the wait for running writers, lock_timeout at the most.
LOCK TABLE instances, jobs IN SHARE ROW EXCLUSIVE MODE
