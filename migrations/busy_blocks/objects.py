"""The database objects: their SQL files, and what the database has of them."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alembic import context
from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import DBAPIError

from busy_blocks.errors import is_lock_conflict

log = logging.getLogger("dstack.busy_blocks")

SQL = Path(__file__).resolve().parents[2] / "sql"

SQLITE_TABLE = "table/busy_blocks_writer"
# Of each revision, in the order of creation; dropped in the opposite one. The triggers of jobs come before
# those of instances: the latter alone would undo every number that the server writes.
OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "0001": {
        "postgresql": (
            "function/busy_blocks_of_job",
            "function/busy_blocks_noted",
            "function/busy_blocks_write",
            "function/busy_blocks_collect_jobs",
            "function/busy_blocks_collect_instances",
            "function/busy_blocks_apply",
            "function/busy_blocks_truncate",
            "function/busy_blocks_recompute",
            "trigger/busy_blocks_jobs_insert",
            "trigger/busy_blocks_jobs_update",
            "trigger/busy_blocks_jobs_delete",
            "trigger/busy_blocks_jobs_write",
            "trigger/busy_blocks_jobs_truncate",
            "trigger/busy_blocks_instances_update",
            "trigger/busy_blocks_instances_write",
            "trigger/busy_blocks_instances_write_sum",
        ),
        "sqlite": (
            SQLITE_TABLE,
            "view/busy_blocks_derived",
            "trigger/busy_blocks_jobs_insert",
            "trigger/busy_blocks_jobs_update",
            "trigger/busy_blocks_jobs_delete",
            "trigger/busy_blocks_instances_insert",
            # In this order: SQLite fires first what was created last.
            "trigger/busy_blocks_instances_sum",
            "trigger/busy_blocks_instances_update",
        ),
    },
    "0003": {
        "postgresql": ("function/busy_blocks_status", "trigger/busy_blocks_instances_write_status"),
        "sqlite": (
            "trigger/busy_blocks_instances_status_insert",
            "trigger/busy_blocks_instances_status_update",
        ),
    },
}
# Of revision 0001, where dstack has none on jobs.instance_id.
INDEX = "index/busy_blocks_jobs"


def read(dialect: str, name: str) -> str:
    """The one statement in `sql/<dialect>/<name>.sql`, with its comments, without a semicolon."""
    return (SQL / dialect / f"{name}.sql").read_text(encoding="utf-8").rstrip().removesuffix(";")


def without_header(statement: str) -> str:
    """The statement from its first word on; the databases keep no comment that stands before it."""
    return re.sub(r"\A(\s*--[^\n]*\n)*", "", statement)


def drop(dialect: str, name: str) -> str:
    """The statement that takes an object off, if it is there."""
    kind, _, object_name = name.partition("/")
    statement = f"DROP {kind.upper()} IF EXISTS {object_name}"
    if dialect == "postgresql" and kind == "trigger":
        statement += " ON instances" if "_instances_" in object_name else " ON jobs"
    return statement


def begin(dialect: str, execute: Callable[[str], object]) -> None:
    """The first statements of a transaction that installs or removes, for online and offline alike."""
    if dialect == "postgresql":
        # Below deadlock_timeout (1 s by default); see sql/postgresql/lock.sql.
        execute("SET LOCAL lock_timeout = '250ms'")
        execute(read(dialect, "session"))
        execute(read(dialect, "lock"))
    elif not context.is_offline_mode():
        # sqlite3 opens no transaction for DDL by itself (Python documentation, sqlite3, "Transaction
        # control").
        execute("BEGIN IMMEDIATE")


def create(dialect: str, revision: str, execute: Callable[[str], object]) -> None:
    """Create a revision's objects but the index, in the transaction that begin() prepared."""
    for name in OBJECTS[revision][dialect]:
        execute(read(dialect, name))


def remove(dialect: str, revision: str, execute: Callable[[str], object]) -> None:
    """Drop what is there of a revision's objects, in the transaction that begin() prepared."""
    for name in reversed(OBJECTS[revision][dialect]):
        execute(drop(dialect, name))
    if revision == "0001":
        execute(drop(dialect, INDEX))


def remove_all(dialect: str, execute: Callable[[str], object]) -> None:
    """Drop every object that is there, in the transaction that begin() prepared."""
    for revision in reversed(OBJECTS):
        remove(dialect, revision, execute)


