-- The attached jobs by instance, each with the blocks it occupies, parsed once.
--
-- Guards: the cost of busy_blocks_derived: the sum over an instance reads this index and parses no JSON
--         (SQLite 3.40 and later; an older one parses, and is as right). The expression is the one in
--         view/busy_blocks_derived.sql.
-- Locks:  the database, as every write does in SQLite, while it is built.
-- Costs:  one entry per attached job, written when instance_id or job_runtime_data is.
CREATE INDEX busy_blocks_jobs ON jobs (
    instance_id,
    CASE
        WHEN NOT json_valid(job_runtime_data) THEN 1
        WHEN json_type(job_runtime_data, '$.offer.blocks') <> 'integer' THEN 1
        WHEN json_extract(job_runtime_data, '$.offer.blocks') BETWEEN 0 AND 999999
            THEN json_extract(job_runtime_data, '$.offer.blocks')
        ELSE 1
    END
)
WHERE instance_id IS NOT NULL
