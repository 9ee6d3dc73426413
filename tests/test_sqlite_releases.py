"""Old and new releases of SQLite, and one built without JSON, by their own shells."""

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_shell import PACKAGES, sqlite_shell
from support import Database, add_instance, add_job, add_project, job_runtime_data, schema_of
from test_offline import print_sql
from test_surface import HOSTILE

pytestmark = pytest.mark.parametrize("dialect", ["sqlite"])
compiled = pytest.mark.skipif(
    not (shutil.which("npm") and shutil.which("cc")),
    reason="npm and a C compiler are not installed (apt-get install npm gcc)",
)
# Its JSON functions are not marked as harmless in a schema from 3.38, where they became built in, to 3.40.
REFUSES_UNTRUSTED = ((3, 38), (3, 41))
UNTRUSTED = "PRAGMA trusted_schema = OFF"


def run(shell: Path, database: Database, script: str) -> subprocess.CompletedProcess[str]:
    command = [str(shell), "-batch", "-bail", str(database.path)]
    return subprocess.run(command, input=script, text=True, capture_output=True, timeout=120)


def done(shell: Path, database: Database, script: str) -> None:
    result = run(shell, database, script)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def offline(database: Database, *arguments: str) -> str:
    """SQLAlchemy writes RETURNING, which SQLite has since 3.35, behind the INSERT of alembic's version."""
    return print_sql(database, *arguments).replace(" RETURNING version_num;", ";")


def refuses_untrusted(version: str) -> bool:
    first, end = REFUSES_UNTRUSTED
    return first <= tuple(map(int, version.split("."))) < end


def add_rows(database: Database) -> tuple[str, str, str]:
    """The counters are wrong; two instances and the last job, which is not attached."""
    with database.begin() as connection:
        owner = add_project(connection)
        one = add_instance(connection, owner, status="BUSY", busy_blocks=77)
        two = add_instance(connection, owner, status="PENDING", busy_blocks=77)
        for data in HOSTILE:
            add_job(connection, owner, one, job_runtime_data=data)
        return one, two, add_job(connection, owner, job_runtime_data=job_runtime_data(3))


def statements(one: str, two: str, job: str) -> list[str]:
    return [
        f"UPDATE instances SET busy_blocks = 5 WHERE id = '{one}'; UPDATE jobs SET instance_id = '{one}' WHERE id = '{job}'",
        f"UPDATE jobs SET job_runtime_data = '{job_runtime_data(6)}' WHERE id = '{job}'",
        f"UPDATE jobs SET instance_id = '{two}' WHERE instance_id = '{one}'",
        f"UPDATE instances SET status = 'PROVISIONING', busy_blocks = 1 WHERE id = '{two}'",
        f"CREATE TEMP TABLE copied AS SELECT * FROM jobs WHERE id = '{job}'; UPDATE copied SET id = 'x{job[1:]}';"
        " INSERT INTO jobs SELECT * FROM copied",
        f"UPDATE jobs SET instance_id = NULL WHERE id = '{job}'; UPDATE instances SET status = 'IDLE', busy_blocks = 2",
        f"UPDATE jobs SET instance_id = '{one}' WHERE id < '8'",
        f"PRAGMA foreign_keys = ON; DELETE FROM jobs WHERE instance_id = '{one}'",
        "PRAGMA foreign_keys = ON; DELETE FROM runs",
    ]


@compiled
@pytest.mark.releases
@pytest.mark.parametrize("version", PACKAGES)
def test_installs_works_and_removes(bare: Database, version: str) -> None:
    shell = sqlite_shell(version)
    rows = add_rows(bare)
    before = schema_of(bare)
    done(shell, bare, offline(bare, "upgrade", "head"))
    bare.check_right()
    for statement in statements(*rows):
        done(shell, bare, statement + ";")
        bare.check_right()
    result = bare.alembic("check")
    assert result.returncode == 0, result.stderr
    refused = run(shell, bare, f"{UNTRUSTED}; UPDATE instances SET busy_blocks = 1;")
    assert ("unsafe use of json_valid" in refused.stderr) == refuses_untrusted(version), refused.stderr
    bare.check_right()
    done(shell, bare, offline(bare, "downgrade", "head:base"))
    assert schema_of(bare) == before


def test_an_untrusted_schema(protected: Database) -> None:
    """By this Python's own SQLite; the schema is read after the PRAGMA."""
    _, _, job = add_rows(protected)
    with closing(sqlite3.connect(protected.path)) as connection:
        connection.execute(UNTRUSTED)
        connection.execute("SELECT * FROM instances")
        connection.execute("UPDATE jobs SET lock_owner = 'heartbeat'")
        connection.commit()
        if refuses_untrusted(sqlite3.sqlite_version):
            for statement in (
                "UPDATE instances SET busy_blocks = 1",
                f"UPDATE jobs SET job_runtime_data = NULL WHERE id = '{job}'",
            ):
                with pytest.raises(sqlite3.DatabaseError, match="unsafe use of json_valid"):
                    connection.execute(statement)
        else:
            connection.execute("UPDATE instances SET busy_blocks = 1")
            connection.commit()
    protected.check_right()


@compiled
@pytest.mark.releases
def test_built_without_json(protected: Database) -> None:
    """It reads, and heartbeats work; what has to compute a counter or the index fails, and changes nothing."""
    shell = sqlite_shell("3.44.2", "-DSQLITE_OMIT_JSON")
    one, _, job = add_rows(protected)
    done(shell, protected, "SELECT * FROM jobs; SELECT * FROM instances;")
    done(shell, protected, "UPDATE jobs SET last_processed_at = '2026-01-01 00:00:00.000000';")
    done(shell, protected, "UPDATE instances SET name = 'renamed';")
    for statement in (
        f"UPDATE jobs SET instance_id = '{one}' WHERE id = '{job}'",
        "UPDATE jobs SET job_runtime_data = NULL",
        "DELETE FROM jobs",
        "UPDATE instances SET busy_blocks = 1",
        "UPDATE instances SET status = 'IDLE'",
    ):
        failed = run(shell, protected, statement + ";")
        assert failed.returncode != 0
        assert "function" in failed.stderr
        assert "json_" in failed.stderr
        protected.check_right()
