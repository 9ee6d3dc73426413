-- Deferred trigger function of instances: sums the attached jobs anew, at commit.
--
-- Guards: the number that an instance is inserted with, promotion from PENDING, and self-healing: whatever
--         left the counter wrong (triggers disabled, a restore, an upgrade without the hook) ends at the
--         next change of the instance's status, or by hand with UPDATE instances SET status = status.
-- Locks:  nothing new; the transaction holds the row since the statement that fired this. Of an instance
--         that is inserted, or gets another id, the jobs that it has already: KEY SHARE.
-- Costs:  one JSON parse per attached job, for each instance inserted, or whose status a statement named.
--         dstack changes it with none or one job attached, mostly.
--
-- The sum has what the transaction did to jobs already, so what is noted for this instance must not be
-- added once more, neither by what the UPDATE here fires nor later. At commit all of it is noted; after SET
-- CONSTRAINTS ALL IMMEDIATE, in the middle of a statement that also moves jobs of the instance, it need
-- not be: hence no sum for the status that busy_blocks_status writes.
CREATE FUNCTION busy_blocks_recompute() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
<<own>>
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    blocks bigint;
    writer_before text := coalesce(current_setting('busy_blocks.writer', true), '');
BEGIN
    IF writer_before = new.id::text THEN
        RETURN NULL;
    END IF;
    IF tg_op = 'INSERT' OR old.id <> new.id THEN
        -- An id that is used again: what an older snapshot still shows of it must fail to serialize.
        PERFORM FROM instances WHERE instances.id = new.id FOR KEY SHARE;
        PERFORM FROM jobs WHERE jobs.instance_id = new.id FOR KEY SHARE;
    END IF;
    -- The row as it is now, which may be a later one than new.
    blocks := least(2147483647, (
        SELECT
            CASE
                WHEN instances.status = 'PENDING' THEN 0
                ELSE (
                    SELECT coalesce(sum(coalesce(busy_blocks_of_job(jobs.job_runtime_data), 1)), 0)
                    FROM jobs
                    WHERE jobs.instance_id = instances.id
                )
            END
        FROM instances
        WHERE instances.id = new.id
    ));
    PERFORM set_config(
        'busy_blocks.pending',
        replace(pending, new.id::text || substr(split_part(pending, new.id::text, 2), 1, 12), ''),
        true
    );
    PERFORM set_config('busy_blocks.writer', new.id::text, true);
    UPDATE instances
    SET busy_blocks = own.blocks
    WHERE instances.id = new.id AND instances.busy_blocks <> own.blocks;
    PERFORM set_config('busy_blocks.writer', writer_before, true);
    RETURN NULL;
END
$$
