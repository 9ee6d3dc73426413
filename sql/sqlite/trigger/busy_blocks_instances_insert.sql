-- Guards: the number that a new instance is inserted with.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum per inserted instance, and one write where the number is not the sum.
CREATE TRIGGER busy_blocks_instances_insert
AFTER INSERT ON instances
WHEN
    new.busy_blocks IS NOT (
        SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
        WHERE derived.instance_id = new.id
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
