"""Connecting from the command line, and what has to hold before anything is changed."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from busy_blocks import urls
from busy_blocks.dstack import MIGRATIONS_LOCK
from busy_blocks.errors import Refused, is_lock_conflict

log = logging.getLogger("dstack.busy_blocks")

RETRY_INTERVAL = 0.5  # seconds
T = TypeVar("T")


def describe(url: URL) -> str:
    """The database in words that hold no password and none of the query, where one may be too."""
    return url.set(query={}).render_as_string(hide_password=True)


def check_exists(url: URL, creates: bool) -> None:
    """Raises Refused where a SQLite file is missing that this run does not create."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith("file:"):
        return
    path = Path(url.database)
    if path.exists():
        return
    if not creates:
        raise Refused(
            f"There is no database {path.absolute()}, and none was created. Set DSTACK_DATABASE_URL (or"
            " DSTACK_SERVER_DIR) as the dstack server has it; beside dstack[server] and without -x dstack=skip,"
            " `alembic upgrade head` creates the database."
        )
    if url == urls.default_url():
        # As the server does at its start (its server/settings.py, init_server_data_dir).
        path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def connect(url: URL, wait: float) -> Iterator[Connection]:
    """A connection by sqlite3 or psycopg; SQLite waits `wait` seconds for another writer.

    Raises:
        Refused: psycopg is not installed.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    try:
        engine = create_engine(
            urls.synchronous(url),
            poolclass=NullPool,
            connect_args={"timeout": wait} if is_sqlite else {},
        )
    except (ImportError, NoSuchModuleError):
        raise Refused(
            "The command line needs psycopg for PostgreSQL, which is not installed. Nothing was changed."
            " Run `pip install 'psycopg[binary]'`."
        ) from None
    if is_sqlite:

        @event.listens_for(engine, "connect")
        def set_foreign_keys(connection: sqlite3.Connection, _: Any) -> None:
            # As on the server's connections (dstack's server/db.py).
            connection.execute("PRAGMA foreign_keys=ON")

    with engine.connect() as connection:
        yield connection


def check_rights(connection: Connection) -> None:
    """Raises Refused, or the driver's error, where this connection cannot install triggers."""
    if connection.dialect.name == "sqlite":
        check_json(connection)
        connection.commit()
        # Fails on a read-only file and on one that another process keeps locked.
        connection.execute(text("BEGIN IMMEDIATE"))
        connection.rollback()
        return
    row = connection.execute(
        text("""
            SELECT
                current_setting('transaction_read_only') = 'on' AS read_only,
                current_user AS role,
                (
                    SELECT string_agg(relname, ' and ' ORDER BY relname) FROM pg_class
                    WHERE
                        oid IN (to_regclass('jobs'), to_regclass('instances'))
                        AND NOT pg_has_role(relowner, 'USAGE')
                ) AS not_owned
        """)
    ).one()
    connection.rollback()
    if row.read_only:
        raise Refused(
            "The database is read-only: a standby, or default_transaction_read_only is on. Nothing was"
            " changed. Run `alembic upgrade head` on the primary."
        )
    if row.not_owned:
        raise Refused(
            f"The role {row.role} does not own the table {row.not_owned}, and only the owner can put"
            " triggers on it, or take them off. Nothing was changed. Run the same command with the role that"
            " the dstack server connects with."
        )


# ALTER TABLE ... OWNER TO takes triggers along, and no functions. Only a superuser can do this.
OWNERS = text("""
    SELECT format('ALTER %s OWNER TO %s', ours.name, CAST(relowner AS regrole)) AS statement
    FROM pg_class
    INNER JOIN (
        SELECT format('FUNCTION %s', CAST(oid AS regprocedure)) AS name, pronamespace AS namespace, proowner AS owner
        FROM pg_proc
        WHERE proname LIKE 'busy\\_blocks\\_%'
        UNION ALL
        SELECT format('TABLE %s', CAST(oid AS regclass)), relnamespace, relowner
        FROM pg_class
        WHERE relname = 'busy_blocks_alembic_version'
    ) AS ours ON relnamespace = ours.namespace AND relowner <> ours.owner
    INNER JOIN pg_roles ON rolname = current_user AND rolsuper
    WHERE pg_class.oid = to_regclass('instances')
""")


