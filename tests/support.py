"""What the tests share: rows of dstack's tables, the truth about them, and ways to run alembic."""

import contextlib
import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from alembic.config import main
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    Table,
    create_engine,
    event,
    insert,
    text,
)
from sqlalchemy.pool import NullPool

ROOT = Path(__file__).parents[1]


class Database:
    """One database at the head of a dstack release, with or without our triggers."""

    def __init__(self, url: str):
        self.url = url  # as in DSTACK_DATABASE_URL
        self.dialect = "sqlite" if url.startswith("sqlite") else "postgresql"
        driver = {"sqlite+aiosqlite": "sqlite", "postgresql+asyncpg": "postgresql+psycopg"}
        scheme, rest = url.split(":", 1)
        self.engine: Engine = create_engine(f"{driver[scheme]}:{rest}", poolclass=NullPool)
        if self.dialect == "sqlite":

            @event.listens_for(self.engine, "connect")
            def pragmas(connection: Any, _: Any) -> None:
                # The pragmas of dstack's server/db.py.
                for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=30000"):
                    connection.execute(f"PRAGMA {pragma}")

    @property
    def path(self) -> Path:
        return Path(self.url.split("///", 1)[1])

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            yield connection

    def alembic(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run alembic on this database; as a process where it needs an environment of its own."""
        if environment:
            return alembic(*arguments, DSTACK_DATABASE_URL=self.url, **environment)
        return alembic_in_process(self.url, *arguments)

    def upgrade(self) -> str:
        """`alembic upgrade head`, which has to succeed; what it printed."""
        result = self.alembic("upgrade", "head")
        assert result.returncode == 0, result.stderr
        return result.stderr

    def check_right(self) -> None:
        """Every counter and every status equals the truth."""
        with self.begin() as connection:
            assert counters(connection) == truth(connection)
            assert wrong_statuses(connection) == {}


def alembic(
    *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run alembic as a process, from the checkout."""
    return subprocess.run(
        [python, "-m", "alembic", "-c", str(ROOT / "alembic.ini"), *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def alembic_in_process(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same command line without a new interpreter, which would import dstack for seconds."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    before = os.environ.get("DSTACK_DATABASE_URL")
    os.environ["DSTACK_DATABASE_URL"] = url
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(argv=["-c", str(ROOT / "alembic.ini"), *arguments], prog="alembic")
    except SystemExit as end:
        code = end.code or 0
    finally:
        os.environ.pop("DSTACK_DATABASE_URL")
        if before is not None:
            os.environ["DSTACK_DATABASE_URL"] = before
    if isinstance(code, str):
        # As the interpreter does with sys.exit("message").
        err.write(code + "\n")
        code = 1
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def job_runtime_data(blocks: Any = None, **offer: Any) -> str:
    """As dstack writes it, with only the parts that matter here."""
    if blocks is not None:
        offer["blocks"] = blocks
    return json.dumps({"network_mode": "host", "offer": {"backend": "ssh", "price": 0.0, **offer}})


def blocks_of_job(data: str | None) -> int:
    """Section 1 of the design, in Python."""
    try:
        value = json.loads(data or "{}")["offer"]["blocks"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1
    return value if type(value) is int and 0 <= value <= 999_999 else 1


def as_hex(value: Any) -> str | None:
    return None if value is None else uuid.UUID(str(value)).hex


def truth(connection: Connection) -> dict[str, int]:
    """What busy_blocks of each instance has to be, recomputed from the rows of both tables."""
    result = {}
    pending = set()
    for row in connection.execute(text("SELECT id, status FROM instances")):
        result[as_hex(row.id)] = 0
        if row.status == "PENDING":
            pending.add(as_hex(row.id))
    for row in connection.execute(
        text("SELECT instance_id, job_runtime_data FROM jobs WHERE instance_id IS NOT NULL")
    ):
        instance = as_hex(row.instance_id)
        if instance in result and instance not in pending:
            result[instance] += blocks_of_job(row.job_runtime_data)
    return result


def counters(connection: Connection) -> dict[str, int]:
    return {
        as_hex(row.id): row.busy_blocks
        for row in connection.execute(text("SELECT id, busy_blocks FROM instances"))
    }


def wrong_statuses(connection: Connection) -> dict[str | None, str]:
    """The instances that are BUSY without a job attached, or IDLE with one."""
    attached = {
        as_hex(row.instance_id)
        for row in connection.execute(text("SELECT instance_id FROM jobs WHERE instance_id IS NOT NULL"))
    }
    return {
        as_hex(row.id): row.status
        for row in connection.execute(text("SELECT id, status FROM instances"))
        if row.status == ("IDLE" if as_hex(row.id) in attached else "BUSY")
    }


_tables: dict[tuple[str, str], Table] = {}


def table(connection: Connection, name: str) -> Table:
    key = (str(connection.engine.url), name)
    if key not in _tables:
        _tables[key] = Table(name, MetaData(), autoload_with=connection, resolve_fks=False)
    return _tables[key]


def add_row(connection: Connection, into: str, /, **values: Any) -> str:
    """Insert one row, with a plain value in every column that needs one; its id, in hex."""
    target = table(connection, into)
    values.setdefault("id", uuid.uuid4().hex)
    row: dict[str, Any] = {}
    for column in target.columns:
        if column.name in values:
            value = values[column.name]
        elif column.nullable or column.server_default is not None:
            continue
        else:
            kind = column.type.python_type
            value = {int: 0, bool: False, float: 0.0, str: "", datetime: datetime(2026, 1, 1)}.get(kind, "")
        is_id = column.name == "id" or column.name.endswith("_id")
        if is_id and value is not None:
            value = uuid.UUID(str(value)) if connection.dialect.name == "postgresql" else as_hex(value)
        row[column.name] = value
    connection.execute(insert(target), row)
    return as_hex(values["id"])


def add_project(connection: Connection) -> dict[str, str]:
    """A user, a project, a repo and a run: what instances and jobs refer to."""
    user = add_row(
        connection,
        "users",
        name=uuid.uuid4().hex,
        token=uuid.uuid4().hex,
        token_hash=uuid.uuid4().hex,
        global_role="ADMIN",
    )
    project = add_row(connection, "projects", name=uuid.uuid4().hex, owner_id=user)
    repo = add_row(connection, "repos", project_id=project, name="repo", type="REMOTE", info="{}")
    run = add_row(
        connection,
        "runs",
        project_id=project,
        user_id=user,
        repo_id=repo,
        run_name="run",
        status="RUNNING",
        run_spec="{}",
    )
    return {"project_id": project, "run_id": run}


def add_instance(connection: Connection, owner: Mapping[str, str], **values: Any) -> str:
    values = {
        "name": "instance",
        "status": "IDLE",
        "total_blocks": 8,
        "busy_blocks": 0,
        "health": "HEALTHY",
    } | values
    columns = table(connection, "instances").columns
    if "pool_id" in columns and not columns["pool_id"].nullable:
        values.setdefault(
            "pool_id", add_row(connection, "pools", name="pool", project_id=owner["project_id"])
        )
    return add_row(connection, "instances", project_id=owner["project_id"], **values)


def add_job(
    connection: Connection, owner: Mapping[str, str], instance: str | None = None, **values: Any
) -> str:
    values = {"run_name": "run", "job_name": "run-0-0", "status": "RUNNING", "job_spec_data": "{}"} | values
    return add_row(connection, "jobs", **owner, instance_id=instance, **values)


def key(connection: Connection, value: str | None) -> Any:
    """An id as the database's drivers want it."""
    if value is None:
        return None
    return uuid.UUID(value) if connection.dialect.name == "postgresql" else value


def run_sql(connection: Connection, statement: str, **parameters: Any) -> Any:
    """Execute with parameters; ids, which are 32 hex digits, are given as the drivers want them."""
    for name, value in parameters.items():
        if isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef"):
            parameters[name] = key(connection, value)
    return connection.execute(text(statement), parameters)


def schema_of(database: Database) -> list[Any]:
    """Every object of the schema, with its definition: to compare before and after."""
    with database.begin() as connection:
        if database.dialect == "sqlite":
            found = connection.execute(text("SELECT type, name, tbl_name, sql FROM sqlite_master"))
            # alembic prints a table with spaces offline, and creates it with tabs.
            return sorted((*row[:3], " ".join((row[3] or "").split())) for row in found)
        queries = (
            "SELECT 'relation', relname, relkind::text, relacl::text FROM pg_class WHERE relnamespace = 'public'::regnamespace",
            "SELECT 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod) || attnotnull"
            " FROM pg_attribute JOIN pg_class ON attrelid = pg_class.oid WHERE relnamespace = 'public'::regnamespace",
            "SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid::text"
            " FROM pg_index JOIN pg_class ON indrelid = pg_class.oid WHERE relnamespace = 'public'::regnamespace",
            "SELECT 'function', proname, pg_get_functiondef(oid), '' FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
            "SELECT 'trigger', tgname, pg_get_triggerdef(oid), tgenabled::text FROM pg_trigger WHERE NOT tgisinternal",
            "SELECT 'constraint', conname, pg_get_constraintdef(oid), '' FROM pg_constraint"
            " WHERE connamespace = 'public'::regnamespace",
        )
        return sorted((tuple(row) for query in queries for row in connection.execute(text(query))), key=str)
