-- Row trigger function of instances, BEFORE: what anybody else writes into busy_blocks is not kept.
--
-- Guards: a number written by the server or by hand is replaced by the value that the row has; a new
--         or a PENDING instance has 0. A trigger of somebody else's that fires after this one, in the
--         order of the names, can still write what it likes.
-- Locks:  nothing; the row is locked by the statement already.
-- Costs:  no query.
CREATE FUNCTION busy_blocks_guard() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF tg_op = 'INSERT' OR new.status = 'PENDING' THEN
        new.busy_blocks := 0;
    ELSIF current_setting('busy_blocks.writer', true) IS DISTINCT FROM new.id::text THEN
        new.busy_blocks := old.busy_blocks;
    END IF;
    RETURN new;
END
$$
