"""Every release of dstack that changes the schema, one after the other, through the hook.

Takes about half an hour per engine and 42 environments: `pytest -m every_release`.
"""

import re
from typing import Any

import pytest
from conftest import Databases
from support import Database, alembic, schema_of
from test_hook import HOOK, add_rows, inject_drift, names_of_ours, python, rows_of, start, write_wrong

# Of the 86 releases from 0.18.41 to 0.22.5, those whose wheel has other files in
# dstack/_internal/server/migrations/versions than the release before (`pip download --no-deps
# dstack==VERSION` of each; names and contents compared on 2026-12-02), and the newest.
# 0.19.36 and 0.20.11 edit revisions and add none.
RELEASES = [
    "0.18.41", "0.18.42", "0.18.44", "0.19.0", "0.19.4", "0.19.9", "0.19.10", "0.19.15", "0.19.17", "0.19.19",
    "0.19.21", "0.19.22", "0.19.24", "0.19.25", "0.19.27", "0.19.33", "0.19.35", "0.19.36", "0.19.39",
    "0.19.40", "0.20.0", "0.20.1", "0.20.7", "0.20.10", "0.20.11", "0.20.12", "0.20.13", "0.20.14", "0.20.16",
    "0.20.17", "0.20.18", "0.20.19", "0.20.20", "0.20.25", "0.20.27", "0.20.29", "0.21.0", "0.21.1", "0.21.2",
    "0.21.3", "0.22.0", "0.22.1", "newest",
]  # fmt: skip


def started(database: Database, release: str, location: str | None) -> None:
    result = start(database, release, location)
    assert result.returncode == 0, f"{release}: {result.stderr}"
    assert "NOT kept right" not in result.stderr, release


def schema(database: Database) -> list[Any]:
    """Without the order of constraints in a table that alembic rebuilt on SQLite, which is that of a set."""
    return [
        (*row[:3], sorted(re.findall(r"\w+", row[3])) if row[0] == "table" else row[3])
        for row in schema_of(database)
    ]


def alembic_here(database: Database, *arguments: str) -> None:
    result = database.alembic("-x", "dstack=skip", *arguments)
    assert result.returncode == 0, result.stderr


def installs_and_removes(database: Database, release: str, expected: list[Any]) -> None:
    """By the command line, on a database that never had the triggers."""
    before, rows = schema(database), rows_of(database)
    write_wrong(database)
    result = alembic("upgrade", "head", python=python(release), DSTACK_DATABASE_URL=database.url)
    assert result.returncode == 0, f"{release}: {result.stderr}"
    assert schema(database) == expected, release
    database.check_right()
    alembic_here(database, "downgrade", "base")
    assert schema(database) == before, release
    database.check_right()
    assert rows_of(database) == rows, release


@pytest.mark.every_release
def test_every_release(databases: Databases, dialect: str) -> None:
    """Beside it a database that never has the hook: what removing leaves has to be as that one is."""
    protected, never = databases.make(dialect), databases.make(dialect)
    rows: dict[str, Any] = {}
    for release in RELEASES:
        if rows:
            inject_drift(protected)
        started(protected, release, HOOK)
        started(never, release, None)
        alembic_here(protected, "check")
        protected.check_right()
        if rows:
            assert rows_of(protected) == rows, release
        # Also a check that the triggers work there.
        add_rows(protected)
        protected.check_right()
        rows = rows_of(protected)
        add_rows(never)
        installs_and_removes(databases.copy(never), release, schema(protected))
        print(f"{dialect}: dstack {release} is right", flush=True)
    assert names_of_ours(protected) != []
    alembic_here(protected, "downgrade", "base")
    assert schema(protected) == schema(never)
    assert rows_of(protected) == rows
