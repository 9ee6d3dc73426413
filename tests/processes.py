"""Commands in processes of their own, forked from the tests: they have dstack imported already.

A new interpreter imports dstack for seconds, and a SIGKILL at a random moment would mostly find it there.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

# What a migration imports only when it runs, to be there before the fork.
import aiosqlite  # noqa: F401
import alembic_postgresql_enum  # noqa: F401
import asyncpg  # noqa: F401
import dstack._internal.server.models  # noqa: F401
import psycopg  # noqa: F401
from alembic.config import main
from dstack._internal.server import db, settings
from sqlalchemy import Engine, event
from support import ROOT, Database

HOOK = str(ROOT / "migrations")
DSTACKS_OWN = settings.ALEMBIC_MIGRATIONS_LOCATION
DEADLINE = 300.0  # seconds
fork = multiprocessing.get_context("fork")


class Result(NamedTuple):
    code: int | None  # negative: the signal that ended it
    output: str
    statements: list[str]  # what it had sent to the database, the last of them perhaps not answered
    seconds: float


class Command(NamedTuple):
    """`alembic` with these arguments; without any, what a dstack server does to the database as it starts."""

    arguments: Sequence[str] = ()
    location: str = HOOK

    def __str__(self) -> str:
        kind = "start" if self.location == HOOK else "start without the hook"
        return " ".join(self.arguments) or kind


START = Command()
PLAIN_START = Command(location=DSTACKS_OWN)
UPGRADE = Command(("upgrade", "head"))
DOWNGRADE = Command(("downgrade", "base"))
CHECK = Command(("check",))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def run(
    database: Database,
    command: Command,
    at: int | None = None,
    after: float | None = None,
    act: Callable[[int], object] = kill,
) -> Result:
    """Run the command in a forked process, and call `act` with its id at one moment of it.

    The moment is `after` seconds from its start or, with `at`, from the point where it is about to send its
    statement of that index to the database. There it stops itself, so `after` 0 is before the statement.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        process = fork.Process(target=_work, args=(folder, database.url, command, at))
        begin = time.monotonic()
        process.start()
        pid = process.pid or 0
        if at is not None:
            # WNOWAIT: the process is left for join() to reap, so the id stays its own until then.
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if after is not None:
            if after:
                os.kill(pid, signal.SIGCONT)
                time.sleep(after)
            act(pid)
            os.kill(pid, signal.SIGCONT)
        process.join(DEADLINE)
        seconds = time.monotonic() - begin
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{command} did not end:\n{_read(folder / 'output')}")
        statements = _read(folder / "statements").splitlines()
        return Result(process.exitcode, _read(folder / "output"), statements, seconds)


def _read(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _work(folder: Path, url: str, command: Command, stop_at: int | None) -> None:
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _record_statements(os.open(folder / "statements", os.O_WRONLY | os.O_CREAT), stop_at)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
    os.environ["DSTACK_DATABASE_URL"] = url
    if command.arguments:
        main(argv=["-c", str(ROOT / "alembic.ini"), *command.arguments], prog="alembic")
    else:
        # As `python -c "asyncio.run(db.migrate())"` in a new interpreter, which would read both here.
        settings.ALEMBIC_MIGRATIONS_LOCATION = command.location
        db.override_db(db.Database(url))
        asyncio.run(db.migrate())


def _record_statements(file: int, stop_at: int | None) -> None:
    """Write down what is about to be sent to the database, and stop this process at one of it."""
    numbers = count()

    def record(statement: str) -> None:
        os.write(file, f"{statement}\n".encode())
        if next(numbers) == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_statement(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        lines = [line for line in statement.splitlines() if not line.lstrip().startswith("--")]
        record(" ".join(" ".join(lines).split())[:200])

    event.listen(Engine, "before_cursor_execute", on_statement)
    event.listen(Engine, "commit", lambda _: record("COMMIT"))
