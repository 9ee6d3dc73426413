-- Guards: an instance whose status (or id) a statement names: the change to or from PENDING; and any counter
--         that is wrong all the same, as they were before the triggers came. The other triggers
--         get here by naming the status. Created before busy_blocks_instances_update, so that it fires after
--         it: SQLite fires what was created last first, though it documents no order.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum per statement and instance that sets one of the columns; another and one write where the
--         number is not the sum. A heartbeat or lock update is compiled without this trigger.
CREATE TRIGGER busy_blocks_instances_sum
AFTER UPDATE OF id, status ON instances
WHEN
    EXISTS (
        SELECT 1 FROM busy_blocks_derived AS derived
        WHERE derived.instance_id = new.id AND derived.is_now IS NOT derived.busy_blocks
    )
BEGIN
    INSERT INTO busy_blocks_writer VALUES (new.id);
    UPDATE instances
    SET
        busy_blocks = (
            SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
            WHERE derived.instance_id = new.id
        )
    WHERE id = new.id;
    DELETE FROM busy_blocks_writer
    WHERE instance_id = new.id;
END
