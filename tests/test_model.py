"""A Hypothesis state machine for each engine: the counters after any statements are what the model says.

The model (tests/model.py) is kept in Python and never read back. On SQLite it is compared with the database
after each statement; on PostgreSQL, where a transaction that moved jobs sees the old counters, at each commit
and after SET CONSTRAINTS ALL IMMEDIATE. All rows are compared now and then. What sql/README.md says is not held
is in the model as "in doubt", until the change or the backfill that corrects it.

CI runs a bounded number of operations from a fixed seed. A million, from seed 1 on, with the figures printed:

    BUSY_BLOCKS_MODEL_OPERATIONS=1000000 pytest -s tests/test_model.py -k operations
"""

import json
import os
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from model import DERIVED, Id, Model, Outcome, Pragmas
from operations import INSTANCES, JOBS, PROJECTS, RUNS, WEIGHTS, insert_instances, insert_jobs, insert_parents
from sqlalchemy import make_url
from support import ROOT, Database, add_instance, add_job, add_project
from test_surface import HOSTILE as OTHERS

sys.path.append(str(ROOT / "migrations"))

from busy_blocks import counters, objects

OPERATIONS = int(os.environ.get("BUSY_BLOCKS_MODEL_OPERATIONS", "0"))
STEP = 40  # operations that a rule runs: Hypothesis' own work is for each rule
WIDTH = 6  # bytes an operation is made of

REFUSALS = (
    sqlite3.IntegrityError,
    psycopg.errors.ForeignKeyViolation,
    psycopg.errors.UniqueViolation,
    psycopg.errors.NotNullViolation,
    psycopg.errors.ObjectInUse,
)

