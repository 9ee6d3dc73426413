-- What busy_blocks of each instance has to be, from the jobs attached to it and from nothing else.
--
-- Guards: the definition that the sums, the backfill and the drift report share. A job occupies
--         the integer at offer.blocks of its job_runtime_data, 1 where dstack writes none (its
--         _get_job_occupied_blocks). Text that is no JSON, or a value that is no integer from 0 to
--         999999, counts as 1 too: a server's statement must never fail over it. The expression is the one
--         of trigger/busy_blocks_jobs_update.sql.
-- Locks:  nothing beyond a plain SELECT.
-- Costs:  per instance, one JSON parse per attached job.
CREATE VIEW busy_blocks_derived AS
SELECT
    instances.id AS instance_id,
    instances.busy_blocks AS is_now,
    CASE
        WHEN instances.status = 'PENDING' THEN 0
        ELSE
            (
                SELECT
                    coalesce(
                        sum(
                            CASE
                                WHEN NOT json_valid(jobs.job_runtime_data) THEN 1
                                WHEN json_type(jobs.job_runtime_data, '$.offer.blocks') <> 'integer' THEN 1
                                WHEN
                                    json_extract(jobs.job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
                                    THEN json_extract(jobs.job_runtime_data, '$.offer.blocks')
                                ELSE 1
                            END
                        ),
                        0
                    )
                FROM jobs
                WHERE jobs.instance_id = instances.id
            )
    END AS busy_blocks
FROM instances
