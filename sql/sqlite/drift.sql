-- Instances whose counter differs from the jobs attached to them: no row, no drift.
--
-- Guards: nothing; a plain SELECT, for the sqlite3 shell, the backfill and alembic check.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one pass over instances, and one JSON parse per attached job.
SELECT
    instances.name,
    instances.id,
    derived.is_now,
    derived.busy_blocks AS should_be
FROM busy_blocks_derived AS derived
INNER JOIN instances ON derived.instance_id = instances.id
WHERE derived.is_now <> derived.busy_blocks
ORDER BY instances.name, instances.id
