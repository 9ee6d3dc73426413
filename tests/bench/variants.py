"""What ours is compared with: what others do, in its simplest form."""

from support import Database

from bench import postgresql, sqlite

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

_BLOCKS_OF_OLD, _BLOCKS_OF_NEW = sqlite.BLOCKS.format(job="old"), sqlite.BLOCKS.format(job="new")
DELTA_SQLITE = (
    # Not empty while the difference is added: SQLite has no other way to tell who writes.
    "CREATE TABLE delta_writes (instance_id CHAR(32))",
    f"""
    CREATE TRIGGER delta_jobs AFTER UPDATE OF instance_id ON jobs
    WHEN old.instance_id IS NOT new.instance_id
    BEGIN
        INSERT INTO delta_writes VALUES (new.instance_id);
        UPDATE instances SET busy_blocks = busy_blocks - {_BLOCKS_OF_OLD} WHERE id = old.instance_id;
        UPDATE instances SET busy_blocks = busy_blocks + {_BLOCKS_OF_NEW} WHERE id = new.instance_id;
        DELETE FROM delta_writes;
    END
    """,
    """
    CREATE TRIGGER delta_instances AFTER UPDATE OF busy_blocks ON instances
    WHEN old.busy_blocks <> new.busy_blocks AND NOT EXISTS (SELECT 1 FROM delta_writes)
    BEGIN
        UPDATE instances SET busy_blocks = old.busy_blocks WHERE id = new.id;
    END
    """,
)
NAIVE_SQLITE = (
    f"""
    CREATE TRIGGER naive_jobs AFTER UPDATE OF instance_id, job_runtime_data ON jobs
    BEGIN
        UPDATE instances SET busy_blocks = {sqlite.ATTACHED_BLOCKS}
        WHERE id IN (old.instance_id, new.instance_id);
    END
    """,
    f"""
    CREATE TRIGGER naive_instances AFTER UPDATE OF busy_blocks, status ON instances
    BEGIN
        UPDATE instances SET busy_blocks = {sqlite.ATTACHED_BLOCKS} WHERE id = new.id;
    END
    """,
)
# The least that triggers of this kind can cost: ours, installed whole, with functions that do nothing.
EMPTY = tuple(
    f"CREATE OR REPLACE FUNCTION busy_blocks_{name}() RETURNS trigger LANGUAGE plpgsql"
    " AS $$ BEGIN RETURN NULL; END $$"
    for name in ("collect_jobs", "collect_instances", "apply", "recompute", "status")
)
STATEMENTS = {
    ("postgresql", "empty"): EMPTY,
    ("postgresql", "delta"): DELTA_POSTGRESQL,
    ("postgresql", "naive"): NAIVE_POSTGRESQL,
    ("sqlite", "delta"): DELTA_SQLITE,
    ("sqlite", "naive"): NAIVE_SQLITE,
}


def install(database: Database, kind: str) -> None:
    """Put the triggers of that kind on; there are none for "none", "again" and "reconciler"."""
    if kind in ("ours", "empty"):
        database.upgrade()
        check_on(database)
    for statement in STATEMENTS.get((database.dialect, kind), ()):
        # Without SQLAlchemy, which would take % for a parameter.
        engine = postgresql if database.dialect == "postgresql" else sqlite
        engine.connect(database).execute(statement)


def check_on(database: Database) -> None:
    """Ours undoes a wrong number; right counters alone, after work done right, do not tell that it is there."""
    with database.begin() as connection:
        connection.exec_driver_sql("UPDATE instances SET busy_blocks = busy_blocks + 1")
    database.check_right()
