"""Concurrent transactions, stepped through every order of their steps; in the way of PostgreSQL's isolation tester.

`TRANSACTIONS` are the statements that dstack sends (captured from 0.22.5, or as it says), and some that an
administrator might. Each is a list of named steps. A spec is two or three of them; a permutation of it is one
order of all their steps, such as "0.read 1.read 0.instance …". `play` runs one permutation on real
connections. A step that has to wait for another session is put off: the other sessions go on, and what its
own session still has to do follows as soon as it can.
"""

import select
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from time import monotonic
from typing import Any, Protocol

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus
from sqlalchemy import Connection, text
from support import (
    Database,
    add_instance,
    add_job,
    add_project,
    counters,
    job_runtime_data,
    truth,
    wrong_statuses,
)


@dataclass(frozen=True)
class Transaction:
    """What one session does.

    A step is one or more statements, separated by semicolons. The columns of the row that a SELECT finds are
    values for the statements that follow, as dstack computes them in Python from what it read. Where a SELECT
    finds no row, the session sends `give_up` and ends.
    """

    steps: Mapping[str, str]
    job: str = "on instance"  # Where the session's own job is to begin with: or "on other", "nowhere".
    placeholder: bool = False  # Whether the instance has to be one: PENDING, without anything that runs.
    give_up: str = "COMMIT"


# Columns that every statement of dstack's pipelines writes when it is done with a row.
UNLOCK = "lock_expires_at = NULL, lock_token = NULL, lock_owner = NULL"
# The pipelines read an instance so, and pass over one that is locked.
FOR_UPDATE = " FOR NO KEY UPDATE SKIP LOCKED"
UNTIL = "'2026-01-02 00:00:00'"
NOW = "'2026-01-01 00:00:00'"

RETRY_LATER = f"""
    UPDATE jobs SET last_processed_at = {NOW}, lock_expires_at = NULL, lock_token = NULL
    WHERE id = $job AND lock_token = $token;
    COMMIT
"""
# It reads, and locks, every instance of the fleet that is free; and takes the first.
READ_TO_ASSIGN = """
    SELECT
        '''' || id || '''' AS chosen,
        busy_blocks + $blocks AS new_blocks,
        CASE WHEN status = 'BUSY' THEN '' ELSE 'status = ''BUSY'', ' END AS status
    FROM instances
    WHERE id IN ($instance, $other) AND lock_expires_at IS NULL
    ORDER BY id
"""
# dstack sends the status only where it changes: back to IDLE with the last job that it saw there, and to
# TERMINATING where it read anything but BUSY.
READ_TO_TERMINATE = """
    SELECT
        busy_blocks - $blocks AS new_blocks,
        CASE
            WHEN status IN ('TERMINATING', 'TERMINATED') THEN 'termination_reason = ''JOB_FINISHED'', '
            WHEN status <> 'BUSY'
                THEN 'termination_reason = ''JOB_FINISHED'', status = ''TERMINATING'', '
            WHEN NOT EXISTS (SELECT 1 FROM jobs WHERE instance_id = instances.id AND jobs.id <> $job)
                THEN 'status = ''IDLE'', '
            ELSE ''
        END AS status
    FROM instances
    WHERE id = $instance
"""
NOT_LOCKED = f" AND (lock_expires_at IS NULL OR lock_expires_at < {NOW}) AND (lock_owner IS NULL OR lock_owner = $owner)"
LOCK = f"UPDATE instances SET lock_expires_at = {UNTIL}, lock_token = $token, lock_owner = $owner WHERE id = $instance"
ASSIGN = f"""
    UPDATE jobs SET
        last_processed_at = {NOW}, skip_min_processing_interval = true, instance_assigned = true,
        instance_id = $chosen, used_instance_id = $chosen, job_runtime_data = $data, {UNLOCK}
    WHERE id = $job
"""
DETACH = f"""
    UPDATE jobs SET last_processed_at = {NOW}, status = 'TERMINATED', instance_id = NULL, {UNLOCK}
    WHERE id = $job AND lock_token = $token
"""
# Of an instance that another worker has locked meanwhile, it writes no row.
RELEASE = f"""
    UPDATE instances SET
        last_processed_at = {NOW}, $status busy_blocks = $new_blocks, last_job_processed_at = {NOW}, {UNLOCK}
    WHERE id = $instance AND lock_token = $token AND lock_owner = $owner
"""
# dstack before its pipelines, up to 0.19, in one transaction, with the instance first.
TERMINATE_0_19 = {
    "read": f"BEGIN; {READ_TO_TERMINATE}{FOR_UPDATE}",
    "instance": f"""
        UPDATE instances SET $status busy_blocks = $new_blocks, last_job_processed_at = {NOW}
        WHERE id = $instance
    """,
    "job": f"UPDATE jobs SET last_processed_at = {NOW}, status = 'TERMINATED', instance_id = NULL WHERE id = $job",
    "commit": "COMMIT",
}
ASSIGN_STEPS = {
    "read": f"BEGIN; {READ_TO_ASSIGN}{FOR_UPDATE}",
    "instance": "UPDATE instances SET $status busy_blocks = $new_blocks WHERE id = $chosen",
    "job": ASSIGN,
    "commit": "COMMIT",
}


