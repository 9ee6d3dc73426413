-- Guards: any number that is written into busy_blocks, and the change to or from PENDING.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum per statement and instance that sets one of the columns, and one write where the
--         number is not the sum. A heartbeat or lock update is compiled without this trigger. Its own
--         write fires it again where recursive_triggers is on, and finds the number right.
CREATE TRIGGER busy_blocks_instances_update
AFTER UPDATE OF id, busy_blocks, status ON instances
WHEN
    new.busy_blocks IS NOT (
        SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
        WHERE derived.instance_id = new.id
    )
BEGIN
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = new.id
        )
    WHERE id = new.id;
END