def _names(dialect: str, revision: str) -> list[str]:
    """The objects that a database at this revision has."""
    return [name for at, names in OBJECTS.items() if at <= revision for name in names[dialect]]


def needs_index(connection: Connection) -> bool:
    """Whether neither dstack nor we have a usable index on jobs.instance_id."""
    return states(connection, "0001").get(INDEX) in ("missing", "invalid")


def build_index(connection: Connection) -> None:
    """Build PostgreSQL's index where there is none, in autocommit; without it all is right, and slower.

    CREATE INDEX CONCURRENTLY waits for every older snapshot, of a pg_dump for example. A lock_timeout of
    the session bounds that; a build that failed leaves an invalid index, which is dropped.
    """
    try:
        connection.execute(text(drop("postgresql", INDEX)))
        if states(connection, "0001").get(INDEX) == "missing":
            connection.execute(text(read("postgresql", INDEX)))
    except DBAPIError as error:
        if not is_lock_conflict(error):
            raise
        connection.execute(text(drop("postgresql", INDEX)))
        log.warning("The index busy_blocks_jobs waits for an older transaction: the next run builds it")


def schema(connection: Connection) -> str | None:
    """The schema of dstack's tables on PostgreSQL, where ours belong too; None on SQLite."""
    if connection.dialect.name != "postgresql":
        return None
    statement = "SELECT nspname FROM pg_class INNER JOIN pg_namespace ON relnamespace = pg_namespace.oid"
    statement += " WHERE pg_class.oid = to_regclass('instances')"
    name = connection.scalar(text(statement))
    return None if name is None else str(name)


STRAYS = {
    "postgresql": text("""
        SELECT tgname AS name, format('DROP TRIGGER %I ON %s', tgname, CAST(tgrelid AS regclass)) AS statement
        FROM pg_trigger
        INNER JOIN pg_proc ON pg_trigger.tgfoid = pg_proc.oid
        WHERE
            tgrelid IN (to_regclass('jobs'), to_regclass('instances'))
            AND NOT tgisinternal
            AND (tgname LIKE 'busy\\_blocks\\_%' OR proname LIKE 'busy\\_blocks\\_%')
    """),
    "sqlite": text("""
        SELECT name, printf('DROP TRIGGER "%w"', name) AS statement
        FROM sqlite_master
        WHERE type = 'trigger' AND name GLOB 'busy_blocks_*'
    """),
}


def strays(connection: Connection, revision: str) -> dict[str, str]:
    """Triggers with a name or a function of ours that are none of the revision's, and how to drop each.

    They come by hand or from another release of this package, count twice, and hold our functions.
    """
    dialect = connection.dialect.name
    rows = connection.execute(STRAYS[dialect])
    found = {f"trigger/{row.name}": row.statement for row in rows}
    return {name: found[name] for name in sorted(found.keys() - set(_names(dialect, revision)))}


def states(connection: Connection, revision: str) -> dict[str, str]:
    """What the database has of each of the revision's objects.

    One of installed, altered, disabled, invalid, missing and, for triggers that are not the revision's,
    stray. Reads the catalogue, and whether SQLite's table is empty. The index is listed where one is needed,
    or ours exists.
    """
    dialect = connection.dialect.name
    find = _states_postgresql if dialect == "postgresql" else _states_sqlite
    return find(connection, _names(dialect, revision)) | dict.fromkeys(strays(connection, revision), "stray")


INDEXES_SQLITE = text("""
    SELECT list.name
    FROM pragma_index_list('jobs') AS list
    INNER JOIN pragma_index_info(list.name) AS info ON info.seqno = 0
    WHERE info.name = 'instance_id' AND NOT list.partial
""")


