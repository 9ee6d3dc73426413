-- Sets the search_path and the role that the objects are created with, for this transaction.
--
-- Guards: the functions are pinned to this search_path: the tables may live in any schema, a caller may
--         have any search_path, and a dump is restored with an empty one. pg_temp stands last, so that no
--         temporary table is taken for a real one. The objects belong to the owner of the tables, also
--         when a superuser runs this: the server's role has to take them off before an upgrade.
-- Locks:  nothing.
-- Costs:  nothing.
SELECT
    set_config('search_path', quote_ident(pg_namespace.nspname) || ', pg_temp', TRUE) AS search_path,
    set_config('role', pg_get_userbyid(pg_class.relowner), TRUE) AS role_name
FROM pg_class
INNER JOIN pg_namespace ON pg_class.relnamespace = pg_namespace.oid
WHERE pg_class.oid = 'instances'::regclass
