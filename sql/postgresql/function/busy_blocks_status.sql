-- Deferred trigger function of instances: BUSY while a job is attached, IDLE while none is.
--
-- Guards: the status of an instance that is BUSY or IDLE at commit; every other is left alone. An instance
--         that becomes IDLE here has its idle time counted from now (last_job_processed_at, in UTC): dstack
--         would count from the job before, and could terminate at once what has just been busy.
-- Locks:  nothing new; the transaction holds the row since the statement that fired this, and so looks for
--         jobs when no other can change what it finds.
-- Costs:  one look for an attached job; one UPDATE where the status is wrong.
CREATE FUNCTION busy_blocks_status() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
<<own>>
DECLARE
    status text;
    is_attached boolean;
    writer_before text := coalesce(current_setting('busy_blocks.writer', true), '');
BEGIN
    SELECT
        instances.status,
        EXISTS (SELECT FROM jobs WHERE jobs.instance_id = instances.id)
    INTO own.status, own.is_attached
    FROM instances
    WHERE instances.id = new.id;
    IF own.status = (CASE WHEN own.is_attached THEN 'IDLE' ELSE 'BUSY' END) THEN
        PERFORM set_config('busy_blocks.writer', new.id::text, true);
        IF own.is_attached THEN
            UPDATE instances SET status = 'BUSY' WHERE instances.id = new.id;
        ELSE
            UPDATE instances
            SET status = 'IDLE', last_job_processed_at = timezone('UTC', clock_timestamp())
            WHERE instances.id = new.id;
        END IF;
        PERFORM set_config('busy_blocks.writer', writer_before, true);
    END IF;
    RETURN NULL;
END
$$
