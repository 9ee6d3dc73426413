"""Work on PostgreSQL: loops inside the server, clients that talk to it, and single statements."""

import multiprocessing
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from sqlalchemy import make_url
from support import Database

from bench.data import Rows, instance_id, job_id, values
from bench.measure import Run
from bench.statements import NEW, Work, with_parameters

Connection = psycopg.Connection[Any]

TYPES = {
    "instance": "uuid",
    "job": "uuid",
    "fleet": "uuid",
    "now": "timestamp",
    "skip": "boolean",
    "assigned": "boolean",
    "job_provisioning_data": "text",
    "job_runtime_data": "text",
    "later_job_runtime_data": "text",
    "busy_with_job": "integer",
    "busy_without_job": "integer",
    "busy": "text",
    "idle": "text",
    "provisioning": "text",
    "terminated": "text",
    "none": "uuid",
    "lock_token": "uuid",
    "lock_owner": "text",
    "lock_expires_at": "timestamp",
    "unlocked": "uuid",
    "unlocked_owner": "text",
    "unlocked_until": "timestamp",
}
ATTACHED_BLOCKS = """
    SELECT instances.id, coalesce(sum(
        CASE WHEN jobs.id IS NULL THEN 0
        ELSE coalesce((jobs.job_runtime_data::json #>> '{offer,blocks}')::integer, 1) END
    ), 0) AS blocks
    FROM instances LEFT JOIN jobs ON jobs.instance_id = instances.id
    GROUP BY instances.id
"""
# What an external reconciler does: every instance, computed anew.
RECONCILE = f"""
    UPDATE instances SET busy_blocks = attached.blocks
    FROM ({ATTACHED_BLOCKS}) AS attached
    WHERE attached.id = instances.id AND instances.busy_blocks <> attached.blocks
"""


def connect(database: Database) -> Connection:
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    # Statements are prepared at once, as asyncpg, which dstack uses, does.
    return psycopg.connect(url, autocommit=True, prepare_threshold=0, application_name="bench")


