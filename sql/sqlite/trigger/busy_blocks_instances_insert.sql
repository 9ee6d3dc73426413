-- Guards: the number that a new instance is inserted with. Naming the status makes
--         busy_blocks_instances_sum sum anew.
-- Locks:  nothing new; the statement holds the database.
-- Costs:  one sum per inserted instance; two more and two writes where the number is not the sum.
CREATE TRIGGER busy_blocks_instances_insert
AFTER INSERT ON instances
WHEN
    new.busy_blocks IS NOT (
        SELECT derived.busy_blocks FROM busy_blocks_derived AS derived
        WHERE derived.instance_id = new.id
    )
BEGIN
    UPDATE instances
    SET status = status
    WHERE id = new.id;
END
