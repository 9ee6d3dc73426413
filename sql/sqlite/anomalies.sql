-- Rows that deserve a look: right or wrong, the counter does not tell.
--
-- Guards: nothing; a plain SELECT, for the sqlite3 shell.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  one pass over instances, one over the attached jobs with a JSON parse each.
WITH attached AS (
    SELECT
        jobs.id AS job_id,
        jobs.status AS job_status,
        jobs.instance_id,
        instances.name AS instance_name,
        jobs.job_runtime_data
    FROM jobs
    INNER JOIN instances ON jobs.instance_id = instances.id
)

SELECT
    'busy_blocks is above total_blocks' AS anomaly,
    instances.name AS instance_name,
    instances.id AS instance_id,
    NULL AS job_id,
    instances.busy_blocks || ' of ' || instances.total_blocks AS detail
FROM instances
WHERE instances.busy_blocks > instances.total_blocks
UNION ALL
SELECT
    'a finished job is still attached' AS anomaly,
    attached.instance_name,
    attached.instance_id,
    attached.job_id,
    attached.job_status AS detail
FROM attached
WHERE attached.job_status IN ('TERMINATED', 'ABORTED', 'FAILED', 'DONE')
UNION ALL
SELECT
    'the job_runtime_data of an attached job cannot be read' AS anomaly,
    attached.instance_name,
    attached.instance_id,
    attached.job_id,
    'counted as 1 block' AS detail
FROM attached
WHERE
    attached.job_runtime_data IS NOT NULL
    AND (
        NOT json_valid(attached.job_runtime_data)
        OR json_type(attached.job_runtime_data, '$.offer.blocks') <> 'integer'
        OR NOT json_extract(attached.job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
    )
UNION ALL
SELECT
    'BUSY without a job' AS anomaly,
    instances.name AS instance_name,
    instances.id AS instance_id,
    NULL AS job_id,
    NULL AS detail
FROM instances
WHERE
    instances.status = 'BUSY'
    AND NOT EXISTS (
        SELECT 1 FROM jobs
        WHERE jobs.instance_id = instances.id
    )
UNION ALL
SELECT
    'IDLE with a job' AS anomaly,
    attached.instance_name,
    attached.instance_id,
    attached.job_id,
    attached.job_status AS detail
FROM attached
INNER JOIN instances ON attached.instance_id = instances.id
WHERE instances.status = 'IDLE'
ORDER BY anomaly, instance_name, instance_id, job_id
