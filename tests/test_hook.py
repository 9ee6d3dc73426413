"""The hook: a dstack server's own start-up, with our folder in DSTACK_ALEMBIC_MIGRATIONS_LOCATION."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import support
import uv
from conftest import Databases
from dstack._internal.server import db, settings
from releases import python_of
from sqlalchemy import Connection, event, inspect, make_url, text
from support import (
    ROOT,
    Database,
    add_instance,
    add_job,
    add_project,
    add_row,
    alembic,
    as_hex,
    counters,
    job_runtime_data,
    run_sql,
    schema_of,
    truth,
)
from test_surface import break_counter

HOOK = str(ROOT / "migrations")
DSTACKS_OWN = "dstack._internal.server:migrations"
# Releases with rebuilds of jobs and of instances between each two; the newest is this Python's own.
UPGRADES = ["0.20.29", "0.21.2", "newest"]
MIGRATE = "import asyncio, dstack._internal.server.db as db; asyncio.run(db.migrate())"


def python(release: str) -> str:
    return sys.executable if release == "newest" else python_of(release)


def environment_of(database: Database, location: str | None, **more: str) -> dict[str, str]:
    """The environment of a server; `location` None is a server without the hook."""
    environment = {**os.environ, "DSTACK_DATABASE_URL": database.url, **more}
    environment.pop("DSTACK_ALEMBIC_MIGRATIONS_LOCATION", None)
    if location is not None:
        environment["DSTACK_ALEMBIC_MIGRATIONS_LOCATION"] = location
    return environment


def start(
    database: Database, release: str = "newest", location: str | None = HOOK, **more: str
) -> subprocess.CompletedProcess[str]:
    """What a server of that release does to the database when it starts, in a process of its own."""
    return subprocess.run(
        [python(release), "-c", MIGRATE],
        env=environment_of(database, location, **more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def start_here(
    database: Database, location: str = HOOK, prepare: Callable[[db.Database], None] = lambda _: None
) -> None:
    """The same by the newest release, in this process: quick, and open to monkeypatch and caplog."""
    host = db.Database(database.url)
    prepare(host)

    async def run() -> None:
        try:
            await db.migrate()
        finally:
            await host.engine.dispose()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db, "_db", host)
        patch.setattr(settings, "ALEMBIC_MIGRATIONS_LOCATION", location)
        asyncio.run(run())


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our package as the hook imports it, to be patched."""
    monkeypatch.syspath_prepend(HOOK)
    import busy_blocks.run

    return busy_blocks


def add_rows(database: Database) -> None:
    """Instances of several kinds, with jobs."""
    support._tables.clear()  # The columns may be those of the release before.
    with database.begin() as connection:
        owner = add_project(connection)
        for status in ("IDLE", "BUSY", "PENDING", "TERMINATED"):
            instance = add_instance(connection, owner, status=status)
            add_job(connection, owner, instance)
            add_job(connection, owner, instance, job_runtime_data=job_runtime_data(3))
            add_job(connection, owner, job_runtime_data=job_runtime_data(2))


def rows_of(database: Database) -> dict[str, Any]:
    """What no upgrade may lose: each row by its id, and which job is attached to what."""
    with database.begin() as connection:
        rows: dict[str, Any] = {
            name: sorted(as_hex(row.id) or "" for row in connection.execute(text(f"SELECT id FROM {name}")))
            for name in ("users", "projects", "repos", "runs", "instances")
        }
        jobs = connection.execute(text("SELECT id, instance_id, job_runtime_data FROM jobs"))
        rows["jobs"] = {as_hex(job.id): (as_hex(job.instance_id), job.job_runtime_data) for job in jobs}
    return rows


def inject_drift(database: Database, number: int = 77) -> None:
    with database.engine.connect() as connection:
        break_counter(connection, number)
        assert counters(connection) != truth(connection)


