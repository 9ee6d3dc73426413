"""The benchmark works: it measures dstack's own statements, on rows that are there, and sees wrong counters.

No time is asserted here. `python -m bench` measures.
"""

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from bench import deploy, postgresql, suite, variants
from bench.data import Rows, fill, seed
from bench.measure import Line, Run, alternate
from bench.statements import EVERYTHING, WORKS, with_parameters
from conftest import Databases
from support import Database


def test_statements_are_dstacks_own(databases: Databases, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(suite.__file__).with_name("capture.py"))],
        env={
            **os.environ,
            "DSTACK_DATABASE_URL": databases.make("sqlite", "bare").url,
            "DSTACK_SERVER_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    sent = set(result.stdout.splitlines())
    # SQLAlchemy names the table after RETURNING on PostgreSQL only.
    ours = {
        re.sub(r"RETURNING \w+\.", "RETURNING ", with_parameters(statement, lambda _: "?"))
        for work in WORKS
        for transaction in work.transactions
        for statement in transaction
    }
    assert ours - sent == set()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def seeded(request: pytest.FixtureRequest, databases: Databases) -> Database:
    database = databases.make(request.param, "bare")
    seed(database)
    return database


def test_loops(databases: Databases, seeded: Database, capsys: pytest.CaptureFixture[str]) -> None:
    if seeded.dialect == "sqlite":
        check(suite.on_sqlite(databases, seeded, suite.SMOKE))
        return
    with closing(postgresql.Clients(4)) as clients:
        check(suite.on_postgresql(databases, seeded, suite.SMOKE, [clients]))
    # The plan of a statement inside the triggers.
    assert "Query Text: UPDATE instances" in capsys.readouterr().out


def check(lines: list[Line]) -> None:
    """Each line updated the rows that its statements name; that the counters are right, alternate() has checked."""
    for line in lines:
        rows, cycles = line.rows("ours"), sum(run.cycles for run in line.runs["ours"])
        assert cycles > 0
        if line.work.startswith("one statement"):
            assert rows == (suite.SMOKE.bulk, suite.SMOKE.instances)
            continue
        if f"{EVERYTHING}, " in line.work:
            # Two locks, assign, provision, the lock for the end and the end.
            assert rows[0] == cycles * 6, line.work
            assert rows[1] > cycles * 2, line.work
            continue
        (work,) = (work for work in WORKS if f"{work.name}, " in line.work)
        sent = [statement.split()[1] for transaction in work.transactions for statement in transaction]
        assert rows[0] == cycles * sent.count("jobs"), line.work
        # Of clients that take the lock from each other, the last UPDATE finds no row, as with dstack.
        assert rows[1] == cycles * sent.count("instances") or line.work.startswith("4 clients"), line.work


def test_history(databases: Databases, seeded: Database) -> None:
    check([suite.with_history(databases, seeded, suite.SMOKE)])


def test_deploy_beside_a_writer(databases: Databases, seeded: Database) -> None:
    database = databases.copy(seeded)
    free = fill(database, {2: 3}, 10)
    assert deploy.scan(database, 1).instances == 3
    assert deploy.spoil(database, every=1) == 3
    process, waits = deploy.while_writing(database, Rows(2, 3, free), 0.1, lambda: deploy.upgrade(database))
    database.check_right()
    assert "The triggers are installed" in process.log
    assert process.memory > 0
    assert min(len(waits.before), len(waits.meanwhile)) > 0


def test_a_benchmark_of_nothing_fails(databases: Databases, seeded: Database) -> None:
    database = databases.copy(seeded)

    def run(_kind: str, _number: int) -> Run:
        return Run(1.0, 1.0, 1, jobs=5, instances=0)

    with pytest.raises(RuntimeError, match="nothing measured"):
        alternate("work", "", {"none": database}, 1, run, lambda _: None)
    with pytest.raises(AssertionError):
        variants.check_on(database)
    with pytest.raises(RuntimeError, match="the triggers left 6 blocks wrong"):
        alternate("work", "", {"ours": database}, 1, lambda *_: Run(1.0, 1.0, 1, 1, 1), lambda _: None)
