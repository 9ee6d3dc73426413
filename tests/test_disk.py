"""SQLite on a disk that is full, in a file that may not be written, and in such a folder."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Databases
from processes import CHECK, DSTACKS_OWN, HOOK, PLAIN_START, START, UPGRADE, Command, Result, run
from support import ROOT, Database, schema_of
from test_hook import MIGRATE, environment_of
from test_kills import OLD_RELEASE, prepared, rows_of, succeeds, wrong

DISK = 16 * 1024**2  # bytes
STEP = 32 * 1024


def check_failure(output: str) -> None:
    """One sentence, at the end of what was logged, and no traceback."""
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("FAILED: "), output
    assert output.count("FAILED: ") == 1


# A disk that is full


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, small and in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(
            f"NOT TESTED: a full disk. It needs to mount a tmpfs: {mounted.stderr.strip()}. Run pytest as root,"
            " in a container with --cap-add SYS_ADMIN."
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, free: int) -> Path:
    """Leave so many bytes; the file to remove afterwards."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - free)
    return filler


def run_on_full_disk(original: Database, command: Command, disk: Path, free: int) -> tuple[Result, Database]:
    for path in disk.iterdir():
        path.unlink()
    database = Database(f"sqlite+aiosqlite:///{disk}/sqlite.db")
    shutil.copy(original.path, database.path)
    filler = fill(disk, free)
    result = run(database, command)
    filler.unlink()
    return result, database


@pytest.mark.parametrize("kind", ["bare", "protected", pytest.param(OLD_RELEASE, marks=pytest.mark.releases)])
def test_full_disk(databases: Databases, disk: Path, kind: str) -> None:
    """With more room at each turn, until there is enough of it: so that every step is the one that fails.

    The hook lets a server start wherever it starts without it.
    """
    original = prepared(databases, "sqlite", kind)
    schema, rows = schema_of(original), rows_of(original)
    on_roomy_disk, database = run_on_full_disk(original, UPGRADE, disk, DISK // 2)
    assert on_roomy_disk.code == 0
    rows_after = rows_of(database)
    failures = 0
    for free in range(0, DISK // 2, STEP):
        plain, _ = run_on_full_disk(original, PLAIN_START, disk, free)
        hook, database = run_on_full_disk(original, START, disk, free)
        if kind != OLD_RELEASE:
            assert hook.code == plain.code, hook.output
            assert rows_of(database) == rows
        succeeds(database, START)
        succeeds(database, CHECK)
        assert rows_of(database) == rows_after
        result, database = run_on_full_disk(original, UPGRADE, disk, free)
        if result.code == 0:
            break
        failures += 1
        check_failure(result.output)
        if kind != OLD_RELEASE:
            assert rows_of(database) == rows
        succeeds(database, UPGRADE)
        succeeds(database, CHECK)
        assert rows_of(database) == rows_after
        assert wrong(database) == 0
        print(
            f"{kind}, {free // 1024} KiB: plain {plain.code}, hook {hook.code}; {result.output.splitlines()[-1]}"
        )
    assert result.code == 0
    assert failures