def write_wrong(database: Database, number: int = 77) -> None:
    """A wrong number where no triggers are."""
    with database.begin() as connection:
        connection.execute(text("UPDATE instances SET busy_blocks = :number"), {"number": number})
    with database.begin() as connection:
        assert counters(connection) != truth(connection)


def check_complete(database: Database, release: str = "newest") -> None:
    """All triggers are there, as `alembic check` in that release's environment sees it."""
    result = alembic("check", python=python(release), DSTACK_DATABASE_URL=database.url)
    assert result.returncode == 0, result.stderr
    database.check_right()


def names_of_ours(database: Database) -> list[str]:
    """Every object of the schema that is ours, but for the version table."""
    found = {str(item) for row in schema_of(database) for item in row[:2]}
    return sorted(n for n in found if n.startswith("busy_blocks_") and "alembic_version" not in n)


def tables_of(database: Database) -> set[str]:
    with database.begin() as connection:
        return set(inspect(connection).get_table_names())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the hook logged as an error, and not what it logged before."""
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "dstack.busy_blocks" and record.levelno >= logging.ERROR
    ]
    caplog.clear()
    return found


# Upgrades of dstack through the hook


@pytest.mark.releases
@pytest.mark.parametrize("first", ["0.18.41", "0.19.36"])
def test_upgrades_through_the_hook(empty: Database, first: str) -> None:
    expected: Mapping[str, Any] = {}
    for release in [first, *UPGRADES]:
        if expected:
            inject_drift(empty)
        result = start(empty, release)
        assert result.returncode == 0, result.stderr
        assert "NOT kept right" not in result.stderr
        check_complete(empty, release)
        if expected:
            assert rows_of(empty) == expected
        # Also a check that the triggers work there.
        add_rows(empty)
        empty.check_right()
        expected = rows_of(empty)


# Upgrades of dstack without the hook


@pytest.fixture
def forgotten(databases: Databases, request: pytest.FixtureRequest) -> tuple[Database, dict[str, Any]]:
    """A SQLite database with triggers that a newer dstack failed to upgrade, and its rows before."""
    database = databases.make("sqlite", "empty")
    assert start(database, request.param).returncode == 0
    add_rows(database)
    rows = rows_of(database)
    inject_drift(database)
    failed = start(database, location=None)
    assert failed.returncode != 0
    assert re.search("error in (trigger|view) busy_blocks_", failed.stderr)
    assert any(name.startswith("_alembic_tmp_") for name in tables_of(database))
    # And it stays so.
    assert start(database, location=None).returncode != 0
    return database, rows


@pytest.mark.releases
@pytest.mark.parametrize("forgotten", ["0.18.41", "0.19.36", "0.20.29"], indirect=True)
@pytest.mark.parametrize("mended_by", ["command line", "hook"])
def test_an_upgrade_without_the_hook_is_mended(
    forgotten: tuple[Database, dict[str, Any]], mended_by: str
) -> None:
    database, rows = forgotten
    mended = database.alembic("upgrade", "head") if mended_by == "command line" else start(database)
    assert mended.returncode == 0, mended.stderr
    assert "NOT kept right" not in mended.stderr
    check_complete(database)
    assert rows_of(database) == rows
    assert not any(name.startswith("_alembic_tmp_") for name in tables_of(database))
    following = start(database)
    assert following.returncode == 0, following.stderr
    check_complete(database)


# A real server


TOKEN = "0d8d6c3e-token-of-the-tests"


@contextmanager
def serving(
    database: Database,
    folder: Path,
    command: Sequence[str] = (sys.executable, "-m", "dstack._internal.cli.main", "server"),
    location: str | None = HOOK,
    **more: str,
) -> Iterator[Callable[[str], Any]]:
    """A `dstack server` process that answers: gives a function that POSTs to its API.

    Its log is in server.log of the folder.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = environment_of(
        database,
        location,
        HOME=str(folder),
        DSTACK_SERVER_DIR=str(folder / "server"),
        DSTACK_SERVER_PORT=str(port),
        DSTACK_SERVER_ADMIN_TOKEN=TOKEN,
        DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT="1",
        DSTACK_SERVER_LOG_FORMAT="standard",
        # The rows of the tests are no real machines, and nobody may try to reach them.
        DSTACK_SERVER_BACKGROUND_PROCESSING_DISABLED="1",
    )
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, **more},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while post(port, "users/get_my_user") is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield lambda path: post(port, path)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def post(port: int, path: str) -> Any:
    """The answer of the API; None while nobody listens."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/{path}", method="POST", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError:
        raise
    except OSError:
        return None


def add_fleet(database: Database) -> str:
    """A fleet in the server's own project, with an instance and two jobs, 5 blocks; the instance's id."""
    spec = {
        "configuration": {"type": "fleet", "name": "fleet", "nodes": {"min": 0, "target": 0, "max": 1}},
        "profile": {"name": "default"},
        "autocreated": False,
    }
    support._tables.clear()
    with database.begin() as connection:
        project = connection.scalar(text("SELECT id FROM projects WHERE name = 'main'"))
        owner = {**add_project(connection), "project_id": as_hex(project) or ""}
        fleet = add_row(
            connection, "fleets", name="fleet", project_id=project, status="ACTIVE", spec=json.dumps(spec)
        )
        instance = add_instance(connection, owner, fleet_id=fleet, status="BUSY")
        add_job(connection, owner, instance, job_runtime_data=job_runtime_data(2))
        add_job(connection, owner, instance, job_runtime_data=job_runtime_data(3))
    return instance


def test_a_server_starts_and_starts_again(empty: Database, tmp_path: Path) -> None:
    with serving(empty, tmp_path) as call:
        assert call("users/get_my_user")["username"] == "admin"
        assert call("project/main/fleets/list") == []
        check_complete(empty)
        instance = add_fleet(empty)
        inject_drift(empty)
        assert call("project/main/fleets/list")[0]["instances"][0]["busy_blocks"] == 77
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log
    assert "The triggers are installed" in log
    with serving(empty, tmp_path) as call:
        (shown,) = call("project/main/fleets/list")[0]["instances"]
        assert (as_hex(shown["id"]), shown["busy_blocks"]) == (instance, 5)
        empty.check_right()
    assert f"Instance instance ({key_text(empty, instance)}): busy_blocks was 77, is 5" in (
        tmp_path / "server.log"
    ).read_text().replace("\n", " ")


def key_text(database: Database, value: str) -> str:
    """An id as the database shows it."""
    return value if database.dialect == "sqlite" else str(uuid.UUID(value))


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_server_says_in_its_log_that_there_are_no_triggers(bare: Database, tmp_path: Path) -> None:
    with role_without_ownership(bare) as served, serving(served, tmp_path) as call:
        assert call("users/get_my_user")["username"] == "admin"
        assert names_of_ours(bare) == []
    log = (tmp_path / "server.log").read_text()
    assert "busy_blocks is NOT kept right by triggers" in log
    assert "does not own the table instances and jobs" in log


# The folder in other places


@pytest.fixture(scope="session")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this project, as pip would lay it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [uv.find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site-packages", "zip")
    return folder / "site-packages"


def test_the_wheels_package_is_a_location(empty: Database, unpacked_wheel: Path) -> None:
    names = {path.name for path in unpacked_wheel.rglob("*")}
    assert "__pycache__" not in names
    # deploy/dstack.service runs it from there.
    assert (unpacked_wheel / "dstack_busy_blocks" / "sweep_tunnels.py").exists()
    result = start(empty, location="dstack_busy_blocks:migrations", PYTHONPATH=str(unpacked_wheel))
    assert result.returncode == 0, result.stderr
    assert "NOT kept right" not in result.stderr
    check_complete(empty)


def test_the_wheels_command_line(empty: Database, unpacked_wheel: Path, tmp_path: Path) -> None:
    ini = unpacked_wheel / "dstack_busy_blocks" / "alembic.ini"
    result = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", str(ini), "upgrade", "head"],
        env=environment_of(empty, None),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    check_complete(empty)


def test_a_mounted_folder_is_a_location(empty: Database, tmp_path: Path) -> None:
    mounted = tmp_path / "with a space" / "busy-blocks"
    for name in ("migrations", "sql"):
        shutil.copytree(ROOT / name, mounted / name, ignore=shutil.ignore_patterns("__pycache__"))
    result = start(empty, location=str(mounted / "migrations"), PYTHONDONTWRITEBYTECODE="1")
    assert result.returncode == 0, result.stderr
    assert "NOT kept right" not in result.stderr
    check_complete(empty)
    assert list(mounted.rglob("__pycache__")) == []


def test_triggers_of_a_newer_release_of_this_package_stay(protected: Database) -> None:
    """In a rolling deploy, an older server that starts last must not put its own in their place."""
    with protected.begin() as connection:
        connection.execute(text("UPDATE busy_blocks_alembic_version SET version_num = '9999'"))
        connection.exec_driver_sql(
            "DROP TRIGGER busy_blocks_jobs_insert" + " ON jobs" * (protected.dialect == "postgresql")
        )
    before = schema_of(protected)
    assert "newer release of this package, revision 9999" in protected.upgrade()
    hook = start(protected)
    assert hook.returncode == 0, hook.stderr
    assert "newer release of this package, revision 9999" in hook.stderr
    assert schema_of(protected) == before
    check = protected.alembic("check")
    assert "busy_blocks_jobs_insert is missing; revision is 9999" in check.stderr
    assert check.returncode == 1
    assert protected.alembic("downgrade", "base").returncode != 0
    assert schema_of(protected) == before


# What is damaged is put right


VERSION = "busy_blocks_alembic_version"
DAMAGES: dict[str, dict[str, list[str]]] = {
    "both": {
        "version table lost": [f"DROP TABLE {VERSION}"],
        "version table empty": [f"DELETE FROM {VERSION}"],
        "only the first revision": [f"UPDATE {VERSION} SET version_num = '0001'"],
    },
    "postgresql": {
        "missing trigger": ["DROP TRIGGER busy_blocks_jobs_update ON jobs"],
        "missing function": ["DROP FUNCTION busy_blocks_write CASCADE"],
        "all missing": [
            f"DROP FUNCTION busy_blocks_{name} CASCADE"
            for name in ("recompute", "collect_jobs", "write", "apply", "truncate", "of_job", "status")
        ],
        "disabled": ["ALTER TABLE jobs DISABLE TRIGGER busy_blocks_jobs_write"],
        "all disabled": [f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in ("jobs", "instances")],
        "for replicas only": ["ALTER TABLE jobs ENABLE REPLICA TRIGGER busy_blocks_jobs_insert"],
        "other body": [
            "CREATE OR REPLACE FUNCTION busy_blocks_write() RETURNS void LANGUAGE plpgsql"
            " SET search_path TO public, pg_temp AS $$ BEGIN END $$"
        ],
        "other settings": ["ALTER FUNCTION busy_blocks_apply() RESET ALL"],
        "security definer": ["ALTER FUNCTION busy_blocks_apply() SECURITY DEFINER"],
        "strict": ["ALTER FUNCTION busy_blocks_of_job(text) STRICT"],
        "other events": [
            "DROP TRIGGER busy_blocks_jobs_delete ON jobs",
            "CREATE TRIGGER busy_blocks_jobs_delete AFTER DELETE ON jobs FOR EACH ROW"
            " WHEN (old.instance_id IS NULL) EXECUTE FUNCTION busy_blocks_collect_jobs()",
        ],
        "renamed trigger": ["ALTER TRIGGER busy_blocks_jobs_update ON jobs RENAME TO busy_blocks_jobs_old"],
        "second trigger": [
            "CREATE TRIGGER busy_blocks_jobs_old AFTER INSERT ON jobs FOR EACH ROW"
            " EXECUTE FUNCTION busy_blocks_collect_jobs()"
        ],
        "invalid index": [
            "CREATE INDEX busy_blocks_jobs ON jobs (instance_id) WHERE instance_id IS NOT NULL",
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'busy_blocks_jobs'::regclass",
        ],
    },
    "sqlite": {
        "missing trigger": ["DROP TRIGGER busy_blocks_jobs_update"],
        "missing view": ["DROP VIEW busy_blocks_derived"],
        "missing table": ["DROP TABLE busy_blocks_writer"],
        "all missing": [
            *(f"DROP TRIGGER busy_blocks_jobs_{name}" for name in ("insert", "update", "delete")),
            *(f"DROP TRIGGER busy_blocks_instances_{name}" for name in ("insert", "sum", "update")),
            "DROP VIEW busy_blocks_derived",
            "DROP TABLE busy_blocks_writer",
        ],
        "other trigger": [
            "DROP TRIGGER busy_blocks_jobs_update",
            "CREATE TRIGGER busy_blocks_jobs_update AFTER UPDATE ON jobs BEGIN SELECT 1; END",
        ],
        "other view": [
            "DROP VIEW busy_blocks_derived",
            "CREATE VIEW busy_blocks_derived AS"
            " SELECT id AS instance_id, busy_blocks AS is_now, 4 AS busy_blocks FROM instances",
        ],
        "table not empty": ["INSERT INTO busy_blocks_writer SELECT id FROM instances"],
        "other table": [
            "DROP TABLE busy_blocks_writer",
            "CREATE TABLE busy_blocks_writer (instance_id, number)",
        ],
        "second trigger": [
            "CREATE TRIGGER busy_blocks_jobs_old AFTER INSERT ON jobs BEGIN"
            " UPDATE instances SET busy_blocks = busy_blocks + 1 WHERE id = new.instance_id; END"
        ],
        "trigger on the wrong table": [
            "DROP TRIGGER busy_blocks_jobs_insert",
            "CREATE TRIGGER busy_blocks_jobs_insert AFTER INSERT ON runs BEGIN SELECT 1; END",
        ],
    },
}


def damages(dialect: str) -> list[Any]:
    return [
        pytest.param(dialect, statements, id=f"{dialect}-{name}")
        for name, statements in (DAMAGES["both"] | DAMAGES[dialect]).items()
    ]


@pytest.mark.parametrize(("dialect", "damage"), damages("sqlite") + damages("postgresql"))
def test_damage_is_put_right(
    protected: Database, damage: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    add_rows(protected)
    before = schema_of(protected)
    rows = rows_of(protected)
    inject_drift(protected)
    with protected.begin() as connection:
        for statement in damage:
            connection.exec_driver_sql(statement)
    start_here(protected)
    assert errors(caplog) == []
    assert schema_of(protected) == before
    assert rows_of(protected) == rows
    protected.check_right()
    # The triggers, not only the counters.
    add_rows(protected)
    protected.check_right()


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_triggers_for_replicas_too_are_put_right(
    protected: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """ENABLE ALWAYS: drift cannot be injected by session_replication_role then."""
    before = schema_of(protected)
    with protected.begin() as connection:
        connection.execute(text("ALTER TABLE jobs ENABLE ALWAYS TRIGGER busy_blocks_jobs_insert"))
    start_here(protected)
    assert errors(caplog) == []
    assert schema_of(protected) == before


def test_nothing_to_do_writes_nothing(protected: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The files of SQLite are the same to the byte; PostgreSQL assigns no transaction id."""
    add_rows(protected)

    def state() -> Any:
        if protected.dialect == "sqlite":
            with protected.begin() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            return protected.path.read_bytes()
        with protected.begin() as connection:
            rows = connection.execute(text("SELECT ctid::text, xmin::text FROM instances ORDER BY 1"))
            objects = connection.execute(text("SELECT oid, xmin::text FROM pg_trigger ORDER BY 1"))
            return [tuple(row) for row in [*rows, *objects]]

    before = state()
    start_here(protected)
    assert errors(caplog) == []
    assert state() == before