@contextmanager
def as_owner(connection: Connection) -> Iterator[None]:
    """Work as the owner of dstack's tables, where a superuser or a member of that role connected.

    The server has to be able to take off, before an upgrade, what is put on here. A superuser gives it
    what belongs to a former owner.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    for statement in connection.scalars(OWNERS).all():
        connection.exec_driver_sql(statement)
    connection.execute(
        text("""
            SELECT set_config('role', pg_get_userbyid(relowner), false) FROM pg_class
            WHERE oid = to_regclass('instances')
        """)
    )
    connection.commit()
    try:
        yield
    finally:
        # A pooler may hand the session to the next client.
        connection.rollback()
        connection.execute(text("RESET ROLE"))
        connection.commit()


@contextmanager
def autocommit(connection: Connection) -> Iterator[None]:
    """Each statement is a transaction of its own."""
    level = connection.get_isolation_level()
    connection.commit()
    connection.execution_options(isolation_level="AUTOCOMMIT")
    try:
        yield
    finally:
        connection.rollback()
        connection.execution_options(isolation_level=level)


def check_json(connection: Connection) -> None:
    """Raises Refused on a SQLite that was built without its JSON functions."""
    try:
        connection.execute(text("""SELECT json_valid('1'), json_extract('1', '$'), json_type('1', '$')"""))
    except DBAPIError:
        connection.rollback()
        raise Refused(
            f"SQLite {sqlite3.sqlite_version} has no JSON functions here, and the triggers read JSON."
            " Nothing was changed. Use a Python whose sqlite3 module is built with them."
        ) from None


@contextmanager
def migrations_lock(connection: Connection, wait: float) -> Iterator[None]:
    """dstack's advisory lock for start-up migrations; nothing on SQLite, as in dstack.

    Polled, each attempt in a transaction of its own: a waiting pg_advisory_lock would hold a snapshot,
    and CREATE INDEX CONCURRENTLY of the one who has the lock would wait for it for ever.

    Raises:
        Refused: not obtained within `wait` seconds.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    deadline = time.monotonic() + wait
    while True:
        locked = connection.scalar(text("SELECT pg_try_advisory_lock(:id)"), {"id": MIGRATIONS_LOCK})
        connection.commit()
        if locked:
            break
        if time.monotonic() > deadline:
            raise Refused(
                f"A dstack server or another run holds the migrations lock since {wait:g} seconds or"
                " longer. Nothing was changed. Run `alembic upgrade head` again when it is done; its"
                " session is in pg_locks (locktype advisory)."
            )
        time.sleep(RETRY_INTERVAL)
    try:
        yield
    finally:
        connection.rollback()
        if not connection.scalar(text("SELECT pg_advisory_unlock(:id)"), {"id": MIGRATIONS_LOCK}):
            log.warning(
                "The migrations lock is held by another session of a pooler, and dstack servers will wait"
                " for it to end: connect to the database itself, not through a pooler"
            )
        connection.commit()


@contextmanager
def lock_timeout(connection: Connection, wait: float) -> Iterator[None]:
    """On PostgreSQL no statement waits longer than `wait` seconds for a lock, be it one row's.

    Ends with the session's own lock_timeout, which may be the server's, and with no transaction open.
    """
    statement = text("SELECT set_config('lock_timeout', :value, false)")
    before = None
    if connection.dialect.name == "postgresql":
        before = connection.scalar(text("SHOW lock_timeout"))
        connection.execute(statement, {"value": f"{max(1, round(wait * 1000))}ms"})
        connection.commit()
    try:
        yield
    finally:
        connection.rollback()
        if before is not None:
            connection.execute(statement, {"value": before})
            connection.commit()


def retry(connection: Connection, wait: float, work: Callable[[], T]) -> T:
    """Run `work`, and again while it fails for a lock on the tables that a server holds.

    Raises:
        Refused: still so after `wait` seconds; the failed step is rolled back.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            with lock_timeout(connection, wait):
                return work()
        except DBAPIError as error:
            connection.rollback()
            if not is_lock_conflict(error):
                raise
            if time.monotonic() > deadline:
                raise Refused(
                    f"The tables jobs and instances were in use for {wait:g} seconds, and the lock on"
                    " them was not obtained. The step was rolled back. End the long transactions that"
                    " pg_stat_activity shows, then run `alembic upgrade head` again."
                ) from error
        time.sleep(RETRY_INTERVAL)
