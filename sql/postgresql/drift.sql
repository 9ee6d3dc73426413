-- Instances whose counter differs from the jobs attached to them: no row, no drift.
--
-- Guards: nothing; a plain SELECT, for psql, the backfill and alembic check.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one JSON parse per attached job and one pass over instances.
SELECT
    instances.name,
    instances.id,
    instances.busy_blocks AS is_now,
    CASE WHEN instances.status = 'PENDING' THEN 0 ELSE coalesce(attached.blocks, 0) END AS should_be
FROM instances
LEFT JOIN (
    SELECT
        jobs.instance_id,
        sum(busy_blocks_of_job(jobs.job_runtime_data)) AS blocks
    FROM jobs
    WHERE jobs.instance_id IS NOT NULL
    GROUP BY jobs.instance_id
) AS attached ON instances.id = attached.instance_id
WHERE
    instances.busy_blocks
    <> CASE WHEN instances.status = 'PENDING' THEN 0 ELSE coalesce(attached.blocks, 0) END
ORDER BY instances.name, instances.id