def without_row_locks(steps: Mapping[str, str]) -> dict[str, str]:
    """As dstack sends it on SQLite, which has no FOR UPDATE."""
    return {name: sql.replace(FOR_UPDATE, "") for name, sql in steps.items()}


def in_one_statement(sql: str) -> dict[str, str]:
    return {"write": f"BEGIN; {sql}", "commit": "COMMIT"}


TRANSACTIONS = {
    "assign": Transaction(ASSIGN_STEPS, job="nowhere", give_up=RETRY_LATER),
    "assign, no row lock": Transaction(without_row_locks(ASSIGN_STEPS), job="nowhere", give_up=RETRY_LATER),
    "terminate": Transaction(
        {
            "lock": f"BEGIN; {READ_TO_TERMINATE}{NOT_LOCKED}{FOR_UPDATE}; {LOCK}; COMMIT",
            "detach": f"BEGIN; {DETACH}",
            "release": RELEASE,
            "commit": "COMMIT",
        },
        give_up=RETRY_LATER,
    ),
    # It was slow: the instance's lock is somebody else's by now, or nobody's.
    "terminate, lock lost": Transaction(
        {
            "detach": f"BEGIN; {READ_TO_TERMINATE}; COMMIT; BEGIN; {DETACH}",
            "release": RELEASE,
            "commit": "COMMIT",
        }
    ),
    "terminate 0.19": Transaction(TERMINATE_0_19),
    "terminate 0.19, no row lock": Transaction(without_row_locks(TERMINATE_0_19)),
    "provision": Transaction(
        {
            "instance": "BEGIN; INSERT INTO instances SELECT * FROM seed_new_instances WHERE id = $new_instance",
            "job": ASSIGN.replace("$chosen", "$new_instance"),
            "commit": "COMMIT",
        },
        job="nowhere",
    ),
    "promote": Transaction(
        {
            "instance": f"""
                BEGIN;
                UPDATE instances SET
                    status = 'PROVISIONING', started_at = {NOW}, price = 1.0, total_blocks = 1, busy_blocks = 1
                WHERE id = $instance
            """,
            "job": f"""
                UPDATE jobs SET
                    last_processed_at = {NOW}, skip_min_processing_interval = true, status = 'PROVISIONING',
                    job_runtime_data = $data, {UNLOCK}
                WHERE id = $job
            """,
            "commit": "COMMIT",
        },
        placeholder=True,
    ),
    "drop placeholder": Transaction(
        {
            "lock": f"BEGIN; SELECT id AS found FROM instances WHERE id = $instance{NOT_LOCKED}{FOR_UPDATE}; {LOCK}; COMMIT",
            "detach": f"BEGIN; {DETACH}",
            "delete": "DELETE FROM instances WHERE id = $instance AND lock_token = $token AND lock_owner = $owner",
            "commit": "COMMIT",
        },
        placeholder=True,
        give_up=RETRY_LATER,
    ),
    "heartbeat": Transaction(
        {
            "jobs": f"BEGIN; UPDATE jobs SET lock_expires_at = {UNTIL} WHERE id = $job AND lock_token = $token; COMMIT",
            "instances": f"BEGIN; UPDATE instances SET lock_expires_at = {UNTIL} WHERE id = $instance",
            "commit": "COMMIT",
        }
    ),
    # What follows is not dstack's.
    "move": Transaction(in_one_statement("UPDATE jobs SET instance_id = $other WHERE id = $job")),
    "move back": Transaction(
        in_one_statement("UPDATE jobs SET instance_id = $instance WHERE id = $job"), job="on other"
    ),
    "move all": Transaction(
        in_one_statement("UPDATE jobs SET instance_id = $other WHERE instance_id = $instance")
    ),
    "delete job": Transaction(in_one_statement("DELETE FROM jobs WHERE id = $job")),
    "delete instance": Transaction(in_one_statement("DELETE FROM instances WHERE id = $instance")),
    "delete run": Transaction(in_one_statement("DELETE FROM runs WHERE id = $run")),
    "set busy_blocks": Transaction(
        in_one_statement("UPDATE instances SET busy_blocks = 0 WHERE id = $instance")
    ),
    "set status": Transaction(in_one_statement("UPDATE instances SET status = 'IDLE' WHERE id = $instance")),
}