# Never harm the host


def test_a_schema_that_is_not_understood(bare: Database, caplog: pytest.LogCaptureFixture) -> None:
    add_rows(bare)
    with bare.begin() as connection:
        connection.execute(text("ALTER TABLE instances RENAME COLUMN busy_blocks TO blocks_in_use"))
    before = schema_of(bare)
    start_here(bare)
    (error,) = errors(caplog)
    assert "NOT kept right" in error
    assert "no column busy_blocks" in error
    assert schema_of(bare) == before


@contextmanager
def role_without_ownership(database: Database) -> Iterator[Database]:
    """The same database by a role that may read and write the tables, and owns none of them."""
    role = f"guest_{uuid.uuid4().hex[:8]}"
    with database.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'"))
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}"))
    url = make_url(database.url).set(username=role, password=role)
    guest = Database(url.render_as_string(hide_password=False))
    try:
        yield guest
    finally:
        with database.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_role_that_does_not_own_the_tables(bare: Database, caplog: pytest.LogCaptureFixture) -> None:
    with role_without_ownership(bare) as guest:
        before = schema_of(bare)
        start_here(guest)
        (error,) = errors(caplog)
        assert "does not own" in error
        assert schema_of(bare) == before


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_role_that_does_not_own_the_triggers(protected: Database, caplog: pytest.LogCaptureFixture) -> None:
    """What the owner installed is good enough, and needs no word."""
    with role_without_ownership(protected) as guest:
        start_here(guest)
        assert errors(caplog) == []
    check_complete(protected)


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_read_only_database(bare: Database, caplog: pytest.LogCaptureFixture) -> None:
    with bare.begin() as connection:
        name = make_url(bare.url).database
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    start_here(bare)
    (error,) = errors(caplog)
    assert "read-only" in error


