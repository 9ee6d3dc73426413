-- Statement trigger function of jobs: TRUNCATE fires no row trigger.
--
-- Guards: after TRUNCATE jobs no job is attached anywhere. Naming the status makes
--         busy_blocks_recompute sum anew; all rows, so that a transaction with an older snapshot fails
--         to serialize instead of missing one. (Where TRUNCATE has the older snapshot itself, at REPEATABLE
--         READ, an instance that came later is not seen here.)
-- Locks:  every instance, until the transaction ends.
-- Costs:  one UPDATE of every instance per TRUNCATE.
CREATE FUNCTION busy_blocks_truncate() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    UPDATE instances SET status = instances.status;
    RETURN NULL;
END
$$
