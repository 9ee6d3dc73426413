"""What is compared: no triggers, ours, and what others do."""

from support import Database

from bench import postgresql

# The counter cache: the difference is added, and what the server itself writes is ignored. Right while all
# who write go through it; a counter that is wrong stays wrong.
DELTA_POSTGRESQL = (
    """
    CREATE FUNCTION delta_blocks(data text) RETURNS integer LANGUAGE sql IMMUTABLE AS
    $$ SELECT coalesce((data::json #>> '{offer,blocks}')::integer, 1) $$
    """,
    """
    CREATE FUNCTION delta_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF old.instance_id IS NOT NULL THEN
            UPDATE instances SET busy_blocks = busy_blocks - delta_blocks(old.job_runtime_data)
            WHERE id = old.instance_id;
        END IF;
        IF new.instance_id IS NOT NULL THEN
            UPDATE instances SET busy_blocks = busy_blocks + delta_blocks(new.job_runtime_data)
            WHERE id = new.instance_id;
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE FUNCTION delta_instances() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        new.busy_blocks := old.busy_blocks;
        RETURN new;
    END $$
    """,
    """
    CREATE TRIGGER delta_jobs AFTER UPDATE OF instance_id ON jobs
    FOR EACH ROW WHEN (old.instance_id IS DISTINCT FROM new.instance_id) EXECUTE FUNCTION delta_jobs()
    """,
    """
    CREATE TRIGGER delta_instances BEFORE UPDATE OF busy_blocks ON instances
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION delta_instances()
    """,
)

# What first comes to mind: the sum, whenever either table changes.
NAIVE_POSTGRESQL = (
    """
    CREATE FUNCTION naive_sum(instance uuid) RETURNS void LANGUAGE sql AS $$
        UPDATE instances SET busy_blocks = (
            SELECT coalesce(sum(coalesce((job_runtime_data::json #>> '{offer,blocks}')::integer, 1)), 0)
            FROM jobs WHERE instance_id = instance
        ) WHERE id = instance
    $$
    """,
    """
    CREATE FUNCTION naive_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM naive_sum(old.instance_id), naive_sum(new.instance_id);
        RETURN NULL;
    END $$
    """,
    """
    CREATE FUNCTION naive_instances() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM naive_sum(new.id);
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER naive_jobs AFTER UPDATE OF instance_id, job_runtime_data ON jobs
    FOR EACH ROW EXECUTE FUNCTION naive_jobs()
    """,
    """
    CREATE TRIGGER naive_instances AFTER UPDATE OF busy_blocks, status ON instances
    FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION naive_instances()
    """,
)

STATEMENTS = {("postgresql", "delta"): DELTA_POSTGRESQL, ("postgresql", "naive"): NAIVE_POSTGRESQL}


def install(database: Database, kind: str) -> None:
    if kind == "ours":
        database.upgrade()
    for statement in STATEMENTS.get((database.dialect, kind), ()):
        with postgresql.connect(database) as connection:
            connection.execute(statement)
