-- Row trigger function of jobs: notes what a changed row adds to the sums over the attached jobs.
--
-- Guards: together with busy_blocks_collect_instances, by how much the transaction puts each counter off.
--         Noted in its local setting busy_blocks.pending; a rollback, also to a savepoint, takes the
--         setting back with it. busy_blocks_apply writes what is left at commit.
-- Locks:  nothing; busy_blocks_write locks the instances, all in one order. Locked before the commit are only
--         those of a job of 0 blocks, which dstack does not make, and what a transaction that has put more
--         than a thousand counters off writes early.
-- Costs:  one JSON parse for the old row if it was attached, one for the new row if it is.
CREATE FUNCTION busy_blocks_collect_jobs() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    old_blocks bigint;
    new_blocks bigint;
BEGIN
    -- Few expressions, as each is prepared again in every transaction.
    IF old.instance_id IS NOT NULL THEN
        old_blocks := coalesce(busy_blocks_of_job(old.job_runtime_data), 1);
        pending := busy_blocks_noted(pending, old.instance_id, -old_blocks);
    END IF;
    IF new.instance_id IS NOT NULL THEN
        new_blocks := coalesce(busy_blocks_of_job(new.job_runtime_data), 1);
        pending := busy_blocks_noted(pending, new.instance_id, new_blocks);
    END IF;
    IF octet_length(set_config('busy_blocks.pending', pending, true)) > 48000 THEN
        PERFORM busy_blocks_write();
    END IF;
    -- Nothing to add, but the status may depend on the job: so that its trigger fires.
    IF 0 IN (old_blocks, new_blocks) THEN
        UPDATE instances
        SET busy_blocks = instances.busy_blocks
        WHERE instances.id IN (old.instance_id, new.instance_id);
    END IF;
    RETURN NULL;
END
$$
