-- Statement trigger function of jobs: TRUNCATE fires no row trigger.
--
-- Guards: after TRUNCATE jobs no job is attached anywhere.
-- Locks:  every instance whose counter is not 0.
-- Costs:  one scan of instances per TRUNCATE.
CREATE FUNCTION busy_blocks_truncate() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET "busy_blocks.writer" TO 'trigger'
AS $$
BEGIN
    UPDATE instances SET busy_blocks = 0 WHERE busy_blocks <> 0;
    RETURN NULL;
END
$$
