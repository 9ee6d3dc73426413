-- Adds one difference, of one instance, to what a transaction has noted.
--
-- Guards: the form of the setting busy_blocks.pending: 48 characters an instance, its id (36) and by how
--         much its counter is off (12, padded). An instance whose counter is right again has none.
-- Locks:  nothing.
-- Costs:  a search of the text. It has no search_path of its own, which would keep it from being inlined:
--         it names nothing outside pg_catalog, and those who call it have one.
CREATE FUNCTION busy_blocks_noted(pending text, instance uuid, difference bigint) RETURNS text
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT CASE
        WHEN strpos(pending, instance::text) = 0
            THEN pending || instance::text || lpad(difference::text, 12)
        WHEN difference <> 0 AND substr(pending, strpos(pending, instance::text) + 36, 12)::bigint = -difference
            THEN overlay(pending PLACING '' FROM strpos(pending, instance::text) FOR 48)
        ELSE overlay(
            pending PLACING lpad(
                (substr(pending, strpos(pending, instance::text) + 36, 12)::bigint + difference)::text, 12
            ) FROM strpos(pending, instance::text) + 36
        )
    END
$$
