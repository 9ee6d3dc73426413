-- Instances whose counter differs from the jobs attached to them: no row, no drift.
--
-- Guards: nothing; a plain SELECT, for psql, the backfill and alembic check.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one JSON parse per attached job and one pass over instances.
WITH attached AS (
    SELECT
        instance_id,
        sum(coalesce(busy_blocks_of_job(job_runtime_data), 1)) AS blocks
    FROM jobs
    WHERE instance_id IS NOT NULL
    GROUP BY instance_id
),

derived AS (
    SELECT
        instances.name,
        instances.id,
        instances.busy_blocks AS is_now,
        CASE
            WHEN instances.status = 'PENDING' THEN 0
            ELSE least(2147483647, coalesce(attached.blocks, 0))
        END AS should_be
    FROM instances
    LEFT JOIN attached ON instances.id = attached.instance_id
)

SELECT
    name,
    id,
    is_now,
    should_be
FROM derived
WHERE is_now <> should_be
ORDER BY name, id
