"""What limits it: where the time inside the triggers goes, and the plans of their statements."""

from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import text
from support import ROOT, Database

from bench import postgresql, sqlite
from bench.data import Rows, instance_id, job_id
from bench.postgresql import Connection
from bench.statements import ASSIGN_TERMINATE


def functions(database: Database, rows: Rows, cycles: int) -> list[str]:
    """Calls and time of each trigger function, per assign + terminate in the server's loop."""
    postgresql.create_loop(database, ASSIGN_TERMINATE, rows)
    with postgresql.connect(database) as connection:
        connection.execute("SELECT pg_stat_reset()")
        connection.execute("SET track_functions = 'all'")
        run = postgresql.loop(connection, 0, cycles)
        connection.execute("SELECT pg_stat_force_next_flush()")
    lines = [
        f"{run.seconds / cycles * 1e6:.0f} us per assign + terminate, {rows.attached} jobs attached; of them"
    ]
    query = """
        SELECT funcname, calls, self_time, total_time FROM pg_stat_user_functions
        WHERE funcname <> 'bench_loop' ORDER BY self_time DESC
    """
    with postgresql.connect(database) as connection:
        for name, calls, self_time, total_time in connection.execute(query):
            lines.append(
                f"  {name}: {calls / cycles:.1f} calls, {self_time / cycles * 1e3:.1f} us by itself,"
                f" {total_time / cycles * 1e3:.1f} us with what it calls"
            )
    return lines


def plans_postgresql(database: Database, rows: Rows) -> list[str]:
    """Plans of an assign + terminate, those of statements inside the triggers too, by auto_explain."""
    lines: list[str] = []
    foreign_keys = 0

    def keep(notice: psycopg.errors.Diagnostic) -> None:
        nonlocal foreign_keys
        plan = notice.message_primary or ""
        if "SELECT 1 FROM ONLY" in plan:
            foreign_keys += 1
        else:
            lines.append(plan)

    parameters = {
        "instance": instance_id(rows.attached, 0),
        "job": job_id(rows.jobs.start),
    } | sqlite.constants(database, ASSIGN_TERMINATE, rows)
    with postgresql.connect(database) as connection:
        work(connection, parameters)
        connection.execute("LOAD 'auto_explain'")
        for setting in ("log_analyze", "log_buffers", "log_nested_statements", "log_triggers"):
            connection.execute(f"SET auto_explain.{setting} = on")
        if connection.info.server_version >= 160000:
            # Parameters are as long as the rows.
            connection.execute("SET auto_explain.log_parameter_max_length = 0")
        connection.execute("SET client_min_messages = log")
        connection.execute("SET auto_explain.log_min_duration = 0")
        connection.add_notice_handler(keep)
        work(connection, parameters)
    return [*lines, f"and {foreign_keys} checks of foreign keys"]


def work(connection: Connection, parameters: dict[str, Any]) -> None:
    for statements in ASSIGN_TERMINATE.transactions:
        postgresql.transaction(connection, statements, parameters)


def plan_sqlite(database: Database) -> list[str]:
    """The plan of the drift report; its sum is that of the triggers."""
    statement = Path(ROOT / "sql" / "sqlite" / "drift.sql").read_text(encoding="utf-8")
    with database.begin() as connection:
        return [row.detail for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}"))]