def short_wait(host: db.Database) -> None:
    """Half a second for SQLite's lock instead of dstack's 30."""
    if host.dialect_name != "sqlite":
        return

    @event.listens_for(host.engine.sync_engine, "connect")
    def set_timeout(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA busy_timeout=500")


@contextmanager
def writing(database: Database, statement: str) -> Iterator[Connection]:
    """A transaction of somebody else's that has written and does not end."""
    with database.engine.connect() as connection:
        if database.dialect == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.execute(text(statement))
        yield connection
        connection.rollback()


@pytest.mark.parametrize("table", ["jobs", "instances"])
def test_a_lock_that_somebody_else_keeps(
    bare: Database, table: str, ours: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ours.run, "HOOK_WAIT", 1.0)
    add_rows(bare)
    write_wrong(bare)
    before = schema_of(bare)
    began = time.monotonic()
    with writing(bare, f"UPDATE {table} SET status = status"):
        start_here(bare, prepare=short_wait)
        assert time.monotonic() - began < 15
        (error,) = errors(caplog)
        assert "NOT kept right" in error
        assert schema_of(bare) == before
    start_here(bare)
    assert errors(caplog) == []
    check_complete(bare)


def test_a_row_that_somebody_else_keeps_and_drift(
    protected: Database, ours: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The triggers are there; only the correction of the counters has to wait."""
    monkeypatch.setattr(ours.run, "HOOK_WAIT", 1.0)
    add_rows(protected)
    inject_drift(protected)
    began = time.monotonic()
    with writing(protected, "UPDATE instances SET name = name"):
        start_here(protected, prepare=short_wait)
        assert time.monotonic() - began < 15
        assert len(errors(caplog)) == 1
    start_here(protected)
    assert errors(caplog) == []
    check_complete(protected)


@pytest.mark.parametrize("kind", ["empty", "bare", "protected"])
@pytest.mark.parametrize("dialect", ["postgresql"])
def test_two_starts_at_the_same_time(databases: Databases, dialect: str, kind: str) -> None:
    database = databases.make(dialect, kind)
    if kind == "protected":
        add_rows(database)
        inject_drift(database)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE],
            env=environment_of(database, HOOK),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            assert "NOT kept right" not in stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check_complete(database)


# Releases of dstack that do not exist yet


REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "f00000000000"
down_revision = "{head}"


def upgrade():
    recreate = "always" if op.get_bind().dialect.name == "sqlite" else "auto"
    {body}
"""
REBUILD = """
    with op.batch_alter_table("jobs", recreate=recreate) as batch:
        batch.alter_column("job_runtime_data", type_=sa.String(10000000), existing_type=sa.Text())
    with op.batch_alter_table("instances", recreate=recreate) as batch:
        batch.alter_column("busy_blocks", type_=sa.BigInteger(), existing_type=sa.Integer())
        batch.alter_column("status", type_=sa.Text(), existing_type=sa.String(100))
"""
RENAME = """
    with op.batch_alter_table("instances", recreate=recreate) as batch:
        batch.alter_column("busy_blocks", new_column_name="blocks_in_use", existing_type=sa.Integer())
"""
FAIL = """
    raise RuntimeError("a mistake of dstack's")
"""


@pytest.fixture
def release_next(tmp_path: Path, ours: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes the newest dstack have one more revision; gives the location of its migrations."""

    def make(body: str) -> str:
        folder = tmp_path / uuid.uuid4().hex
        shutil.copytree(Path(db.__file__).parent / "migrations", folder)
        (head,) = ours.dstack.scripts().get_heads()
        (folder / "versions" / "f00000000000_next.py").write_text(REVISION.format(head=head, body=body))
        monkeypatch.setattr(ours.dstack, "LOCATION", str(folder))
        return str(folder)

    return make


def test_a_release_that_rebuilds_the_tables(
    protected: Database, release_next: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """And without the hook that release does not start, on either database: the test tests something."""
    add_rows(protected)
    rows = rows_of(protected)
    inject_drift(protected)
    location = release_next(REBUILD)
    with pytest.raises(Exception, match=r"error in (trigger|view) busy_blocks_|used in a trigger"):
        start_here(protected, location)
    start_here(protected)
    assert errors(caplog) == []
    assert rows_of(protected) == rows
    check_complete_without_dstack(protected)


def check_complete_without_dstack(database: Database) -> None:
    result = database.alembic("check")
    assert result.returncode == 0, result.stderr
    database.check_right()


def test_a_release_that_renames_the_column(
    protected: Database, release_next: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    add_rows(protected)
    release_next(RENAME)
    start_here(protected)
    (error,) = errors(caplog)
    assert "no column busy_blocks" in error
    assert names_of_ours(protected) == []
    with protected.begin() as connection:
        assert connection.scalar(text("SELECT count(blocks_in_use) FROM instances")) == 4
        # What the server writes goes on to work.
        connection.execute(text("UPDATE instances SET blocks_in_use = 3, status = 'BUSY'"))
        connection.execute(text("UPDATE jobs SET instance_id = NULL"))
        connection.execute(text("DELETE FROM jobs"))
    # Neither does the next start, where nothing is pending.
    start_here(protected)
    assert len(errors(caplog)) == 1


def test_a_release_whose_migrations_fail(
    protected: Database, release_next: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    add_rows(protected)
    rows = rows_of(protected)
    before = schema_of(protected)
    release_next(FAIL)
    with pytest.raises(RuntimeError, match="a mistake of dstack's"):
        start_here(protected)
    # Replicas of the release before run on, with their triggers.
    assert errors(caplog) == []
    assert schema_of(protected) == before
    assert rows_of(protected) == rows
    # And a start of that release works.
    inject_drift(protected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("busy_blocks.dstack.LOCATION", DSTACKS_OWN)
        start_here(protected)
    assert errors(caplog) == []
    check_complete(protected)


def test_an_older_release_leaves_a_newer_ones_triggers_alone(protected: Database) -> None:
    """It does not start, as without us; the replicas of the newer one go on with their triggers."""
    add_rows(protected)
    before = schema_of(protected)
    with protected.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'f00000000000'"))
    for location in (DSTACKS_OWN, HOOK):
        with pytest.raises(Exception, match="Can't locate revision"):
            start_here(protected, location)
    assert schema_of(protected) == before
    add_rows(protected)
    protected.check_right()


@pytest.mark.parametrize("what", ["no models", "no migrations"])
def test_a_release_that_has_its_migrations_elsewhere(
    empty: Database, what: str, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one case where not to start is right: a server would run on a schema that is not its own."""
    if what == "no models":
        monkeypatch.setitem(sys.modules, "dstack._internal.server.models", None)
    else:
        monkeypatch.setattr(ours.dstack, "LOCATION", "dstack._internal.server:nowhere")
    with pytest.raises(Exception, match=r"DSTACK_ALEMBIC_MIGRATIONS_LOCATION|nowhere"):
        start_here(empty)


# The connection is handed back as it came


def state_of_connection(connection: Connection) -> dict[str, Any]:
    """Every setting of the session, and what it still holds."""
    state: dict[str, Any] = {"in_transaction": connection.in_transaction()}
    if connection.dialect.name == "postgresql":
        # Without those that PL/pgSQL defines when it is first used.
        for row in connection.execute(text("SELECT name, setting FROM pg_settings WHERE name !~ '[.]'")):
            state[row.name] = row.setting
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        state["advisory_locks"] = connection.scalar(text(locks))
        temporary = "SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()"
        state["temporary"] = connection.scalar(text(temporary))
        return state
    pragmas = ("foreign_keys", "busy_timeout", "journal_mode", "synchronous", "recursive_triggers")
    for pragma in (*pragmas, "legacy_alter_table", "writable_schema", "defer_foreign_keys"):
        state[pragma] = connection.exec_driver_sql(f"PRAGMA {pragma}").scalar()
    state["temporary"] = connection.scalar(text("SELECT count(*) FROM sqlite_temp_master"))
    return state


def state_after_start(database: Database, location: str) -> dict[str, Any]:
    """What dstack's start-up leaves on its connection, on which the pool's next user goes on."""
    host = db.Database(database.url)

    async def run() -> dict[str, Any]:
        try:
            async with host.engine.connect() as connection:
                await connection.run_sync(db._run_alembic_upgrade)
                return await connection.run_sync(state_of_connection)
        finally:
            await host.engine.dispose()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "ALEMBIC_MIGRATIONS_LOCATION", location)
        return asyncio.run(run())


@pytest.mark.parametrize(
    "kind", ["empty", "bare", "no index", "protected", "drift", "damage", "not understood"]
)
def test_the_connection_is_handed_back_clean(databases: Databases, dialect: str, kind: str) -> None:
    templates = {"drift": "protected", "damage": "protected", "not understood": "bare", "no index": "bare"}
    states = []
    for location in (DSTACKS_OWN, HOOK):
        database = databases.make(dialect, templates.get(kind, kind))
        if kind == "drift":
            add_rows(database)
            inject_drift(database)
        elif kind == "no index":
            # Then ours is built, outside of a transaction, as on a dstack before 0.21.1.
            with database.begin() as connection:
                for index in inspect(connection).get_indexes("jobs"):
                    if index["column_names"][0] == "instance_id":
                        run_sql(connection, f"DROP INDEX {index['name']}")
        elif kind == "damage":
            table = " ON jobs" if dialect == "postgresql" else ""
            with database.begin() as connection:
                run_sql(connection, f"DROP TRIGGER busy_blocks_jobs_update{table}")
        elif kind == "not understood":
            with database.begin() as connection:
                run_sql(connection, "ALTER TABLE instances RENAME COLUMN busy_blocks TO blocks_in_use")
        states.append(state_after_start(database, location))
    without, with_hook = states
    assert with_hook == without
    assert with_hook["in_transaction"] is False
    if dialect == "sqlite":
        assert with_hook["foreign_keys"] == 1
