-- Deferred trigger function of jobs and of instances: writes what the transaction noted, at commit.
--
-- Guards: the counter of every instance that the transaction has put off. The first call writes it all,
--         those for the transaction's other rows find nothing left.
-- Locks:  see busy_blocks_write; until the commit is done, a moment later.
-- Costs:  nothing where the server's own number was right; else those of busy_blocks_write. The search_path
--         is set just to find that one, for most calls need none, and to set it for each costs as much
--         again.
--
-- At commit and for each row, because a statement trigger is not sure to fire: PostgreSQL drops the one
-- that an UPDATE of jobs queued when a second UPDATE in the same WITH names other columns. After SET
-- CONSTRAINTS ALL IMMEDIATE triggers fire in the order of their names: hence those that collect (insert,
-- update, delete) come before those that write.
--
-- A deferred trigger of somebody else's that writes busy_blocks whenever this does would keep the COMMIT
-- from ending: what is put off a hundred times over, with no statement of the transaction's own in between
-- (busy_blocks_collect_instances sees those), is left so, with a warning.
CREATE FUNCTION busy_blocks_apply() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    path_before text;
BEGIN
    IF current_setting('busy_blocks.pending', true) <> '' THEN
        IF tg_table_name = 'instances' THEN
            PERFORM set_config(
                'busy_blocks.repeated', coalesce(current_setting('busy_blocks.repeated', true), '') || '.', true
            );
        END IF;
        IF octet_length(current_setting('busy_blocks.repeated', true)) > 100 THEN
            RAISE WARNING 'another trigger writes instances.busy_blocks again and again: it is left as it is';
            PERFORM set_config('busy_blocks.pending', '', true), set_config('busy_blocks.repeated', '', true);
        ELSE
            path_before := current_setting('search_path');
            PERFORM set_config('search_path', quote_ident(tg_table_schema) || ', pg_temp', true);
            PERFORM busy_blocks_write();
            PERFORM set_config('search_path', path_before, true);
        END IF;
    END IF;
    RETURN NULL;
END
$$
