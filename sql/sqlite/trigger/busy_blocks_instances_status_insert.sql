-- Guards: the status that a new instance is inserted with; see busy_blocks_instances_status_update.sql.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one look for an attached job per inserted instance, and one write where the status is wrong.
CREATE TRIGGER busy_blocks_instances_status_insert
AFTER INSERT ON instances
WHEN
    new.status = CASE
        WHEN EXISTS (
            SELECT 1 FROM jobs
            WHERE jobs.instance_id = new.id
        ) THEN 'IDLE'
        ELSE 'BUSY'
    END
BEGIN
    UPDATE instances
    SET
        status = CASE WHEN new.status = 'BUSY' THEN 'IDLE' ELSE 'BUSY' END,
        last_job_processed_at = CASE
            WHEN new.status = 'BUSY' THEN datetime('now') || '.000000'
            ELSE last_job_processed_at
        END
    WHERE id = new.id;
END
