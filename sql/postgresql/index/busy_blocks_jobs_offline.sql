-- The same index, for a script that runs in one transaction (alembic upgrade head --sql).
--
-- Guards: as busy_blocks_jobs.sql; nothing is built where jobs.instance_id has an index already.
-- Locks:  SHARE on jobs while it is built: writers wait, for one scan of jobs.
-- Costs:  as busy_blocks_jobs.sql.
DO $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_index
        INNER JOIN pg_attribute ON pg_attribute.attrelid = pg_index.indrelid
        WHERE
            pg_index.indrelid = 'jobs'::regclass
            AND pg_index.indisvalid
            AND pg_attribute.attnum = pg_index.indkey[0]
            AND pg_attribute.attname = 'instance_id'
    ) THEN
        CREATE INDEX busy_blocks_jobs ON jobs USING btree (instance_id) WHERE instance_id IS NOT NULL;
    END IF;
END
$$
