"""Two releases of dstack on one PostgreSQL, as in a rolling deploy; only the newer one has the hook."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Databases
from sqlalchemy import text
from support import Database
from test_hook import HOOK, add_rows, environment_of, inject_drift, names_of_ours, python, start, write_wrong
from test_neighbours import wait_until
from test_storms import STORM, Outcome, watched


@contextmanager
def storming(database: Database, release: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The pipelines of a server of that release at work, assigning and terminating, until they are killed."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [python(release), str(STORM), "assign", "1000", "1"],
            env=environment_of(database, None, DSTACK_SERVER_DIR=str(folder / "server")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def moved(database: Database) -> int:
    """How many jobs the pipelines attached, and detached again."""
    with database.begin() as connection:
        statement = "SELECT count(*) FROM jobs WHERE used_instance_id IS NOT NULL AND instance_id IS NULL"
        return int(connection.scalar(text(statement)))


def revision(database: Database) -> str:
    with database.begin() as connection:
        return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def check_complete(database: Database) -> None:
    result = database.alembic("check")
    assert result.returncode == 0, result.stderr
    add_rows(database)
    database.check_right()


@pytest.mark.releases
@pytest.mark.parametrize("old", ["0.22.1", "0.21.2"])
def test_a_rolling_deploy(databases: Databases, old: str, tmp_path: Path) -> None:
    """With dstack 0.22.5 as the newest, 0.22.1 has the same schema, and 0.21.2 an older one."""
    database = databases.make("postgresql")
    assert start(database, old, None).returncode == 0
    old_revision = revision(database)
    add_rows(database)
    write_wrong(database)
    outcome = Outcome()
    with storming(database, old, tmp_path) as process:
        wait_until(lambda: moved(database) > 5, "the old server to detach jobs", 300)
        deployed = start(database)
        assert deployed.returncode == 0, deployed.stderr
        assert "NOT kept right" not in deployed.stderr
        before = moved(database)
        with watched(database, outcome):
            wait_until(lambda: moved(database) > before + 20, "the old server to detach more", 300)
        assert process.poll() is None
    log = (tmp_path / "log").read_text()
    print(old, outcome, moved(database), log.count("Unexpected exception"))
    assert outcome.wrong_looks == 0
    assert outcome.looks > 0
    assert "Unexpected exception" not in log
    check_complete(database)

    objects = names_of_ours(database)
    for location in (None, HOOK):
        inject_drift(database)
        restarted = start(database, old, location)
        if revision(database) == old_revision:
            assert restarted.returncode == 0, restarted.stderr
            assert "NOT kept right" not in restarted.stderr
        else:
            # It does not start, as without us.
            assert "Can't locate revision" in restarted.stderr
        assert names_of_ours(database) == objects
    if revision(database) == old_revision:
        database.check_right()
    assert start(database).returncode == 0
    check_complete(database)
