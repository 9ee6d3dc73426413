-- Guards: attaching, detaching, moving a job, and a change of job_runtime_data while attached. Adds what the
--         row changes, for the counter was right before; so it must not be summed between the change of the
--         row and this (see sql/README.md). The blocks of a job are those of view/busy_blocks_derived.sql.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  two JSON parses and one write of the instance per changed job, two writes if it moves, however many
--         jobs are attached. A statement that sets neither column, as every heartbeat and lock update, is
--         compiled without this trigger.
CREATE TRIGGER busy_blocks_jobs_update
AFTER UPDATE OF instance_id, job_runtime_data ON jobs
WHEN old.instance_id IS NOT new.instance_id OR old.job_runtime_data IS NOT new.job_runtime_data
BEGIN
    INSERT INTO busy_blocks_writer VALUES (old.instance_id), (new.instance_id);
    UPDATE instances
    SET
        busy_blocks = CASE
            WHEN status = 'PENDING' THEN 0
            ELSE busy_blocks - CASE
                WHEN id IS NOT old.instance_id THEN 0
                WHEN NOT json_valid(old.job_runtime_data) THEN 1
                WHEN json_type(old.job_runtime_data, '$.offer.blocks') <> 'integer' THEN 1
                WHEN json_extract(old.job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
                    THEN json_extract(old.job_runtime_data, '$.offer.blocks')
                ELSE 1
            END + CASE
                WHEN id IS NOT new.instance_id THEN 0
                WHEN NOT json_valid(new.job_runtime_data) THEN 1
                WHEN json_type(new.job_runtime_data, '$.offer.blocks') <> 'integer' THEN 1
                WHEN json_extract(new.job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
                    THEN json_extract(new.job_runtime_data, '$.offer.blocks')
                ELSE 1
            END
        END
    WHERE id IN (old.instance_id, new.instance_id);
    DELETE FROM busy_blocks_writer
    WHERE instance_id IN (old.instance_id, new.instance_id) OR instance_id IS NULL;
END
