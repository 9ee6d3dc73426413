-- Instances whose counter differs from the jobs attached to them: no row, no drift.
--
-- Guards: nothing; a plain SELECT, for the sqlite3 shell, the backfill and alembic check.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one pass over instances and over index/busy_blocks_jobs.sql.
SELECT
    instances.name,
    instances.id,
    instances.busy_blocks AS is_now,
    derived.busy_blocks AS should_be
FROM instances
INNER JOIN busy_blocks_derived AS derived ON instances.id = derived.instance_id
WHERE instances.busy_blocks <> derived.busy_blocks
ORDER BY instances.name, instances.id
