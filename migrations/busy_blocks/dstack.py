"""The host: dstack's own migrations, its tables, and what an upgrade that failed left behind."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from alembic import command, context
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from busy_blocks.errors import Refused

log = logging.getLogger("dstack.busy_blocks")

LOCATION = "dstack._internal.server:migrations"
# dstack's services/locking.py: string_to_lock_id("migrations"), since 0.18.
MIGRATIONS_LOCK = int(hashlib.sha256(b"migrations").hexdigest(), 16) % 2**63
TABLES = {
    "instances": ("id", "name", "status", "busy_blocks"),
    "jobs": ("id", "instance_id", "job_runtime_data"),
}


def _config() -> Config:
    # The same three lines as in dstack's server/db.py, _run_alembic_upgrade, but for the location.
    config = Config()
    config.set_main_option("script_location", LOCATION)
    config.set_main_option("recursive_version_locations", "true")
    return config


def scripts() -> ScriptDirectory | None:
    """dstack's migration scripts, or None where no dstack server can be imported."""
    try:
        # Fails on a dstack without its extra `server`, which cannot run migrations either.
        import dstack._internal.server.models  # noqa: F401
    except ImportError:
        return None
    return ScriptDirectory.from_config(_config())


def current(connection: Connection) -> set[str]:
    """dstack's revisions in the database, as its table alembic_version has them."""
    return set(MigrationContext.configure(connection).get_current_heads())


def is_ahead(script: ScriptDirectory, revisions: set[str]) -> bool:
    """Whether the database is from a newer release than these scripts, dstack's or ours: they do not know it."""
    known = {revision.revision for revision in script.walk_revisions()}
    return not revisions <= known


def upgrade(connection: Connection, script: ScriptDirectory) -> None:
    """Run dstack's own migrations to its head on this connection, as its server does.

    Writes dstack's schema and its version table. Raises whatever they raise.
    """
    before = current(connection)
    if before != set(script.get_heads()):
        log.info(
            "dstack %s: taking its schema from %s to %s",
            version("dstack"),
            ", ".join(sorted(before)) or "an empty database",
            ", ".join(script.get_heads()),
        )
    connection.commit()
    config = _config()
    config.attributes["connection"] = connection
    with preserved_context():
        command.upgrade(config, "head")
    connection.commit()


@contextmanager
def preserved_context() -> Iterator[None]:
    """Keep `alembic.context` usable after an inner run: its proxy does not nest."""
    names = dict(vars(context))
    try:
        yield
    finally:
        vars(context).update(names)


def clear_leftovers(connection: Connection) -> None:
    """Drop the `_alembic_tmp_*` copies that a failed SQLite migration of dstack left behind.

    alembic fills such a table, drops the original and renames the copy (its batch mode); with the
    original still there the copy is worth nothing, and it fails every retry.

    Raises:
        Refused: a copy is there and its original is not.
    """
    if connection.dialect.name != "sqlite":
        return
    tables = set(inspect(connection).get_table_names())
    leftovers = sorted(name for name in tables if name.startswith("_alembic_tmp_"))
    for leftover in leftovers:
        original = leftover.removeprefix("_alembic_tmp_")
        if original not in tables:
            raise Refused(
                f"The table {original} is gone and its copy {leftover} is there: a migration of dstack"
                " was cut off in the middle. Nothing was changed. Restore the database from a backup,"
                " then run `alembic upgrade head`."
            )
    if not leftovers:
        return
    connection.commit()
    connection.execute(text("PRAGMA foreign_keys=OFF"))
    for leftover in leftovers:
        log.warning("Dropping %s, the copy that a failed migration of dstack left behind", leftover)
        connection.execute(text(f'DROP TABLE "{leftover}"'))
    connection.commit()
    connection.execute(text("PRAGMA foreign_keys=ON"))
    connection.commit()


def check_is_dstack(connection: Connection, revisions: set[str]) -> None:
    """Raises Refused where tables are there, and none of them says that they are dstack's.

    An empty database may become one of dstack's; somebody else's may not.
    """
    tables = inspect(connection).get_table_names()
    if tables and not revisions:
        raise Refused(
            f"This is not the database of a dstack server: it has tables ({tables[0]}, ...) but no"
            " alembic_version of dstack's. Nothing was changed. Set DSTACK_DATABASE_URL as the server"
            " has it, then run `alembic upgrade head`."
        )


def check_schema(connection: Connection) -> None:
    """Raises Refused where the tables and columns that the triggers need are not all there."""
    inspector = inspect(connection)
    for table, columns in TABLES.items():
        if not inspector.has_table(table):
            raise Refused(
                f"This is not the database of a dstack server: it has no table {table}. Nothing was"
                " changed. Set DSTACK_DATABASE_URL as the server has it; beside dstack[server] and without"
                " -x dstack=skip, `alembic upgrade head` makes the tables of an empty one."
            )
        missing = set(columns) - {column["name"] for column in inspector.get_columns(table)}
        if missing:
            raise Refused(
                f"The table {table} has no column {', '.join(sorted(missing))}: this database is from"
                " a dstack older than 0.18.41, or from one that changed them. Nothing was changed."
                " Upgrade dstack, then run `alembic upgrade head`."
            )