HOSTILE = [text for text in OTHERS if text is None or len(text) < 1000] + [
    "[" * 20_000,
    '{"offer": {"blocks": 2}, "offer": {"blocks": 5}}', '{"offer": {"blocks": 2, "blocks": 5}}',
    '{"offer": {"blocks": 2}, "offer": {"x": 5}}', '{"offer": {"x": 2}, "offer": {"blocks": 5}}',
    '{"offer": {"blocks": 2}, "offer": 5}', '{"offer": {"blocks": 2}, "x": "\\u0000"}',
    '{"offer": {"blocks": 2}, "x": "\\ud83d"}', '{"offer": {"blocks": 2}, "x": "\\ude00\\ud83d"}',
    '{"offer": {"blocks": 2}, "x": "\\ud83d\\ude00"}', '{"offer": {"blocks": 2}, "x": "\\\\u0000"}',
    '{"offer": {"blocks": 2}, "x": NaN}', '{"offer": {"blocks": Infinity}}', '{"offer": {"blocks": 02}}',
    '{"offer": {"blocks": 1e400}}', '{"offer": {"blocks": -1e-400}}', '{"offer": {"blocks": 2}, "x": 1e400}',
    '{"offer": {"blocks": 2}, "x": ' + "9" * 5000 + "}", '{"offer": {"blocks": -9223372036854775808}}',
    '{"offer": {"blocks": 9223372036854775807}}', '{"offer": {"blocks": 4294967297}}', '{"offer": {"blocks": 2},}',
    '{"offer": {"blocks": 2}, "x": ' + "[" * 200 + "]" * 200 + "}", '{"a": ' * 200 + "2" + "}" * 200,
    '{"offer": ' * 5 + '{"blocks": 3}' + "}" * 5, '{"offer": {"blocks": 2}, "x": "\t"}', "\ufeff{}", "\u00a0{}",
    '{"offer.blocks": 7}', '{"Offer": {"Blocks": 7}}', '{"offer": {"blocks ": 7}}', '{"": {"offer": {"blocks": 7}}}',
]  # fmt: skip
KEYS = st.sampled_from(["offer", "blocks", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


def cut(text: str, start: int, length: int) -> str:
    return text[:start] + text[start + length :]


DATA = st.one_of(
    # By number: Hypothesis would write out the longest text for its own use.
    st.integers(0, len(HOSTILE) - 1).map(HOSTILE.__getitem__),
    st.builds(json.dumps, VALUES | st.fixed_dictionaries({"offer": VALUES})),
    st.builds(lambda value: json.dumps({"offer": {"blocks": value}}), VALUES),
    st.builds(
        cut,
        st.sampled_from([text for text in HOSTILE if text and len(text) < 100]),
        st.integers(0, 40),
        st.integers(1, 3),
    ),
)


def sqlite(database: Database) -> sqlite3.Connection:
    connection = sqlite3.connect(database.path, isolation_level=None, cached_statements=1000)
    for pragma in ("journal_mode=WAL", "synchronous=OFF", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def postgresql(database: Database) -> psycopg.Connection:
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=2)
    connection.prepared_max = 1000
    return connection


class Run:
    """One database, over all the machines that Hypothesis makes: connections, plain rows and figures."""

    def __init__(self, database: Database):
        self.dialect = database.dialect
        self.database = database
        self.operations = self.commits = self.comparisons = self.whole = self.doubtful = self.counters = 0
        with database.begin() as connection:
            owner = add_project(connection)
            add_job(connection, owner, add_instance(connection, owner))
        self.alchemy = database.engine.connect()
        self.connection: Any = (sqlite if self.dialect == "sqlite" else postgresql)(database)
        # A plain value in every column that needs one.
        self.plain: dict[str, dict[str, Any]] = {}
        for table in ("projects", "repos", "runs", "instances", "jobs"):
            cursor = self.connection.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in cursor.description]
            self.plain[table] = {n: v for n, v in zip(names, cursor.fetchone(), strict=True) if v is not None}
        self.has_merge = self.dialect == "postgresql" and self.connection.info.server_version >= 150000
        sizes = {"projects": PROJECTS, "repos": PROJECTS, "runs": RUNS, "instances": INSTANCES, "jobs": JOBS}
        self.ids: dict[str, list[Id]] = {}
        for number, (table, size) in enumerate(sizes.items(), 1):
            made = [uuid.UUID(int=(number << 64) + i) for i in range(size)]
            self.ids[table] = [id.hex for id in made] if self.dialect == "sqlite" else made
        self.triggers = [
            name
            for revision in objects.OBJECTS.values()
            for name in revision[self.dialect]
            if name.startswith("trigger/")
        ]
        self.operators = [f for f, weight in WEIGHTS[self.dialect].items() for _ in range(weight)]

    def reset(self) -> None:
        """An empty database in an ordinary session, whatever the machine before left."""
        if self.dialect == "sqlite":
            script = "PRAGMA foreign_keys=ON; PRAGMA recursive_triggers=OFF;"
        else:
            script = "RESET session_replication_role;"
        script += "DELETE FROM projects; DELETE FROM repos; DELETE FROM runs; DELETE FROM jobs; DELETE FROM instances;"
        for statement in script.split(";")[:-1]:
            self.connection.execute(statement)

    def close(self) -> None:
        self.connection.close()
        self.alchemy.close()

    def report(self) -> str:
        return (
            f"{self.dialect}: {self.operations} operations, {self.commits} commits, {self.comparisons} comparisons"
            f" of all counters, {self.whole} of all rows; {self.counters} counters compared,"
            f" {self.doubtful} not held at the time"
        )


class BusyBlocks(RuleBasedStateMachine):
    def __init__(self, run: Run):
        super().__init__()
        self.run = run
        self.sqlite = run.dialect == "sqlite"
        self.has_merge = run.has_merge
        self.data: Sequence[str | None] = HOSTILE
        self.model = Model(run.dialect, Pragmas())
        self.trace: list[tuple[str, Sequence[Any]]] = []
        # The states to go back to: at the transaction's begin, and at each savepoint.
        self.states: list[Model] = []
        self.window = False  # where triggers are off on purpose
        run.reset()
        insert_parents(self, 0, 0, 0, 0, 0)
        for i in range(3):
            insert_instances(self, 1, 2 * i, i, i, 0)
            insert_jobs(self, 2, 3 * i, i, i, 0)

    # What the operations use.

    def id(self, table: str, number: int) -> Id:
        ids = self.run.ids[table]
        return ids[number % len(ids)]

    def columns(self, table: str, row: dict[str, Any]) -> dict[str, Any]:
        return self.run.plain[table] | row

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        self.trace.append((sql, parameters))
        try:
            return self.run.connection.execute(sql if self.sqlite else sql.replace("?", "%s"), parameters)
        except REFUSALS:
            raise
        except (sqlite3.Error, psycopg.Error) as error:
            raise AssertionError(self.told(f"failed: {error!r}")) from error

    def statement(
        self, sql: str, parameters: Sequence[Any], after: Model, outcome: Outcome | None = None
    ) -> bool:
        """Execute, which has to succeed or fail as `outcome` says, else as the foreign keys do."""
        return self.attempt(lambda: self.execute(sql, parameters), after, outcome)

    def copy(self, table: str, rows: Sequence[dict[str, Any]], after: Model, outcome: Outcome | None) -> None:
        def copy() -> None:
            sql = f"COPY {table} ({', '.join(rows[0])}) FROM STDIN"
            self.trace.extend((sql, tuple(row.values())) for row in rows)
            with self.run.connection.cursor() as cursor, cursor.copy(sql) as out:
                for row in rows:
                    out.write_row(list(row.values()))

        self.attempt(copy, after, outcome)

    def attempt(self, execute: Callable[[], Any], after: Model, outcome: Outcome | None) -> bool:
        self.run.operations += 1
        outcome = outcome or after.outcome_after(self.model)
        guarded = not self.sqlite and self.states and outcome is not Outcome.SUCCEEDS
        if guarded:
            self.execute("SAVEPOINT attempt")
        try:
            execute()
            failed = None
        except REFUSALS as error:
            failed = error
            if guarded:
                self.execute("ROLLBACK TO attempt")
        if guarded:
            self.execute("RELEASE attempt")
        if failed is not None:
            assert outcome is not Outcome.SUCCEEDS, self.told(f"was refused: {failed}")
        else:
            assert outcome is not Outcome.FAILS, self.told("was not refused")
            self.model = after
        if not self.states:
            self.ended()
        elif self.sqlite or self.model.immediate:
            self.compare()
        return failed is None

    def begin(self) -> None:
        if not self.states:
            self.execute("BEGIN")
            self.states.append(self.model)

    def commit(self) -> None:
        if self.states:
            self.execute("COMMIT")
            self.states.clear()
            self.ended()

    def ended(self) -> None:
        self.model = self.model.committed()
        self.run.commits += 1
        self.compare()
        if self.run.commits % 50 == 0:
            self.compare_rows()

    def rollback(self) -> None:
        if self.states:
            self.execute("ROLLBACK")
            self.model = self.states[0]
            self.states.clear()
            self.compare()
            self.end_replica()

    def savepoint(self) -> None:
        self.begin()
        self.execute(f"SAVEPOINT s{len(self.states)}")
        self.states.append(self.model)

    def rollback_to(self, number: int) -> None:
        if len(self.states) > 1:
            index = 1 + number % (len(self.states) - 1)
            self.execute(f"ROLLBACK TO s{index}")
            self.model = self.states[index]
            del self.states[index + 1 :]
            if self.sqlite or self.model.immediate:
                self.compare()
            self.end_replica()

    def release(self, number: int) -> None:
        if len(self.states) > 1:
            index = 1 + number % (len(self.states) - 1)
            self.execute(f"RELEASE s{index}")
            del self.states[index:]

    def truncate(self, table: str) -> None:
        """PostgreSQL may refuse it after other statements of the transaction, while deferred triggers wait."""
        sql = f"TRUNCATE {table} CASCADE"
        after = self.model.copy()
        for row in after.jobs.values():
            if row.instance in after.instances and not after.firing:
                after.doubt[row.instance] = None
        after.jobs.clear()
        if table == "instances":
            after.instances.clear()
            after.doubt.clear()
        waiting = bool(self.states) and not self.model.immediate
        self.statement(sql, [], after, Outcome.EITHER if waiting else Outcome.SUCCEEDS)

    # Comparison.

    def told(self, what: str) -> str:
        """The statements so far, for a failure that Hypothesis made as short as it can."""
        shown = [f"{sql}  {list(map(str, parameters))!r:.2000}" for sql, parameters in self.trace[-60:]]
        return "\n".join([*shown, what])

    def compare(self) -> None:
        self.run.comparisons += 1
        sql = "SELECT id, status, busy_blocks FROM instances"
        connection = self.run.connection
        found = {id: (status, number) for id, status, number in connection.execute(sql)}
        expected = self.model.truth()
        self.run.counters += len(found)
        self.run.doubtful += len(self.model.doubt)
        if found == expected:
            return
        for id, not_held in self.model.doubt.items():
            if id in found:
                status = expected[id][0]
                status = found[id][0] if {status, found[id][0]} <= {*DERIVED} else status
                expected[id] = (status, found[id][1]) if not_held is None else not_held
        assert found == expected, self.told(f"found {found}\nexpected {expected}")

    def compare_rows(self) -> None:
        self.run.whole += 1
        model, connection = self.model, self.run.connection
        sql = "SELECT id, project_id, run_id, instance_id, job_runtime_data, status FROM jobs"
        jobs = {row[0]: row[1:] for row in connection.execute(sql)}
        assert jobs == model.jobs, self.told(f"found {jobs}\nexpected {model.jobs}")
        rows = connection.execute("SELECT id, project_id, name FROM instances")
        expected = {id: (row.project, row.name) for id, row in model.instances.items()}
        assert {row[0]: row[1:] for row in rows} == expected, self.told("instances differ")
        assert dict(connection.execute("SELECT id, project_id FROM runs").fetchall()) == model.runs
        assert {row[0] for row in connection.execute("SELECT id FROM projects")} == model.projects.keys()

    # Rules.

    def operate(self, code: bytes) -> None:
        for start in range(0, len(code), WIDTH):
            kind, *numbers = code[start : start + WIDTH]
            operation = self.run.operators[kind % len(self.run.operators)]
            if operation is not None:
                operation(self, *numbers)

    @rule(code=st.binary(min_size=STEP * WIDTH, max_size=STEP * WIDTH))
    def work(self, code: bytes) -> None:
        self.operate(code)

    more_work = rule(code=st.binary(min_size=STEP * WIDTH, max_size=STEP * WIDTH))(work.__wrapped__)

    @rule(data=st.lists(DATA, min_size=3, max_size=3))
    def other_data(self, data: list[str | None]) -> None:
        self.data = data

    @rule(code=st.binary(min_size=8 * WIDTH, max_size=8 * WIDTH), kind=st.integers(0, 7))
    def without_triggers(self, code: bytes, kind: int) -> None:
        """Writes that no trigger sees, now and then: what they change is in doubt."""
        if kind > 1:
            self.operate(code)
            return
        if kind == 1 and not self.sqlite:
            self.set_replica(True)
            self.window = True
            self.operate(code)
            self.window = False
            self.end_replica()
            return
        self.set_disabled(True)
        self.operate(code)
        if self.model.disabled:
            self.set_disabled(False)

    def end_replica(self) -> None:
        """Back to ordinary triggers; also where a rollback takes the session back to before that."""
        if not self.model.replica or self.window:
            return
        if self.model.dangling():
            # Without foreign keys any statement on such a row may fail later, triggers or not.
            self.commit()
            after = self.model.copy()
            after.delete_dangling()
            self.execute("BEGIN")
            self.execute("DELETE FROM runs WHERE project_id NOT IN (SELECT id FROM projects)")
            self.execute("DELETE FROM instances WHERE project_id NOT IN (SELECT id FROM projects)")
            self.execute(
                "DELETE FROM jobs WHERE project_id NOT IN (SELECT id FROM projects) OR run_id NOT IN"
                " (SELECT id FROM runs) OR instance_id IS NOT NULL AND instance_id NOT IN (SELECT id FROM instances)"
            )
            self.execute("COMMIT")
            self.model = after
            self.compare_rows()
        self.set_replica(False)

    def set_replica(self, on: bool) -> None:
        after = self.model.copy()
        after.replica = on
        role = "replica" if on else "origin"
        self.statement(f"SET session_replication_role = {role}", [], after, Outcome.SUCCEEDS)

    def set_disabled(self, on: bool) -> None:
        """Triggers off or on: in a transaction of its own, for PostgreSQL refuses it while triggers wait."""
        self.commit()
        after = self.model.copy()
        after.disabled = on
        self.execute("BEGIN")
        if self.sqlite:
            for name in self.run.triggers:
                self.execute(objects.drop("sqlite", name) if on else objects.read("sqlite", name))
        else:
            for table in ("jobs", "instances"):
                self.execute(f"ALTER TABLE {table} {'DISABLE' if on else 'ENABLE'} TRIGGER USER")
        self.execute("COMMIT")
        self.model = after

    @precondition(lambda self: self.sqlite)
    @rule(foreign_keys=st.booleans(), recursive_triggers=st.booleans())
    def pragmas(self, foreign_keys: bool, recursive_triggers: bool) -> None:
        # SQLite ignores PRAGMA foreign_keys within a transaction.
        self.commit()
        self.execute(f"PRAGMA foreign_keys={foreign_keys:d}")
        self.execute(f"PRAGMA recursive_triggers={recursive_triggers:d}")
        self.model.pragmas.foreign_keys = foreign_keys
        self.model.pragmas.recursive_triggers = recursive_triggers

    @rule()
    def backfill(self) -> None:
        """The correction that `alembic upgrade head` runs leaves nothing in doubt."""
        self.commit()
        for column in counters.REPORTS:
            counters.correct(self.run.alchemy, column, self.run.alchemy.commit)
        self.run.alchemy.rollback()
        self.model = self.model.copy()
        self.model.doubt.clear()
        self.compare()
        self.compare_rows()

    def teardown(self) -> None:
        self.run.connection.rollback()
        self.states.clear()
        if self.model.disabled:
            self.set_disabled(False)


def explore(run: Run, seed: int, examples: int, steps: int = 20, *phases: Phase) -> None:
    machine = type(
        "BusyBlocksOn" + run.dialect.title(),
        (BusyBlocks,),
        {"__init__": lambda self: BusyBlocks.__init__(self, run)},
    )
    hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases or (Phase.generate, Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )


@pytest.fixture
def opened() -> Iterator[Callable[[Database], Run]]:
    runs = []

    def open(database: Database) -> Run:
        runs.append(Run(database))
        return runs[-1]

    yield open
    for run in runs:
        run.close()


def test_operations(protected: Database, opened: Callable[[Database], Run]) -> None:
    run = opened(protected)
    seed, start = 0, time.monotonic()
    while seed == 0 or run.operations < OPERATIONS:
        seed += 1
        explore(run, seed, 100 if OPERATIONS else 20)
        rate = run.operations / (time.monotonic() - start)
        print(f"\n{run.report()}; seeds 1 to {seed}; {rate:.0f} operations a second", flush=True)
    # What it is to find has been there.
    assert run.operations > 1000
    assert run.doubtful < run.counters / 4


def test_without_any_one_trigger_it_fails(protected: Database, opened: Callable[[Database], Run]) -> None:
    """The machine itself: it finds what is wrong with a database that lacks a trigger, whichever it is."""
    run = opened(protected)
    for name in list(run.triggers):
        run.connection.execute(objects.drop(run.dialect, name))
        run.triggers.remove(name)
        with pytest.raises(AssertionError):
            explore(run, 1, 100, 20, Phase.generate)
        run.connection.execute(objects.read(run.dialect, name))
        run.triggers.append(name)