def _states_sqlite(connection: Connection, names: list[str]) -> dict[str, str]:
    # sqlite_schema keeps the text of a CREATE statement as it was given (SQLite documentation,
    # "The Schema Table"), so it can be compared to the letter.
    rows = connection.execute(
        text("SELECT type, name, sql FROM sqlite_master WHERE name GLOB 'busy_blocks_*'")
    )
    found = {f"{row.type}/{row.name}": row.sql for row in rows}
    result = {}
    if INDEX in found or not connection.execute(INDEXES_SQLITE).first():
        names = [INDEX, *names]
    for name in names:
        if name not in found:
            result[name] = "missing"
        elif found[name] == without_header(read("sqlite", name)):
            result[name] = "installed"
        else:
            result[name] = "altered"
    if (
        result.get(SQLITE_TABLE) == "installed"
        and connection.execute(text("SELECT * FROM busy_blocks_writer")).first()
    ):
        # Left by a statement OR FAIL, or by hand: the triggers would take others' numbers for ours.
        result[SQLITE_TABLE] = "altered"
    return result


# "char" is cast: asyncpg gives it as bytes, psycopg as str.
FUNCTIONS = text("""
    SELECT
        proname, prosrc, proisstrict, prosecdef, proconfig, CAST(provolatile AS text) AS provolatile,
        CAST(proparallel AS text) AS proparallel, quote_ident(nspname) AS schema
    FROM pg_proc
    INNER JOIN pg_namespace ON pg_proc.pronamespace = pg_namespace.oid
    INNER JOIN pg_class ON pg_class.relnamespace = pg_namespace.oid
    WHERE pg_class.oid = to_regclass('instances') AND proname LIKE 'busy\\_blocks\\_%'
""")
TRIGGERS = text("""
    SELECT tgname, CAST(tgenabled AS text) AS tgenabled, pg_get_triggerdef(pg_trigger.oid) AS definition
    FROM pg_trigger
    WHERE tgrelid IN (to_regclass('jobs'), to_regclass('instances')) AND NOT tgisinternal
""")
INDEXES = text("""
    SELECT pg_class.relname, indisvalid, pg_get_indexdef(indexrelid) AS definition
    FROM pg_index
    INNER JOIN pg_class ON pg_index.indexrelid = pg_class.oid
    INNER JOIN pg_attribute ON pg_attribute.attrelid = pg_index.indrelid AND attnum = indkey[0]
    WHERE pg_index.indrelid = to_regclass('jobs') AND attname = 'instance_id'
""")


def _states_postgresql(connection: Connection, names: list[str]) -> dict[str, str]:
    functions = {row.proname: row for row in connection.execute(FUNCTIONS)}
    triggers = {row.tgname: row for row in connection.execute(TRIGGERS)}
    indexes = {row.relname: row for row in connection.execute(INDEXES)}
    result = {}
    ours = indexes.pop("busy_blocks_jobs", None)
    if ours is not None:
        expected = read("postgresql", INDEX)
        same = _comparable(ours.definition) == _comparable(expected)
        result[INDEX] = "invalid" if not ours.indisvalid else "installed" if same else "altered"
    elif not any(index.indisvalid for index in indexes.values()):
        result[INDEX] = "missing"
    for name in names:
        kind, _, object_name = name.partition("/")
        statement = read("postgresql", name)
        row = (functions if kind == "function" else triggers).get(object_name)
        if row is None:
            result[name] = "missing"
        elif kind == "function":
            result[name] = "installed" if _is_function(row, statement) else "altered"
        elif row.tgenabled == "D":
            result[name] = "disabled"
        elif row.tgenabled == "O" and _comparable(row.definition) == _comparable(statement):
            result[name] = "installed"
        else:
            result[name] = "altered"
    return result


def _is_function(row: Row[Any], statement: str) -> bool:
    header, body, _ = statement.split("$$")
    expected_config = [f"search_path={row.schema}, pg_temp"] if "\nSET search_path" in header else None
    return bool(
        row.prosrc == body
        and row.proconfig == expected_config
        and row.provolatile == ("i" if "\nIMMUTABLE\n" in header else "v")
        and row.proparallel == "u"
        and not row.prosecdef
        and not row.proisstrict
    )


def _comparable(definition: str) -> str:
    # The server gives a definition back with schema names, parentheses and casts of its own; the status is an
    # enum in the older releases of dstack, text later.
    definition = without_header(definition).lower()
    definition = definition.replace(" concurrently", "")
    definition = re.sub(r"::\w+", "", definition)
    definition = re.sub(r'\b(on|function) (?:\w+|"(?:[^"]|"")+")\.', r"\1 ", definition)
    return " ".join(re.sub(r"[()\s]+", " ", definition).split())