# The rows. Ids are literals that both engines read.


def _id(number: int) -> str:
    return f"{number:032x}"


INSTANCE, OTHER, RESIDENT = _id(1), _id(2), _id(3)
SESSIONS = 3
JOBS = [_id(16 + session) for session in range(SESSIONS)]
NEW_INSTANCES = [_id(32 + session) for session in range(SESSIONS)]
TOKENS = [_id(48 + session) for session in range(SESSIONS)]
# No two sums are equal, so that no loss hides another one.
BLOCKS = [1, 2, 4]
RESIDENT_BLOCKS = 8


TABLES = ("runs", "instances", "jobs")


def sow(connection: Connection) -> None:
    """Tables that keep the rows with which every permutation begins."""
    owner = add_project(connection)
    for instance in (INSTANCE, OTHER):
        add_instance(connection, owner, id=instance, total_blocks=16)
    for instance in NEW_INSTANCES:
        add_instance(connection, owner, id=instance, status="PROVISIONING", total_blocks=1)
    for job, token, blocks in zip(JOBS, TOKENS, BLOCKS, strict=True):
        add_job(connection, owner, id=job, job_runtime_data=job_runtime_data(blocks))
        connection.execute(text(f"UPDATE jobs SET lock_token = '{token}' WHERE id = '{job}'"))
    add_job(connection, owner, OTHER, id=RESIDENT, job_runtime_data=job_runtime_data(RESIDENT_BLOCKS))
    for table in TABLES:
        connection.execute(text(f"CREATE TABLE seed_{table} AS SELECT * FROM {table}"))
    # dstack inserts these as occupied.
    connection.execute(
        text("CREATE TABLE seed_new_instances AS SELECT * FROM instances WHERE total_blocks = 1")
    )
    connection.execute(text("UPDATE seed_new_instances SET busy_blocks = 1"))
    connection.execute(text("DELETE FROM seed_instances WHERE total_blocks = 1"))


def prepare(spec: Sequence[str]) -> list[str]:
    """Makes the kept rows those with which the transactions of a spec begin; with right counters."""
    on = {"on instance": f"'{INSTANCE}'", "on other": f"'{OTHER}'", "nowhere": "NULL"}
    places = [TRANSACTIONS[name].job for name in spec]
    places += ["nowhere"] * (SESSIONS - len(places))
    statements = [
        f"UPDATE seed_jobs SET instance_id = {on[place]}, used_instance_id = {on[place]} WHERE id = '{job}'"
        for job, place in zip(JOBS, places, strict=True)
    ]
    for instance, here, resident in ((INSTANCE, "on instance", 0), (OTHER, "on other", RESIDENT_BLOCKS)):
        busy = resident + sum(blocks for blocks, place in zip(BLOCKS, places, strict=True) if place == here)
        status = "BUSY" if busy else "IDLE"
        if instance == INSTANCE and any(TRANSACTIONS[name].placeholder for name in spec):
            status, busy = "PENDING", 0
        statements.append(
            f"UPDATE seed_instances SET status = '{status}', busy_blocks = {busy} WHERE id = '{instance}'"
        )
    return statements


RESET = [
    *(f"DELETE FROM {table}" for table in reversed(TABLES)),
    *(f"INSERT INTO {table} SELECT * FROM seed_{table}" for table in TABLES),
]