def cpu_seconds(connection: Connection) -> float:
    """What the connection's backend has run so far; the server has to be on this machine.

    The first number of /proc/PID/schedstat is the time spent on the CPU, in nanoseconds (Linux,
    Documentation/scheduler/sched-stats.rst). Other work on the machine disturbs it less than the clock.
    """
    return int(Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def create_loop(database: Database, work: Work, rows: Rows) -> None:
    """A procedure that repeats the work inside the server, and commits as dstack does."""
    with database.begin() as connection:
        constants = values(connection, rows, work.keeps_locks)
    body = []
    for transaction in work.transactions:
        for statement in transaction:
            target = statement.split()[1]
            into = " INTO v_id" if "RETURNING" in statement else ""
            body.append(with_parameters(statement, lambda name: f"v_{name}") + into)
            body.append(f"GET DIAGNOSTICS v_rows = ROW_COUNT; v_{target} := v_{target} + v_rows")
        body.append("COMMIT")
    with connect(database) as server:
        declarations = [
            sql.SQL("v_{} {} := {};").format(sql.SQL(name), sql.SQL(kind), sql.Literal(constants.get(name)))
            for name, kind in TYPES.items()
        ]
        template = sql.SQL("""
            CREATE OR REPLACE PROCEDURE bench_loop(
                seed integer, cycles integer,
                INOUT v_seconds double precision, INOUT v_jobs bigint, INOUT v_instances bigint
            ) LANGUAGE plpgsql AS $procedure$
            DECLARE {declarations} v_id uuid; v_rows bigint; v_start timestamptz := clock_timestamp();
            BEGIN
                FOR v_cycle IN 1..cycles LOOP
                    -- 7 and 13: not in the order in which the rows were made.
                    v_job := md5('job ' || ({first} + (seed * cycles + v_cycle) * 7 % {jobs}));
                    v_instance := md5('instance {attached} ' || (seed * cycles + v_cycle) * 13 % {instances});
                    {body};
                END LOOP;
                v_seconds := extract(epoch FROM clock_timestamp() - v_start);
            END $procedure$
        """)
        server.execute(
            template.format(
                declarations=sql.SQL(" ").join(declarations),
                first=sql.Literal(rows.jobs.start),
                jobs=sql.Literal(len(rows.jobs)),
                attached=sql.SQL(str(rows.attached)),
                instances=sql.Literal(rows.instances),
                body=sql.SQL("; ".join(body)),
            )
        )
        if work.keeps_locks:
            server.execute(
                "UPDATE instances SET lock_token = %s, lock_owner = %s",
                (constants["lock_token"], constants["lock_owner"]),
            )


def loop(connection: Connection, seed: int, cycles: int) -> Run:
    """Run the procedure."""
    before = cpu_seconds(connection)
    row = connection.execute("CALL bench_loop(%s, %s, 0, 0, 0)", (seed, cycles)).fetchone()
    assert row is not None
    return Run(row[0], cpu_seconds(connection) - before, cycles, row[1], row[2])


def transaction(
    connection: Connection, statements: tuple[str, ...], parameters: dict[str, Any]
) -> dict[str, int]:
    """Run and commit; the rows updated in each table."""
    updated = {"jobs": 0, "instances": 0}
    with connection.transaction():
        for statement in statements:
            cursor = connection.execute(with_parameters(statement, lambda name: f"%({name})s"), parameters)
            if statement.startswith(("UPDATE jobs", "UPDATE instances")):
                updated[statement.split()[1]] += cursor.rowcount
    return updated


class Task(NamedTuple):
    """What one client does: its rows, and a number to tell it from the others."""

    url: str
    work: Work
    rows: Rows
    parameters: dict[str, Any]
    cycles: int
    client: int
    seed: int


_barrier: Any = None


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _client(task: Task) -> tuple[float, float, Run]:
    choose = random.Random(task.seed * 1000 + task.client)
    updated = {"jobs": 0, "instances": 0}
    with connect(Database(task.url)) as connection:

        def cycle() -> None:
            number = choose.randrange(task.rows.instances)
            parameters = task.parameters | {
                "instance": instance_id(task.rows.attached, number),
                "job": job_id(choose.choice(task.rows.jobs)),
            }
            parameters |= {name: uuid.uuid4() for name in parameters if name.startswith(NEW)}
            for statements in task.work.transactions:
                for table, rows in transaction(connection, statements, parameters).items():
                    updated[table] += rows

        for _ in range(5):
            cycle()
        updated |= {"jobs": 0, "instances": 0}
        _barrier.wait()
        before, start = cpu_seconds(connection), time.monotonic()
        for _ in range(task.cycles):
            cycle()
        end, cpu = time.monotonic(), cpu_seconds(connection) - before
    return start, end, Run(end - start, cpu, task.cycles, updated["jobs"], updated["instances"])


class Clients:
    """Processes that each have one connection, over whatever the server's URL names."""

    def __init__(self, number: int) -> None:
        self.number = number
        context = multiprocessing.get_context("fork")
        self._pool = context.Pool(number, _set_barrier, (context.Barrier(number),))

    def run(self, database: Database, work: Work, rows: Rows, cycles: int, seed: int) -> Run:
        """All at once, each on jobs of its own. An error, as a deadlock, ends the benchmark."""
        with database.begin() as connection:
            parameters = values(connection, rows, work.keeps_locks) | (work.parameters or {})
        share = cycles // self.number
        tasks = [
            Task(
                database.url,
                work,
                rows._replace(jobs=rows.jobs[client :: self.number]),
                parameters,
                share,
                client,
                seed,
            )
            for client in range(self.number)
        ]
        done = self._pool.map(_client, tasks, chunksize=1)
        seconds = max(end for _, end, _ in done) - min(start for start, _, _ in done)
        runs = [run for _, _, run in done]
        return Run(
            seconds,
            sum(run.cpu_seconds for run in runs),
            sum(run.cycles for run in runs),
            sum(run.jobs for run in runs),
            sum(run.instances for run in runs),
        )

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


@contextmanager
def reconciling(database: Database, seconds: float = 1.0) -> Iterator[None]:
    """The external reconciler, at work every so many seconds."""
    done = Event()

    def work() -> None:
        with connect(database) as connection:
            while not done.wait(seconds):
                connection.execute(RECONCILE)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def detach_all(connection: Connection, rows: Rows) -> Run:
    """One statement that detaches all these jobs from these instances, after one that attached them."""
    instances = [instance_id(rows.attached, number) for number in range(rows.instances)]
    jobs = [job_id(number) for number in rows.jobs]
    connection.execute(
        """
        UPDATE jobs SET instance_id = pairs.instance
        FROM (
            SELECT job, (%(instances)s::uuid[])[1 + number %% %(number)s] AS instance
            FROM unnest(%(jobs)s::uuid[]) WITH ORDINALITY AS given (job, number)
        ) AS pairs
        WHERE jobs.id = pairs.job
        """,
        {"jobs": jobs, "instances": instances, "number": len(instances)},
    )
    connection.execute("VACUUM ANALYZE jobs, instances")
    before, start = cpu_seconds(connection), time.monotonic()
    detached = connection.execute(
        "UPDATE jobs SET instance_id = NULL WHERE instance_id = ANY(%s)", (instances,)
    )
    seconds, cpu = time.monotonic() - start, cpu_seconds(connection) - before
    return Run(seconds, cpu, 1, detached.rowcount, len(instances))


def clear(connection: Connection) -> None:
    """Take dead rows away, and leave the server nothing to write later."""
    connection.execute("VACUUM jobs, instances")
    connection.execute("CHECKPOINT")
