"""SQLite on a disk that is full, in a file that may not be written, and in such a folder."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Databases
from processes import CHECK, PLAIN_START, START, UPGRADE, Command, Result, run
from support import Database
from test_hook import rows_of as attachments
from test_kills import OLD_RELEASE, check_kept, prepared, rows_of, succeeds, upgrade_dstack, wrong

DISK = 16 * 1024**2  # bytes
# 16 KiB more room at each turn in a full run (see test_kills.py).
STEP = (16 if "BUSY_BLOCKS_KILLS" in os.environ else 128) * 1024


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """mount(8), undone at the end. Permissions would not do: root, who runs tests in CI, ignores them."""
    with ExitStack() as stack:

        def mounted(*arguments: object) -> None:
            result = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
            if result.returncode != 0:
                pytest.skip(
                    f"NOT TESTED: a full disk and read-only files. mount says: {result.stderr.strip()}. Run"
                    " pytest as root; a container needs `docker run --cap-add SYS_ADMIN`."
                )
            if "remount" not in str(arguments):
                stack.callback(subprocess.run, ["umount", str(arguments[-1])], check=True)

        yield mounted


def check_failure(result: Result) -> None:
    """Exit status 1 and one sentence, after what was logged."""
    assert result.code == 1, result.output
    assert "Traceback" not in result.output
    assert result.output.splitlines()[-1].startswith("FAILED: "), result.output
    assert result.output.count("FAILED: ") == 1


# A disk that is full


def run_on_full_disk(original: Database, command: Command, disk: Path, free: int) -> tuple[Result, Database]:
    """Run with so many bytes left on the disk; afterwards there is room again."""
    for path in disk.iterdir():
        path.unlink()
    database = Database(f"sqlite+aiosqlite:///{disk}/sqlite.db")
    shutil.copy(original.path, database.path)
    filler = disk / "filler"
    with filler.open("wb") as file:
        left = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - free)
    result = run(database, command)
    filler.unlink()
    return result, database


@pytest.mark.parametrize("kind", ["bare", "protected", pytest.param(OLD_RELEASE, marks=pytest.mark.releases)])
def test_full_disk(databases: Databases, mount: Callable[..., None], tmp_path: Path, kind: str) -> None:
    """With more room at each turn, until there is enough: so that every step is once the one that fails."""
    mount("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", tmp_path)
    original = prepared(databases, "sqlite", kind)
    rows, attached = rows_of(original), attachments(original)
    result, database = run_on_full_disk(original, UPGRADE, tmp_path, DISK // 2)
    assert result.code == 0, result.output
    rows_after = rows_of(database)

    def check_mended_by(command: Command) -> None:
        if kind == OLD_RELEASE:
            assert attachments(database) == attached
            failure = upgrade_dstack(databases, database, command, attached)
            if failure:
                print(failure)
                return
        else:
            assert rows_of(database) == rows
            succeeds(database, command)
        succeeds(database, CHECK)
        check_kept(database)
        assert rows_of(database) == rows_after

    failures = 0
    # dstack's own migrations rebuild tables, which takes megabytes.
    for free in range(0, DISK // 2, STEP * 8 if kind == OLD_RELEASE else STEP):
        plain, _ = run_on_full_disk(original, PLAIN_START, tmp_path, free)
        hook, database = run_on_full_disk(original, START, tmp_path, free)
        print(f"{kind}, {free // 1024} KiB: exit status without the hook {plain.code}, with it {hook.code}")
        if kind != OLD_RELEASE:
            assert hook.code == plain.code, hook.output
        if hook.code == 0 and wrong(database):
            assert "busy_blocks is NOT kept right" in hook.output
        check_mended_by(START)
        result, database = run_on_full_disk(original, UPGRADE, tmp_path, free)
        if result.code == 0:
            break
        check_failure(result)
        print(result.output.splitlines()[-1])
        failures += 1
        check_mended_by(UPGRADE)
    assert result.code == 0
    assert failures


# What may not be written


@pytest.mark.parametrize("what", ["file", "folder", "file and folder"])
def test_read_only(databases: Databases, mount: Callable[..., None], tmp_path: Path, what: str) -> None:
    original = prepared(databases, "sqlite", "bare")
    elsewhere, folder = tmp_path / "elsewhere.db", tmp_path / "folder"
    shutil.copy(original.path, elsewhere)
    folder.mkdir()
    database = Database(f"sqlite+aiosqlite:///{folder}/sqlite.db")
    shutil.copy(original.path, database.path)
    before = database.path.read_bytes()
    if "folder" in what:
        mount("--bind", folder, folder)
        mount("-o", "remount,bind,ro", folder)
    if what == "folder":
        mount("--bind", elsewhere, database.path)
    if what == "file":
        mount("--bind", database.path, database.path)
        mount("-o", "remount,bind,ro", database.path)

    plain, hook, result = (run(database, command) for command in (PLAIN_START, START, UPGRADE))
    print(f"{what}: exit status without the hook {plain.code}, with it {hook.code}")
    assert hook.code == plain.code, hook.output
    assert (hook.code == 0) == ("busy_blocks is NOT kept right" in hook.output)
    check_failure(result)
    print(result.output.splitlines()[-1])
    assert database.path.read_bytes() == before

    again = Database(f"sqlite+aiosqlite:///{tmp_path}/again.db")
    shutil.copy(database.path, again.path)
    succeeds(again, UPGRADE)
    succeeds(again, CHECK)
    check_kept(again)
    assert rows_of(again) == rows_of(original)
