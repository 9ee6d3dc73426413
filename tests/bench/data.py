"""Rows as a dstack server makes them: a job and an instance by dstack's own code, and copies of them by SQL.

Instances are in groups, named by the number of jobs attached to each. Jobs attached to none are free, as those
of history are. Ids are the MD5 of a name, so that a loop inside a server can tell them too.
"""

import hashlib
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from sqlalchemy import Connection, text
from support import Database, table

from bench.statements import Recording

BLOCKS = 2  # of each job
LOCK_TOKEN = uuid.UUID(int=1)
LOCK_OWNER = "JobTerminatingPipeline"
# What dstack reads of a run, a fleet or a project besides the job and its instance is read from one that has no
# other: all jobs here are copies of one, and no server has a run of 100,000 jobs.
EMPTY = ("run", "fleet", "project")
SEED = "import asyncio, storm; asyncio.run(storm.add_round('teardown'))"


class Rows(NamedTuple):
    """What a loop works on: the first instances of a group, and free jobs."""

    attached: int
    instances: int
    jobs: range


def id_of(name: str) -> uuid.UUID:
    return uuid.UUID(hashlib.md5(name.encode()).hexdigest())


def instance_id(group: int, number: int) -> uuid.UUID:
    return id_of(f"instance {group} {number}")


def job_id(number: int) -> uuid.UUID:
    return id_of(f"job {number}")


def empty_id(kind: str) -> uuid.UUID:
    return id_of(f"empty {kind}")


def values(connection: Connection, rows: Rows, keeps_locks: bool) -> dict[str, Any]:
    """The parameters of dstack's statements, but those that differ from cycle to cycle.

    Where the statements that take the locks are left out, the rows keep theirs.
    """
    job = connection.execute(
        text("SELECT fleet_id, job_provisioning_data, job_runtime_data FROM jobs LIMIT 1")
    ).one()
    until = datetime(2027, 1, 1)
    return {
        "fleet": job.fleet_id,
        "job_provisioning_data": job.job_provisioning_data,
        "job_runtime_data": job.job_runtime_data,
        "later_job_runtime_data": job.job_runtime_data + " ",
        "now": datetime(2026, 12, 1),
        "skip": True,
        "assigned": True,
        "busy_with_job": (rows.attached + 1) * BLOCKS,
        "busy_without_job": rows.attached * BLOCKS,
        "busy": "BUSY",
        "idle": "IDLE",
        "provisioning": "PROVISIONING",
        "terminated": "TERMINATED",
        "none": None,
        "lock_token": LOCK_TOKEN,
        "lock_owner": LOCK_OWNER,
        "lock_expires_at": until,
        "unlocked": LOCK_TOKEN if keeps_locks else None,
        "unlocked_owner": LOCK_OWNER if keeps_locks else None,
        "unlocked_until": until if keeps_locks else None,
    }


def run_dstack(database: Database, *arguments: str | Path) -> None:
    """A Python process with dstack on this database."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "DSTACK_DATABASE_URL": database.url, "DSTACK_SERVER_DIR": folder},
            cwd=Path(__file__).parents[1],
            check=True,
            capture_output=True,
            timeout=300,
        )


def record(database: Database) -> Recording:
    """What dstack's own pipelines send for a job."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recording"
        run_dstack(database, Path(__file__).with_name("capture.py"), file)
        recording: Recording = pickle.loads(file.read_bytes())
        return recording


def seed(database: Database) -> None:
    """Rows by dstack's own code, that the others are copies of."""
    run_dstack(database, "-c", SEED)
    if database.dialect == "sqlite":
        # A copy of the file alone has to be the whole database.
        with database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")


def fill(database: Database, groups: Mapping[int, int], free_jobs: int) -> range:
    """Make the groups, of so many instances each, with their jobs, and free jobs; the numbers of the latter."""
    with database.begin() as connection:
        as_id = "CAST(md5({}) AS uuid)"
        if database.dialect == "sqlite":
            as_id = "md5({})"
            driver: Any = connection.connection.dbapi_connection
            driver.create_function("md5", 1, lambda name: hashlib.md5(name.encode()).hexdigest())
        template = connection.execute(
            text("SELECT * FROM jobs WHERE job_runtime_data LIKE :blocks LIMIT 1"),
            {"blocks": f'%"blocks":{BLOCKS},%'},
        ).one()
        first = 0
        for group, instances in groups.items():
            _copy(
                connection,
                "instances",
                template.instance_id,
                instances,
                id=as_id.format(f"'instance {group} ' || number"),
                name="'copy-' || number",
                instance_num="number",
                status="'BUSY'" if group else "'IDLE'",
                total_blocks=str((group + 16) * BLOCKS),
                busy_blocks=str(group * BLOCKS),
            )
            _copy(
                connection,
                "jobs",
                template.id,
                group * instances,
                id=as_id.format(f"'job ' || (number + {first})"),
                instance_id=as_id.format(f"'instance {group} ' || (number % {instances})"),
            )
            first += group * instances
        _copy(
            connection,
            "jobs",
            template.id,
            free_jobs,
            id=as_id.format(f"'job ' || (number + {first})"),
            instance_id="NULL",
            status="'TERMINATED'",
        )
        for kind in EMPTY:
            name = "run_name" if kind == "run" else "name"
            _copy(
                connection,
                f"{kind}s",
                getattr(template, f"{kind}_id"),
                1,
                id=as_id.format(f"'empty {kind}'"),
                **{name: "'empty'"},
            )
        # Those that were copied from.
        originals = "SELECT id FROM instances WHERE name NOT LIKE 'copy-%'"
        connection.execute(text(f"DELETE FROM jobs WHERE instance_id IN ({originals})"))
        connection.execute(text(f"DELETE FROM instances WHERE id IN ({originals})"))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if database.dialect == "postgresql":
            # Dead rows are cleared between the runs that are timed, not when the server sees fit.
            for name in ("jobs", "instances"):
                connection.execute(text(f"ALTER TABLE {name} SET (autovacuum_enabled = false)"))
            connection.execute(text("VACUUM ANALYZE"))
        else:
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
    return range(first, first + free_jobs)


def _copy(connection: Connection, into: str, template: Any, rows: int, **changed: str) -> None:
    columns = {column.name: f"{into}.{column.name}" for column in table(connection, into).columns} | changed
    numbers = (
        "WITH RECURSIVE numbers (number) AS"
        " (SELECT 0 UNION ALL SELECT number + 1 FROM numbers WHERE number < :rows - 1)"
    )
    if rows:
        connection.execute(
            text(
                f"INSERT INTO {into} ({', '.join(columns)}) {numbers} SELECT {', '.join(columns.values())}"
                f" FROM {into}, numbers WHERE {into}.id = :template"
            ),
            {"rows": rows, "template": template},
        )
