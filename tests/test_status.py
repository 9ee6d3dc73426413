"""The status BUSY or IDLE of an instance follows the attached jobs; every other is left alone."""

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sqlalchemy import Connection
from support import Database, add_instance, add_job, add_project, job_runtime_data, key, run_sql

LONG_AGO = datetime(2026, 1, 1)
COUNTER_ALONE = {"DSTACK_BUSY_BLOCKS_REVISION": "0002"}


def status(database: Database, instance: str) -> str:
    with database.begin() as connection:
        return str(
            run_sql(connection, "SELECT status FROM instances WHERE id = :id", id=instance).scalar_one()
        )


def idle_since(database: Database, instance: str) -> datetime | None:
    with database.begin() as connection:
        found = run_sql(
            connection, "SELECT last_job_processed_at FROM instances WHERE id = :id", id=instance
        ).scalar_one()
    return datetime.fromisoformat(found) if isinstance(found, str) else found


def attach(connection: Connection, job: str, instance: str | None) -> None:
    run_sql(
        connection,
        "UPDATE jobs SET instance_id = :instance WHERE id = :job",
        instance=key(connection, instance),
        job=job,
    )


def add(database: Database, **values: Any) -> tuple[str, str]:
    """An instance, and a job that is not attached."""
    with database.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, last_job_processed_at=LONG_AGO, **values)
        return instance, add_job(connection, owner)


def test_follows_one_job_and_several(protected: Database) -> None:
    instance, job = add(protected)
    with protected.begin() as connection:
        owner = add_project(connection)
        # A job of no blocks is one that is attached, too.
        other = add_job(connection, owner, job_runtime_data=job_runtime_data(0))
    for change, expected in (
        ([(job, instance)], "BUSY"),
        ([(other, instance)], "BUSY"),
        ([(job, None)], "BUSY"),
        ([(other, None)], "IDLE"),
        ([(other, instance)], "BUSY"),
        ([(job, instance), (other, None)], "BUSY"),
        ([(job, None)], "IDLE"),
    ):
        with protected.begin() as connection:
            for which, where in change:
                attach(connection, which, where)
        assert status(protected, instance) == expected
        protected.check_right()
    with protected.begin() as connection:
        attach(connection, job, instance)
    with protected.begin() as connection:
        run_sql(connection, "DELETE FROM jobs WHERE id = :id", id=job)
    assert status(protected, instance) == "IDLE"


@pytest.mark.parametrize("other", ["PENDING", "PROVISIONING", "TERMINATING", "TERMINATED"])
def test_every_other_status_is_left_alone(protected: Database, other: str) -> None:
    instance, job = add(protected, status=other)
    with protected.begin() as connection:
        attach(connection, job, instance)
    assert status(protected, instance) == other
    with protected.begin() as connection:
        attach(connection, job, None)
    assert status(protected, instance) == other
    assert idle_since(protected, instance) == LONG_AGO


@pytest.mark.parametrize("written", ["BUSY", "IDLE"])
@pytest.mark.parametrize("attached", [False, True])
def test_what_the_server_writes_from_a_stale_read_does_not_stay(
    protected: Database, written: str, attached: bool
) -> None:
    instance, job = add(protected, status="PROVISIONING")
    with protected.begin() as connection:
        attach(connection, job, instance if attached else None)
    with protected.begin() as connection:
        run_sql(
            connection, "UPDATE instances SET status = :status WHERE id = :id", status=written, id=instance
        )
    assert status(protected, instance) == ("BUSY" if attached else "IDLE")
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = 'TERMINATING' WHERE id = :id", id=instance)
    assert status(protected, instance) == "TERMINATING"


def test_inserted(protected: Database) -> None:
    instance, _ = add(protected, status="BUSY")
    assert status(protected, instance) == "IDLE"


def test_the_idle_time_is_counted_from_the_detach(protected: Database) -> None:
    """A terminating worker that has lost its lock writes nothing to the instance."""
    instance, job = add(protected)
    with protected.begin() as connection:
        run_sql(
            connection, "UPDATE instances SET status = 'BUSY', busy_blocks = 1 WHERE id = :id", id=instance
        )
        attach(connection, job, instance)
    assert idle_since(protected, instance) == LONG_AGO
    with protected.begin() as connection:
        attach(connection, job, None)
    since = idle_since(protected, instance)
    assert since is not None
    assert abs(datetime.now(timezone.utc).replace(tzinfo=None) - since) < timedelta(hours=1)


def test_backfill_reports_and_corrects(bare: Database) -> None:
    stuck, job = add(bare, name="stuck", status="BUSY")
    stale, _ = add(bare, name="stale", status="IDLE", busy_blocks=1)
    with bare.begin() as connection:
        attach(connection, job, stale)
    printed = bare.upgrade()
    assert status(bare, stuck) == "IDLE"
    assert status(bare, stale) == "BUSY"
    assert "status was BUSY, is IDLE" in printed
    assert "status was IDLE, is BUSY" in printed
    assert "2 instances had a wrong status: corrected" in printed
    assert idle_since(bare, stuck) != LONG_AGO
    bare.check_right()


