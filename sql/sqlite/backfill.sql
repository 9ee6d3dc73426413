-- Corrects every counter that differs from the jobs attached, and no other row.
--
-- Guards: instances that were wrong before the triggers came, or while they were off. Naming status
--         makes the triggers sum the attached jobs anew.
-- Locks:  the database, until the transaction ends.
-- Costs:  that of drift.sql, and two UPDATEs per row that it corrects.
UPDATE instances
SET status = status
WHERE busy_blocks <> (
    SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
    WHERE derived.instance_id = instances.id
)