# What has to be true after every permutation.


def wrong_counters(connection: Connection) -> list[str]:
    is_now, should_be = counters(connection), truth(connection)
    return [
        f"busy_blocks of {instance} is {is_now[instance]}, not {should_be[instance]}"
        for instance in should_be
        if is_now[instance] != should_be[instance]
    ]


def wrong_states(connection: Connection) -> list[str]:
    return [f"{instance} is {status}" for instance, status in wrong_statuses(connection).items()]


CHECKS: list[Callable[[Connection], list[str]]] = [wrong_counters, wrong_states]


# Sessions.


@dataclass(frozen=True)
class Failure:
    session: int
    step: str
    code: str  # SQLSTATE; on SQLite the message, as it has none.
    message: str = field(compare=False)


@dataclass
class Outcome:
    """What one permutation came to."""

    failures: list[Failure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    waits: int = 0

    @property
    def codes(self) -> Counter[str]:
        return Counter(failure.code for failure in self.failures)


class Client(Protocol):
    """One connection."""

    def send(self, statement: str) -> None: ...

    def result(self) -> "list[dict[str, Any]] | tuple[str, str] | None":
        """What the statement came to: rows, or a failure's code and message; None while it is not known."""

    def roll_back(self) -> None: ...


class Session:
    """One client on its way through a transaction's steps."""

    def __init__(self, number: int, name: str, client: Client, adapt: Callable[[str], str]):
        transaction = TRANSACTIONS[name]
        self.number = number
        self.client = client
        self.steps = [
            (name, [adapt(statement.strip()) for statement in sql.split(";")])
            for name, sql in transaction.steps.items()
        ]
        self.give_up = [statement.strip() for statement in transaction.give_up.split(";")]
        self.values: dict[str, Any] = {
            "instance": f"'{INSTANCE}'",
            "other": f"'{OTHER}'",
            "new_instance": f"'{NEW_INSTANCES[number]}'",
            "run": "(SELECT id FROM seed_runs)",
            "job": f"'{JOBS[number]}'",
            "token": f"'{TOKENS[number]}'",
            "owner": f"'JobTerminatingPipeline:{JOBS[number]}'",
            "blocks": BLOCKS[number],
            "data": f"'{job_runtime_data(BLOCKS[number])}'",
        }
        self.step = ""
        self.due = 0  # Steps that the permutation has come to, and that have not begun.
        self.statements: list[str] = []  # What is left of the step that has begun.
        self.waits = False
        self.failure: Failure | None = None

    @property
    def busy(self) -> bool:
        return bool(self.statements)

    @property
    def over(self) -> bool:
        return not self.busy and not self.steps

    def begin_step(self) -> None:
        self.waits = False
        self.due -= 1
        self.step, self.statements = self.steps.pop(0)
        self._send()

    def _send(self) -> None:
        self.client.send(Template(self.statements[0]).substitute(self.values))

    def poll(self) -> bool:
        """Goes on with the step as far as it can; whether anything happened."""
        result = self.client.result()
        if result is None:
            return False
        self.waits = False
        statement = self.statements.pop(0)
        if isinstance(result, tuple):
            self.end(*result)
        elif statement.startswith("SELECT"):
            if result:
                self.values.update(result[0])
            else:
                self.statements, self.steps, self.due = list(self.give_up), [], 0
        if self.statements:
            self._send()
        return True

    def end(self, code: str, message: str) -> None:
        """As in dstack: an error rolls back, and is not tried again."""
        self.failure = Failure(self.number, self.step, code, message)
        self.statements, self.steps, self.due = [], [], 0
        self.client.roll_back()


class Engine(Protocol):
    """One database, with a connection per session and one that looks on."""

    connection: Connection

    def prepare(self, spec: Sequence[str]) -> None: ...

    def reset(self) -> None: ...

    def sessions(self, spec: Sequence[str], mode: Any) -> list[Session]: ...

    def close(self) -> None: ...

    def settle(self, sessions: Sequence[Session]) -> None:
        """Waits until every session has finished its step, or waits for one that is not to go on yet."""


class PostgresqlClient:
    def __init__(self, dsn: str):
        self.connection = psycopg.connect(dsn, autocommit=True)
        # How long a statement waits before PostgreSQL looks for a deadlock.
        self.connection.execute("SET deadlock_timeout = '5ms'")
        self.pgconn = self.connection.pgconn

    def send(self, statement: str) -> None:
        self.pgconn.send_query(statement.encode())

    def result(self) -> list[dict[str, Any]] | tuple[str, str] | None:
        self.pgconn.consume_input()
        if self.pgconn.is_busy():
            return None
        rows: list[dict[str, Any]] = []
        failure = None
        while (result := self.pgconn.get_result()) is not None:
            if result.status == ExecStatus.FATAL_ERROR:
                code = result.error_field(DiagnosticField.SQLSTATE) or b""
                failure = code.decode(), result.error_message.decode()
            for row in range(result.ntuples):
                values = [(result.get_value(row, column) or b"").decode() for column in range(result.nfields)]
                names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
                rows.append(dict(zip(names, values, strict=True)))
        return failure or rows

    def roll_back(self) -> None:
        if self.pgconn.transaction_status != TransactionStatus.IDLE:
            self.pgconn.exec_(b"ROLLBACK")


class Postgresql:
    """Modes are isolation levels."""

    def __init__(self, database: Database):
        with database.begin() as connection:
            sow(connection)
        dsn = database.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.connection = database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.observer = psycopg.connect(dsn, autocommit=True)
        # Its writes fire no triggers, ours or those of foreign keys.
        self.observer.execute("SET session_replication_role = replica")
        self.clients = [PostgresqlClient(dsn) for _ in range(SESSIONS)]
        self.resets = 0

    def prepare(self, spec: Sequence[str]) -> None:
        self.observer.execute(";".join(prepare(spec)))

    def reset(self) -> None:
        self.observer.execute(";".join(RESET))
        self.resets += 1
        if self.resets % 200 == 0:
            # Rows that are dead, and that autovacuum would come to too late.
            self.observer.execute("VACUUM jobs, instances, runs")

    def sessions(self, spec: Sequence[str], mode: str) -> list[Session]:
        begin = f"BEGIN ISOLATION LEVEL {mode}"
        return [
            Session(number, name, self.clients[number], lambda sql: begin if sql == "BEGIN" else sql)
            for number, name in enumerate(spec)
        ]

    def close(self) -> None:
        self.connection.close()
        self.observer.close()
        for client in self.clients:
            client.connection.close()

    def settle(self, sessions: Sequence[Session]) -> None:
        deadline = monotonic() + 60
        while busy := [session for session in sessions if session.busy]:
            clients = [self.clients[session.number] for session in busy]
            # Who waited before most likely still does: ask at once.
            patience = 0 if all(session.waits for session in busy) else 0.001
            select.select([client.pgconn.socket for client in clients], [], [], patience)
            if any(session.poll() for session in busy):
                continue
            if self._all_stuck(sessions):
                for session in busy:
                    session.waits = True
                return
            assert monotonic() < deadline, [(session.step, session.statements) for session in busy]

    def _all_stuck(self, sessions: Sequence[Session]) -> bool:
        """Whether each busy session waits for one that is idle, or for one that does.

        Those in a circle are not stuck: PostgreSQL is about to break a deadlock.
        """
        pid = {session: self.clients[session.number].pgconn.backend_pid for session in sessions}
        stuck = {pid[session] for session in sessions if not session.busy}
        waiting = dict(
            self.observer.execute(
                "SELECT pid, pg_blocking_pids(pid) FROM unnest(%s::integer[]) AS pid",
                [[pid[session] for session in sessions if session.busy]],
            ).fetchall()
        )
        while more := {one for one, blockers in waiting.items() if one not in stuck and stuck & {*blockers}}:
            stuck |= more
        return stuck >= waiting.keys()


LOCKED = "database is locked"


@dataclass(frozen=True)
class Begin:
    """How a session on SQLite begins a transaction, and whether it waits for another one's lock."""

    # None: with BEGIN before the first write, as Python's sqlite3 does for dstack; what was read before is
    # outside of the transaction.
    sql: str | None
    # Without: what becomes of it where the busy_timeout is over before the lock is free.
    waits: bool = True


class SqliteClient:
    def __init__(self, database: Database):
        self.connection = sqlite3.connect(database.path, timeout=0, isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        # dstack's, but for the timeout: a statement that is locked out is sent again after other sessions' steps.
        for pragma in ("foreign_keys=ON", "synchronous=OFF"):
            self.connection.execute(f"PRAGMA {pragma}")
        self.begin = Begin(None)
        self.to_begin = False
        self.statement = ""

    def send(self, statement: str) -> None:
        self.statement = statement

    def result(self) -> list[dict[str, Any]] | tuple[str, str] | None:
        try:
            return self._execute()
        except sqlite3.Error as error:
            if str(error) == LOCKED and self.begin.waits:
                return None
            return str(error), str(error)

    def _execute(self) -> list[dict[str, Any]]:
        if self.statement == "BEGIN" and self.begin.sql is None:
            self.to_begin = True
            return []
        if self.statement == "COMMIT" and not self.connection.in_transaction:
            self.to_begin = False
            return []
        if self.to_begin and not self.statement.startswith("SELECT"):
            self.connection.execute("BEGIN")
            self.to_begin = False
        statement = (self.begin.sql or "") if self.statement == "BEGIN" else self.statement
        return [dict(row) for row in self.connection.execute(statement).fetchall()]

    def roll_back(self) -> None:
        self.connection.rollback()


class Sqlite:
    """Modes are ways to begin a transaction."""

    def __init__(self, database: Database):
        with database.begin() as connection:
            sow(connection)
        self.connection = database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.connection.exec_driver_sql("PRAGMA synchronous=OFF")
        self.clients = [SqliteClient(database) for _ in range(SESSIONS)]

    def prepare(self, spec: Sequence[str]) -> None:
        for statement in prepare(spec):
            self.connection.exec_driver_sql(statement)

    def reset(self) -> None:
        for statement in ("BEGIN", *RESET, "COMMIT"):
            self.connection.exec_driver_sql(statement)

    def sessions(self, spec: Sequence[str], mode: Begin) -> list[Session]:
        for client in self.clients:
            client.begin, client.to_begin = mode, False
        return [
            Session(number, name, self.clients[number], lambda sql: sql.replace(FOR_UPDATE, ""))
            for number, name in enumerate(spec)
        ]

    def close(self) -> None:
        self.connection.close()
        for client in self.clients:
            client.connection.close()

    def settle(self, sessions: Sequence[Session]) -> None:
        while any(session.poll() for session in sessions if session.busy):
            pass
        for session in sessions:
            session.waits = session.busy


def play(engine: Engine, spec: Sequence[str], order: Sequence[int], mode: Any) -> Outcome:
    """One permutation of the spec that is prepared: the numbers of the sessions, in the order in which they are to take a step."""
    engine.reset()
    sessions = engine.sessions(spec, mode)
    outcome = Outcome()

    def go_on() -> None:
        """All that is due and need not wait, one step after the other."""
        engine.settle(sessions)
        while ready := [session for session in sessions if session.due and not session.busy]:
            ready[0].begin_step()
            engine.settle(sessions)

    for number in order:
        session = sessions[number]
        if session.steps:
            session.due = min(session.due + 1, len(session.steps))
        go_on()
        outcome.waits += session.busy
    while stuck := [session for session in sessions if session.busy]:
        # SQLite alone: one whose snapshot is too old is told so for ever, and waits for nobody.
        stuck[0].end(LOCKED, LOCKED)
        go_on()
    outcome.failures = [session.failure for session in sessions if session.failure]
    outcome.wrong = [line for check in CHECKS for line in check(engine.connection)]
    return outcome


def permutations(steps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every order of sessions that have that many steps."""
    if not any(steps):
        yield ()
    for number, left in enumerate(steps):
        if left:
            for rest in permutations([*steps[:number], left - 1, *steps[number + 1 :]]):
                yield number, *rest


def permutations_of(spec: Sequence[str]) -> list[tuple[int, ...]]:
    return list(permutations([len(TRANSACTIONS[name].steps) for name in spec]))


def steps_of(spec: Sequence[str], order: Sequence[int]) -> str:
    """A permutation to read: 0.read 1.read 0.instance …"""
    left = [iter(TRANSACTIONS[name].steps) for name in spec]
    steps = " ".join(f"{number}.{next(left[number])}" for number in order)
    return f"{' | '.join(spec)}: {steps}"
