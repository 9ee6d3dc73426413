-- Row trigger function of instances, BEFORE INSERT: a new instance begins with nothing noted.
--
-- Guards: an id that is used again in the transaction that deleted it: what was noted for the instance that
--         is gone is not added to the new one. An upsert gets here too, and may go on to the row that is
--         there.
-- Locks:  nothing.
-- Costs:  one look by primary key.
CREATE FUNCTION busy_blocks_forget() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM instances WHERE instances.id = new.id) THEN
        PERFORM set_config(
            'busy_blocks.pending',
            regexp_replace(current_setting('busy_blocks.pending'), new.id::text || '.{12}', ''),
            true
        );
    END IF;
    RETURN new;
END
$$
