-- Deferred trigger function of jobs and of instances: writes what the transaction noted, at commit.
--
-- Guards: the counter of every instance that the transaction has put off. The first call writes it all,
--         those for the transaction's other rows find nothing left.
-- Locks:  see busy_blocks_write; until the commit is done, a moment later.
-- Costs:  nothing where the server's own number was right; else those of busy_blocks_write. The search_path
--         is set just to find that one, for most calls need none, and to set it for each costs as much
--         again. Until then the names are found by the session's: hence those with a schema.
--
-- At commit and for each row, because a statement trigger is not sure to fire: PostgreSQL drops the one
-- that an UPDATE of jobs queued when a second UPDATE in the same WITH names other columns. After SET
-- CONSTRAINTS ALL IMMEDIATE triggers fire in the order of their names: hence those that collect (insert,
-- update, delete) come before those that write.
--
-- A deferred trigger of somebody else's that writes busy_blocks whenever this does would keep the COMMIT
-- from ending: what is put off when one instance was written a hundred times over, with no statement of the
-- transaction's own in between (busy_blocks_collect_instances sees those), is left so, with a warning.
CREATE FUNCTION busy_blocks_apply() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    path_before pg_catalog.text;
    repeated pg_catalog.text;
BEGIN
    IF current_setting('busy_blocks.pending', true) <> '' THEN
        path_before := current_setting('search_path');
        PERFORM set_config('search_path', pg_catalog.quote_ident(tg_table_schema) || ', pg_temp', true);
        IF tg_table_name = 'instances' THEN
            repeated := busy_blocks_noted(coalesce(current_setting('busy_blocks.repeated', true), ''), new.id, 1);
            PERFORM set_config('busy_blocks.repeated', repeated, true);
        END IF;
        IF substr(split_part(repeated, new.id::text, 2), 1, 12)::integer > 100 THEN
            RAISE WARNING 'another trigger writes instances.busy_blocks again and again: it is left as it is';
            PERFORM set_config('busy_blocks.pending', '', true), set_config('busy_blocks.repeated', '', true);
        ELSE
            PERFORM busy_blocks_write();
        END IF;
        PERFORM set_config('search_path', path_before, true);
    END IF;
    RETURN NULL;
END
$$