def test_check_names_a_wrong_status_and_the_next_run_corrects_it(protected: Database) -> None:
    instance, _ = add(protected, name="stuck")
    trigger = "busy_blocks_instances_status_update"
    with protected.begin() as connection:
        if protected.dialect == "sqlite":
            (sql,) = connection.exec_driver_sql(
                f"SELECT sql FROM sqlite_master WHERE name = '{trigger}'"
            ).one()
            connection.exec_driver_sql(f"DROP TRIGGER {trigger}")
        else:
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        run_sql(connection, "UPDATE instances SET status = 'BUSY' WHERE id = :id", id=instance)
        if protected.dialect == "sqlite":
            connection.exec_driver_sql(sql)
    result = protected.alembic("check")
    assert result.returncode == 1
    assert "status is BUSY, should be IDLE" in result.stderr
    assert "missing" not in result.stderr
    assert "status was BUSY, is IDLE" in protected.upgrade()
    assert protected.alembic("check").returncode == 0


def test_the_counter_alone(bare: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, job = add(bare, status="BUSY", busy_blocks=7)
    assert bare.alembic("upgrade", "0002").returncode == 0
    assert status(bare, stuck) == "BUSY"
    result = bare.alembic("check")
    assert result.returncode == 1
    assert "revision is 0002, not 0004" in result.stderr
    for name, value in COUNTER_ALONE.items():
        monkeypatch.setenv(name, value)
    assert bare.alembic("check").returncode == 0
    assert "nothing to do" in bare.upgrade()
    script = bare.alembic("upgrade", "head", "--sql").stdout
    assert ("busy_blocks_jobs_update" in script, "0004" in script) == (True, False)
    with bare.begin() as connection:
        attach(connection, job, stuck)
    with bare.begin() as connection:
        attach(connection, job, None)
    assert status(bare, stuck) == "BUSY"
    monkeypatch.undo()
    bare.upgrade()
    assert status(bare, stuck) == "IDLE"
    for name, value in COUNTER_ALONE.items():
        monkeypatch.setenv(name, value)
    bare.upgrade()
    assert bare.alembic("check").returncode == 0
    assert bare.alembic("downgrade", "base").returncode == 0


def test_the_setting_names_a_revision(protected: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTACK_BUSY_BLOCKS_REVISION", "9999")
    result = protected.alembic("upgrade", "head")
    assert result.returncode == 1
    assert "DSTACK_BUSY_BLOCKS_REVISION is 9999" in result.stderr
    result = protected.alembic("upgrade", "head", "--sql")
    assert (result.returncode, result.stdout) == (1, "")
    monkeypatch.undo()
    assert protected.alembic("check").returncode == 0


def test_the_idle_time_out_of_the_real_pipeline(databases: Any, dialect: str) -> None:
    """An instance that has just been busy stays, and one that has been idle for long ends.

    Without the triggers it stays BUSY for ever.
    """
    seen = {}
    for kind in ("bare", "protected"):
        database = databases.make(dialect, kind)
        with TemporaryDirectory() as folder:
            result = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("idle.py"))],
                env={**os.environ, "DSTACK_DATABASE_URL": database.url, "DSTACK_SERVER_DIR": folder},
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert result.returncode == 0, result.stderr
        seen[kind] = json.loads(result.stdout.splitlines()[-1])
    assert seen == {"bare": ["BUSY", "BUSY"], "protected": ["IDLE", "TERMINATING"]}


def test_another_id(protected: Database) -> None:
    """The jobs stay with the old id, where foreign keys are off; found by tests/test_model.py."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner)
        # Of no blocks, so that the counter has no need to be written.
        add_job(connection, owner, instance, job_runtime_data=job_runtime_data(0))
    with protected.engine.connect() as connection:
        if protected.dialect == "sqlite":
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        else:
            run_sql(connection, "ALTER TABLE jobs DROP CONSTRAINT fk_jobs_instance_id_instances")
        run_sql(connection, "UPDATE instances SET id = :new WHERE id = :old", new="e" * 32, old=instance)
        connection.commit()
    assert status(protected, "e" * 32) == "IDLE"


def test_a_job_of_no_blocks_that_goes_with_others(protected: Database) -> None:
    """Nothing is left to add to the counter, and yet the instance has lost its last job. Found by the model."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="IDLE")
        add_job(connection, owner, instance, job_runtime_data=job_runtime_data(0))
        other = add_job(connection, owner, job_runtime_data=job_runtime_data(2))
    assert status(protected, instance) == "BUSY"
    with protected.begin() as connection:
        attach(connection, other, instance)
        run_sql(connection, "UPDATE jobs SET instance_id = NULL WHERE instance_id = :id", id=instance)
    assert status(protected, instance) == "IDLE"
    with protected.begin() as connection:
        run_sql(connection, "UPDATE jobs SET instance_id = :id", id=instance)
        attach(connection, other, None)
    assert status(protected, instance) == "BUSY"
    protected.check_right()
