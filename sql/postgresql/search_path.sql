-- Sets the search_path that the functions are created with, and so pinned to, for this transaction.
--
-- Guards: the tables may live in any schema, a caller may have any search_path, and a dump is restored
--         with an empty one. pg_temp stands last, so that no temporary table is taken for a real one.
-- Locks:  nothing.
-- Costs:  nothing.
SELECT set_config('search_path', quote_ident(pg_namespace.nspname) || ', pg_temp', TRUE)
FROM pg_class
INNER JOIN pg_namespace ON pg_class.relnamespace = pg_namespace.oid
WHERE pg_class.oid = 'instances'::regclass
