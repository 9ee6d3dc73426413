"""Loops inside a PostgreSQL server, and clients that talk to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import make_url
from support import Database

from bench.data import BLOCKS, LOCK_OWNER, LOCK_TOKEN
from bench.measure import Run
from bench.statements import with_parameters

# Of the parameters of dstack's statements, as variables of the loop.
VARIABLES = {
    "instance": "uuid",
    "job": "uuid",
    "fleet": "uuid",
    "now": "timestamp",
    "lock_expires_at": "timestamp",
    "job_provisioning_data": "text",
    "job_runtime_data": "text",
    "busy_with_job": "integer",
    "busy_without_job": "integer",
}
CONSTANTS = {
    "skip": "true",
    "assigned": "true",
    "none": "NULL",
    "terminated": "'TERMINATED'",
    "busy": "'BUSY'",
    "idle": "'IDLE'",
    "lock_token": f"'{LOCK_TOKEN}'",
    "lock_owner": f"'{LOCK_OWNER}'",
}
UNLOCKED = {"unlocked_until": "NULL", "unlocked": "NULL", "unlocked_owner": "NULL"}
# Where the statements that take the locks are left out, the rows keep them.
LOCKED = {
    "unlocked_until": "v_lock_expires_at",
    "unlocked": CONSTANTS["lock_token"],
    "unlocked_owner": CONSTANTS["lock_owner"],
}


def connect(database: Database) -> psycopg.Connection[Any]:
    url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(url, autocommit=True)


def procedure(name: str, transactions: Sequence[Sequence[str]], locks: bool) -> str:
    """A loop inside the server over transactions that it commits."""
    values = {variable: f"v_{variable}" for variable in VARIABLES} | CONSTANTS
    values |= UNLOCKED if locks else LOCKED
    body = []
    for transaction in transactions:
        for statement in transaction:
            target = "instances" if statement.startswith("UPDATE instances") else "jobs"
            into = " INTO v_id" if "RETURNING" in statement else ""
            body.append(f"{with_parameters(statement, values.__getitem__)}{into};")
            body.append(f"GET DIAGNOSTICS v_rows = ROW_COUNT; {target}_updated := {target}_updated + v_rows;")
        body.append("COMMIT;")
    declarations = " ".join(f"v_{variable} {kind};" for variable, kind in VARIABLES.items())
    return f"""
        CREATE OR REPLACE PROCEDURE bench_{name}(
            attached integer, instances integer, first_job integer, jobs integer, seed integer, cycles integer,
            INOUT seconds double precision, INOUT jobs_updated bigint, INOUT instances_updated bigint
        ) LANGUAGE plpgsql AS $procedure$
        #variable_conflict use_column
        DECLARE
            {declarations} v_id uuid; v_rows bigint; started timestamptz;
        BEGIN
            SELECT fleet_id, jobs.job_provisioning_data, jobs.job_runtime_data
            INTO STRICT v_fleet, v_job_provisioning_data, v_job_runtime_data
            FROM jobs WHERE id = CAST(md5('job ' || first_job) AS uuid);
            v_now := now(); v_lock_expires_at := now() + interval '30 s';
            v_busy_without_job := attached * {BLOCKS}; v_busy_with_job := attached * {BLOCKS} + {BLOCKS};
            jobs_updated := 0; instances_updated := 0;
            started := clock_timestamp();
            FOR cycle IN 0..cycles - 1 LOOP
                -- 7 and 13 go through them all in an order that is not that of the table.
                v_job := md5('job ' || (first_job + (seed + cycle * 7) % jobs));
                v_instance := md5('instance ' || attached || ' ' || (seed + cycle * 13) % instances);
                {" ".join(body)}
            END LOOP;
            seconds := extract(epoch FROM clock_timestamp() - started);
        END $procedure$
    """


def cpu_seconds(connection: psycopg.Connection[Any]) -> float:
    """What the connection's backend has run so far.

    Other work on the machine disturbs it far less than the clock. Linux's Documentation/scheduler/sched-stats.rst:
    the first number of /proc/PID/schedstat is the time spent on the CPU, in nanoseconds.
    """
    return int(Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


def loop(
    connection: psycopg.Connection[Any],
    name: str,
    attached: int,
    instances: int,
    jobs: range,
    seed: int,
    cycles: int,
) -> Run:
    """Run the loop in the server."""
    before = cpu_seconds(connection)
    row = connection.execute(
        sql.SQL("CALL {}(%s, %s, %s, %s, %s, %s, 0, 0, 0)").format(sql.Identifier(f"bench_{name}")),
        (attached, instances, jobs.start, len(jobs), seed, cycles),
    ).fetchone()
    assert row is not None
    return Run(row[0], cpu_seconds(connection) - before, cycles, row[1], row[2])


def lock_instances(database: Database) -> None:
    with connect(database) as connection:
        connection.execute("UPDATE instances SET lock_token = %s, lock_owner = %s", (LOCK_TOKEN, LOCK_OWNER))


def vacuum(database: Database) -> None:
    with connect(database) as connection:
        connection.execute("VACUUM jobs, instances")
