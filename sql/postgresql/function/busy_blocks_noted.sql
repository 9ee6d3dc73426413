-- Adds one difference, of one instance, to what a transaction has noted.
--
-- Guards: the form of the setting busy_blocks.pending: 48 characters an instance, its id (36) and by how
--         much its counter is off (12, padded). An instance whose counter comes right again loses it.
-- Locks:  nothing.
-- Costs:  a search in the text, and a copy of it. None of the functions here counts characters, which takes
--         ten times as long in UTF-8. No search_path of its own, as in busy_blocks_of_job.
CREATE FUNCTION busy_blocks_noted(pending text, instance uuid, difference bigint) RETURNS text
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    before pg_catalog.text := substr(split_part(pending, instance::text, 2), 1, 12);
BEGIN
    RETURN CASE
        WHEN before = '' THEN pending || instance::text || lpad(difference::text, 12)
        WHEN before::bigint = -difference THEN replace(pending, instance::text || before, '')
        ELSE replace(
            pending, instance::text || before, instance::text || lpad((before::bigint + difference)::text, 12)
        )
    END;
END
$$
