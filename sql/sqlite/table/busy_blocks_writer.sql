-- The instances whose busy_blocks a trigger of ours is writing; empty between statements.
--
-- Guards: busy_blocks_instances_update from taking our own numbers back: a trigger of SQLite cannot tell
--         otherwise who writes. Those that write it add the instance and delete it again.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one row written and deleted per write of ours, all in one page, which each such commit writes to
--         the WAL.
CREATE TABLE busy_blocks_writer (
    -- Keep this table, and keep it empty: the triggers on jobs and instances need it.
    instance_id char(32)
)
