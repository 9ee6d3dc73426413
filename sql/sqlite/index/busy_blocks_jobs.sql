-- Finds the jobs of one instance, on a dstack that has no index on jobs.instance_id (before 0.21.1).
--
-- Guards: the cost of busy_blocks_derived and of the look for an attached job. The offline script builds it
--         everywhere, as SQLite's SQL cannot ask whether there is another.
-- Locks:  the database, as every write does in SQLite, while it is built.
-- Costs:  one scan of jobs; then one entry per attached job, a job that is not attached has none.
CREATE INDEX busy_blocks_jobs ON jobs (instance_id)
WHERE instance_id IS NOT NULL
