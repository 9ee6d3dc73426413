-- Corrects every counter that differs from the jobs attached, and no other row.
--
-- Guards: instances that were wrong before the triggers came, or while they were off. Naming status
--         makes the triggers sum the attached jobs anew, each instance while its row is locked.
-- Locks:  the rows that it corrects, until the transaction ends.
-- Costs:  that of drift.sql, and one UPDATE per row that it corrects.
UPDATE instances
SET status = status
WHERE
    busy_blocks <> CASE
        WHEN status = 'PENDING' THEN 0
        ELSE (
            SELECT least(2147483647, coalesce(sum(coalesce(busy_blocks_of_job(jobs.job_runtime_data), 1)), 0))
            FROM jobs
            WHERE jobs.instance_id = instances.id
        )
    END
