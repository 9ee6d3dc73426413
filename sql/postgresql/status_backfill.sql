-- Corrects every status that does not follow the jobs attached, and no other row.
--
-- Guards: instances that were wrong before the triggers came, or while they were off. Naming the status
--         makes the triggers correct it, each instance while its row is locked.
-- Locks:  the rows that it corrects, until the transaction ends.
-- Costs:  that of status_drift.sql, and two UPDATEs per row that it corrects.
UPDATE instances
SET status = status
WHERE status::text = CASE
    WHEN EXISTS (
        SELECT 1 FROM jobs
        WHERE jobs.instance_id = instances.id
    ) THEN 'IDLE'
    ELSE 'BUSY'
END
