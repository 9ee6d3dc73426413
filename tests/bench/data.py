"""Rows as a dstack server makes them: one job and one instance by dstack's own code, and many copies in SQL.

Instances are in groups, by the number of jobs attached to each; jobs that are attached to none are free, as
those of history are. Ids are the MD5 of a name, so that a loop inside the server can tell them too.
"""

import hashlib
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Connection, text
from support import Database, run_sql, table

BLOCKS = 2  # of each job
LOCK_TOKEN = uuid.UUID(int=1)
LOCK_OWNER = "JobTerminatingPipeline"


def instance_id(group: int, number: int) -> uuid.UUID:
    return uuid.UUID(hashlib.md5(f"instance {group} {number}".encode()).hexdigest())


def job_id(number: int) -> uuid.UUID:
    return uuid.UUID(hashlib.md5(f"job {number}".encode()).hexdigest())


def seed(database: Database) -> None:
    """Users, projects, runs, instances and jobs of one round of a storm, by dstack's own functions."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", "import asyncio, storm; asyncio.run(storm.add_round('teardown'))"],
            env={**os.environ, "DSTACK_DATABASE_URL": database.url, "DSTACK_SERVER_DIR": folder},
            cwd=Path(__file__).parents[1],
            check=True,
            capture_output=True,
        )


def fill(database: Database, groups: Mapping[int, int], free_jobs: int) -> None:
    """As many instances of each group as it says, with their jobs attached, and jobs that are free."""
    seed(database)
    with database.begin() as connection:
        is_postgresql = database.dialect == "postgresql"
        if not is_postgresql:
            raw = connection.connection.dbapi_connection
            raw.create_function("md5", 1, lambda name: hashlib.md5(name.encode()).hexdigest())
        as_id = "CAST(md5({}) AS uuid)" if is_postgresql else "md5({})"
        template = connection.execute(
            text("SELECT id, instance_id FROM jobs WHERE job_runtime_data LIKE :two LIMIT 1"),
            {"two": '%"blocks":2,%'},
        ).one()
        first_job = 0
        for group, instances in groups.items():
            _copy(
                connection,
                "instances",
                template.instance_id,
                instances,
                id=as_id.format(f"'instance {group} ' || number"),
                name=f"'instance-{group}-' || number",
                instance_num="number",
                busy_blocks=str(group * BLOCKS),
                total_blocks=str(group * BLOCKS + 8),
                status="'BUSY'" if group else "'IDLE'",
            )
            _copy(
                connection,
                "jobs",
                template.id,
                group * instances,
                id=as_id.format(f"'job ' || (number + {first_job})"),
                instance_id=as_id.format(f"'instance {group} ' || (number % {instances or 1})"),
            )
            first_job += group * instances
        _copy(
            connection,
            "jobs",
            template.id,
            free_jobs,
            id=as_id.format(f"'job ' || (number + {first_job})"),
            instance_id="NULL",
            status="'TERMINATED'",
        )
        # The rows of the storm itself: the copies are left.
        made = " OR ".join(f"name LIKE 'instance-{group}-%'" for group in groups)
        run_sql(
            connection, f"DELETE FROM jobs WHERE instance_id IN (SELECT id FROM instances WHERE NOT ({made}))"
        )
        run_sql(connection, f"DELETE FROM instances WHERE NOT ({made})")
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if is_postgresql:
            # Dead rows go when the bench says so, between the runs that are timed.
            for name in ("jobs", "instances"):
                connection.execute(text(f"ALTER TABLE {name} SET (autovacuum_enabled = false)"))
            connection.execute(text("VACUUM ANALYZE"))
        else:
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")


def _copy(connection: Connection, into: str, template: object, rows: int, **values: str) -> None:
    columns = {
        column.name: values.get(column.name, f"{into}.{column.name}")
        for column in table(connection, into).columns
    }
    numbers = "WITH RECURSIVE numbers (number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM numbers WHERE number < :rows - 1)"
    if connection.dialect.name == "postgresql":
        numbers = "WITH numbers AS (SELECT number FROM generate_series(0, :rows - 1) AS number)"
    if rows:
        connection.execute(
            text(
                f"{numbers} INSERT INTO {into} ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
                f" FROM {into}, numbers WHERE {into}.id = :template"
            ),
            {"rows": rows, "template": template},
        )
