-- Row trigger function of instances, BEFORE: what anybody else writes into busy_blocks is not kept.
--
-- Guards: a number written by the server or by hand is replaced by the value that the row has; a new
--         or a PENDING instance has 0. What is pending for an instance that the transaction deleted is
--         not added to a new one with its id. A trigger of somebody else's that fires after this one, in
--         the order of the names, can still write what it likes.
-- Locks:  nothing; the row is locked by the statement already.
-- Costs:  no query, but for one look by primary key where an id is used again.
CREATE FUNCTION busy_blocks_guard() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    pending text := coalesce(current_setting('busy_blocks.pending', true), '');
    entry integer := strpos(pending, new.id::text);
BEGIN
    IF tg_op = 'INSERT' THEN
        new.busy_blocks := 0;
        -- An upsert gets here too, and may go on to the row that is there.
        IF entry > 0 AND NOT EXISTS (SELECT FROM instances WHERE instances.id = new.id) THEN
            pending := overlay(pending PLACING lpad('0', 12) FROM entry + 36);
            PERFORM set_config('busy_blocks.pending', pending, true);
        END IF;
    ELSIF new.status = 'PENDING' THEN
        new.busy_blocks := 0;
    ELSIF current_setting('busy_blocks.writer', true) IS DISTINCT FROM new.id::text THEN
        new.busy_blocks := old.busy_blocks;
    END IF;
    RETURN new;
END
$$
