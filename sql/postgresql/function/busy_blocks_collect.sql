-- Row trigger function of jobs: notes what one changed row changes on which instance.
--
-- Guards: the difference in blocks per instance, collected over the transaction in its local setting
--         busy_blocks.pending, 48 characters an entry: the instance's id (36) and the difference, padded
--         (12). busy_blocks_apply writes it at commit. A rollback, also to a savepoint, takes the setting
--         back with it.
-- Locks:  nothing; the instances are locked by busy_blocks_apply, in one order. Only from the 257th
--         instance of a transaction on, the instance itself, at once.
-- Costs:  one JSON parse for the old row if it was attached, one for the new row if it is; and the
--         search of the setting, which holds 256 entries at most, however many jobs are moved.
CREATE FUNCTION busy_blocks_collect() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    pending text;
    instance uuid;
    difference integer;
    entry integer;
BEGIN
    FOREACH instance IN ARRAY ARRAY[old.instance_id, nullif(new.instance_id, old.instance_id)] LOOP
        CONTINUE WHEN instance IS NULL;
        difference := 0;
        IF new.instance_id = instance THEN
            difference := difference + coalesce(busy_blocks_of_job(new.job_runtime_data), 1);
        END IF;
        IF old.instance_id = instance THEN
            difference := difference - coalesce(busy_blocks_of_job(old.job_runtime_data), 1);
        END IF;
        pending := coalesce(current_setting('busy_blocks.pending', true), '');
        entry := strpos(pending, instance::text);
        IF entry > 0 THEN
            difference := difference + substr(pending, entry + 36, 12)::integer;
            pending := overlay(pending PLACING lpad(difference::text, 12) FROM entry + 36);
        ELSIF length(pending) < 256 * 48 THEN
            pending := pending || instance::text || lpad(difference::text, 12);
        ELSE
            PERFORM busy_blocks_add(instance, difference);
            CONTINUE;
        END IF;
        PERFORM set_config('busy_blocks.pending', pending, true);
    END LOOP;
    RETURN NULL;
END
$$
