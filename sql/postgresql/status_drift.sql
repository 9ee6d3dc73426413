-- Instances that are BUSY without a job attached, or IDLE with one: no row, no drift.
--
-- Guards: nothing; a plain SELECT, for psql, the backfill and alembic check.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one look for an attached job per instance that is BUSY or IDLE.
WITH derived AS (
    SELECT
        instances.name,
        instances.id,
        instances.status::text AS is_now,
        CASE
            WHEN EXISTS (
                SELECT 1 FROM jobs
                WHERE jobs.instance_id = instances.id
            ) THEN 'BUSY'
            ELSE 'IDLE'
        END AS should_be
    FROM instances
    WHERE instances.status IN ('BUSY', 'IDLE')
)

SELECT
    name,
    id,
    is_now,
    should_be
FROM derived
WHERE is_now <> should_be
ORDER BY name, id
