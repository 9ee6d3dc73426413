"""Work on SQLite, in this process."""

import sqlite3
import time
import uuid
from datetime import datetime
from typing import Any

from support import Database

from bench.data import Rows, instance_id, job_id, values
from bench.measure import Run
from bench.statements import Work

# Drivers give these to SQLite as dstack's column types do.
sqlite3.register_adapter(uuid.UUID, lambda value: value.hex)
sqlite3.register_adapter(datetime, lambda value: value.isoformat(" ", "microseconds"))

BLOCKS = """
    CASE WHEN json_valid({job}.job_runtime_data)
    THEN coalesce(json_extract({job}.job_runtime_data, '$.offer.blocks'), 1) ELSE 1 END
"""
ATTACHED_BLOCKS = f"""
    (SELECT coalesce(sum({BLOCKS.format(job="jobs")}), 0) FROM jobs WHERE jobs.instance_id = instances.id)
"""
# What an external reconciler does: every instance, computed anew.
RECONCILE = f"UPDATE instances SET busy_blocks = {ATTACHED_BLOCKS} WHERE busy_blocks <> {ATTACHED_BLOCKS}"


def connect(database: Database) -> sqlite3.Connection:
    connection = sqlite3.connect(database.path, isolation_level=None, timeout=30)
    # The first three as dstack; without a flush to the disk per commit, so that the triggers' own cost shows.
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "busy_timeout=30000", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def cpu_seconds(_: sqlite3.Connection) -> float:
    """What this thread has run so far."""
    return time.thread_time()


def transaction(
    connection: sqlite3.Connection, statements: tuple[str, ...], parameters: dict[str, Any]
) -> dict[str, int]:
    """Run and commit; the rows updated in each table."""
    updated = {"jobs": 0, "instances": 0}
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements:
        cursor = connection.execute(statement, parameters)
        # The count of a statement with RETURNING is there when its rows are read.
        cursor.fetchall()
        updated[statement.split()[1]] += cursor.rowcount
    connection.execute("COMMIT")
    return updated


def lock_instances(connection: sqlite3.Connection, parameters: dict[str, Any]) -> None:
    connection.execute("UPDATE instances SET lock_token = :lock_token, lock_owner = :lock_owner", parameters)


def constants(database: Database, work: Work, rows: Rows) -> dict[str, Any]:
    with database.begin() as connection:
        return values(connection, rows, work.keeps_locks)


def loop(
    connection: sqlite3.Connection, work: Work, rows: Rows, parameters: dict[str, Any], seed: int, cycles: int
) -> Run:
    """Repeat the work."""
    updated = {"jobs": 0, "instances": 0}
    start, before = time.monotonic(), cpu_seconds(connection)
    for number in range(seed * cycles, (seed + 1) * cycles):
        parameters["job"] = job_id(rows.jobs[number * 7 % len(rows.jobs)])
        parameters["instance"] = instance_id(rows.attached, number * 13 % rows.instances)
        for statements in work.transactions:
            for name, count in transaction(connection, statements, parameters).items():
                updated[name] += count
    seconds, cpu = time.monotonic() - start, cpu_seconds(connection) - before
    return Run(seconds, cpu, cycles, updated["jobs"], updated["instances"])


def detach_all(connection: sqlite3.Connection, rows: Rows) -> Run:
    """One statement that detaches all these jobs from these instances, after one that attached them."""
    instances = [instance_id(rows.attached, number) for number in range(rows.instances)]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "UPDATE jobs SET instance_id = ? WHERE id = ?",
        [(instances[number % len(instances)], job_id(job)) for number, job in enumerate(rows.jobs)],
    )
    connection.execute("COMMIT")
    marks = ", ".join("?" * len(instances))
    start, before = time.monotonic(), cpu_seconds(connection)
    detached = connection.execute(
        f"UPDATE jobs SET instance_id = NULL WHERE instance_id IN ({marks})", instances
    )
    seconds, cpu = time.monotonic() - start, cpu_seconds(connection) - before
    return Run(seconds, cpu, 1, detached.rowcount, len(instances))


def clear(connection: sqlite3.Connection) -> None:
    """Leave nothing to write later."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
