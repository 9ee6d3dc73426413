-- Blocks that one job occupies on the instance it is attached to; NULL where that cannot be read.
--
-- Guards: the integer at offer.blocks of jobs.job_runtime_data, 1 where dstack writes none (its
--         _get_job_occupied_blocks). NULL for text that is no JSON, or a value that is no integer from
--         0 to 999999: the callers count it as 1, and anomalies.sql lists it. A server's statement must
--         never fail over it. The upper bound keeps the sum of two thousand jobs within the column.
--         PostgreSQL's json cannot read the escape of a NUL or of half a surrogate pair either.
-- Locks:  nothing.
-- Costs:  one parse of the JSON text, some microseconds. The exception block opens a subtransaction
--         that writes nothing and so takes no transaction id; before PostgreSQL 18 it is also why
--         the function must not be declared PARALLEL SAFE. Without a search_path of its own, which costs
--         a quarter more: it names nothing but what is built in. A variable's type has its schema, as
--         PL/pgSQL asks the session's search_path for it, in which a temporary table comes first.
CREATE FUNCTION busy_blocks_of_job(job_runtime_data text) RETURNS integer
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    blocks pg_catalog.text;
BEGIN
    blocks := (job_runtime_data::json #> '{offer,blocks}')::text;
    RETURN CASE WHEN blocks IS NULL THEN 1 WHEN blocks ~ '^(-?0|[1-9][0-9]{0,5})$' THEN blocks::integer END;
EXCEPTION
    WHEN OTHERS THEN
        RETURN NULL;
END
$$
