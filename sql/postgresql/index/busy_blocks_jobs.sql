-- Finds the jobs of one instance, on a dstack that has no index on jobs.instance_id (before 0.21.1).
--
-- Guards: the cost of busy_blocks_recompute.
-- Locks:  SHARE UPDATE EXCLUSIVE on jobs: writers go on. Built outside a transaction.
-- Costs:  one entry per attached job; a job that is not attached has none.
CREATE INDEX CONCURRENTLY busy_blocks_jobs ON jobs USING btree (instance_id) WHERE instance_id IS NOT NULL
