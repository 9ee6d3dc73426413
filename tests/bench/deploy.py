"""What a deploy costs, on many jobs and instances: time, memory, and the longest wait of a writer."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low
from threading import Event, Thread
from typing import Any, NamedTuple

import psutil
from sqlalchemy import text
from support import ROOT, Database

from bench import postgresql, sqlite
from bench.data import Rows, instance_id, job_id
from bench.statements import ASSIGN_TERMINATE, HEARTBEATS

POLL = 0.02  # seconds between two looks at memory
PAUSE = 0.002  # of the writer, between two transactions
BASE = 1024 * 1024
ALEMBIC = ("-m", "alembic", "-c", str(ROOT / "alembic.ini"))
START_OF_A_SERVER = "import asyncio, dstack._internal.server.db as db; asyncio.run(db.migrate())"


@dataclass
class Process:
    """A process that ended. CPU time is with that of PostgreSQL's backend; memory in MB, that one's apart."""

    seconds: float
    cpu_seconds: float
    memory: float
    server_memory: float
    returncode: int
    log: str


def run(database: Database, *arguments: str, **environment: str) -> Process:
    """Run this Python on a database."""
    environment = {**os.environ, "DSTACK_DATABASE_URL": database.url, **environment}
    server_memory = 0.0
    server_cpu: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as folder:
        environment["DSTACK_SERVER_DIR"] = folder
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, *arguments], env=environment, cwd=ROOT, stdout=log, stderr=log
        )
        done = Event()

        def watch() -> None:
            nonlocal server_memory
            with postgresql.connect(database) as connection:
                query = (
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    " AND backend_type = 'client backend' AND application_name <> 'bench'"
                )
                while not done.wait(POLL):
                    for (pid,) in connection.execute(query).fetchall():
                        try:
                            backend = psutil.Process(pid)
                            memory, cpu = backend.memory_info(), backend.cpu_times()
                        except psutil.NoSuchProcess:
                            continue
                        server_cpu[pid] = cpu.user + cpu.system
                        # What it shares is the server's one cache.
                        server_memory = max(server_memory, (memory.rss - memory.shared) / BASE)

        watcher = Thread(target=watch if database.dialect == "postgresql" else done.wait)
        watcher.start()
        # Of this process alone; resource.getrusage has the greatest of all children.
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watcher.join()
        log.seek(0)
        # In kilobytes on Linux (getrusage(2)).
        cpu_seconds = usage.ru_utime + usage.ru_stime + sum(server_cpu.values())
        return Process(
            seconds, cpu_seconds, usage.ru_maxrss / 1024, server_memory, child.returncode, log.read()
        )


def upgrade(database: Database) -> Process:
    return _succeeded(run(database, *ALEMBIC, "upgrade", "head"))


def check(database: Database) -> Process:
    return _succeeded(run(database, *ALEMBIC, "check"))


def start_server(database: Database) -> Process:
    """What a dstack server does first, with the hook."""
    location = str(ROOT / "migrations")
    return _succeeded(run(database, "-c", START_OF_A_SERVER, DSTACK_ALEMBIC_MIGRATIONS_LOCATION=location))


def _succeeded(process: Process) -> Process:
    if process.returncode != 0:
        raise RuntimeError(process.log)
    return process


class Scan(NamedTuple):
    """A sequential scan of jobs with the aggregate, and the number of instances that it found."""

    seconds: float
    cpu_seconds: float
    instances: int


def scan(database: Database, repeats: int) -> Scan:
    """The median of some scans."""
    if database.dialect == "postgresql":
        blocks = "coalesce((job_runtime_data::json #>> '{offer,blocks}')::integer, 1)"
        jobs, settings = "jobs", ("enable_indexscan", "enable_bitmapscan", "max_parallel_workers_per_gather")
    else:
        blocks, jobs, settings = sqlite.BLOCKS.format(job="jobs"), "jobs NOT INDEXED", ()
    statement = (
        f"SELECT instance_id, sum({blocks}) FROM {jobs} WHERE instance_id IS NOT NULL GROUP BY instance_id"
    )
    scans = []
    engine: Any = postgresql if database.dialect == "postgresql" else sqlite
    connection = engine.connect(database)
    for setting in settings:
        connection.execute(f"SET {setting} = 0" if "max" in setting else f"SET {setting} = off")
    for _ in range(repeats):
        start, before = time.monotonic(), engine.cpu_seconds(connection)
        found = len(connection.execute(statement).fetchall())
        scans.append(Scan(time.monotonic() - start, engine.cpu_seconds(connection) - before, found))
    connection.close()
    return median_low(scans)


def spoil(database: Database, every: int) -> int:
    """Make one counter in so many wrong; without triggers."""
    with database.begin() as connection:
        result = connection.execute(
            text("UPDATE instances SET busy_blocks = busy_blocks + 1 WHERE instance_num % :every = 0"),
            {"every": every},
        )
        return int(result.rowcount)


def drift(database: Database) -> float:
    """Seconds of the report."""
    statement = (ROOT / "sql" / database.dialect / "drift.sql").read_text(encoding="utf-8")
    start = time.monotonic()
    with database.begin() as connection:
        found = connection.execute(text(statement)).fetchall()
    if found:
        raise RuntimeError(f"{len(found)} counters are wrong")
    return time.monotonic() - start


@dataclass
class Waits:
    """How long a writer's transactions took, in seconds."""

    before: list[float]
    meanwhile: list[float]


def while_writing(
    database: Database, rows: Rows, before: float, work: Callable[[], Process]
) -> tuple[Process, Waits]:
    """Do it beside a writer of heartbeats, locks, assigns and terminates, which began earlier."""
    waits = Waits([], [])
    engine: Any = postgresql if database.dialect == "postgresql" else sqlite
    parameters = sqlite.constants(database, ASSIGN_TERMINATE, rows)
    to, done = waits.before, Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            connection = engine.connect(database)
            number = 0
            while not done.is_set():
                number += 1
                parameters["instance"] = instance_id(rows.attached, number % rows.instances)
                parameters["job"] = job_id(rows.jobs[number % len(rows.jobs)])
                for statements in (*HEARTBEATS.transactions, *ASSIGN_TERMINATE.transactions):
                    start = time.monotonic()
                    engine.transaction(connection, statements, parameters)
                    to.append(time.monotonic() - start)
                    time.sleep(PAUSE)
            connection.close()
        except BaseException as error:
            errors.append(error)

    writer = Thread(target=write)
    writer.start()
    time.sleep(before)
    to = waits.meanwhile
    try:
        process = work()
    finally:
        done.set()
        writer.join()
    if errors:
        raise errors[0]
    return process, waits
