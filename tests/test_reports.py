"""drift.sql, anomalies.sql and `alembic check`: what they find, and that they write nothing."""

from sqlalchemy import make_url, text
from support import (
    ROOT,
    Database,
    add_instance,
    add_job,
    add_project,
    alembic,
    as_hex,
    counters,
    job_runtime_data,
    schema_of,
    truth,
)
from test_command_line import disturb


def report(database: Database, name: str) -> list[tuple[object, ...]]:
    """As psql or sqlite3 would run the file; ids as hex."""
    statement = (ROOT / "sql" / database.dialect / f"{name}.sql").read_text()
    with database.begin() as connection:
        return [
            tuple(as_hex(value) if column.endswith("id") else value for column, value in row._mapping.items())
            for row in connection.exec_driver_sql(statement)
        ]


def test_drift(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        right = add_instance(connection, owner, name="right")
        wrong = add_instance(connection, owner, name="wrong")
        pending = add_instance(connection, owner, name="pending", status="PENDING")
        add_job(connection, owner, right, job_runtime_data=job_runtime_data(3))
        add_job(connection, owner, wrong, job_runtime_data=job_runtime_data(2))
        add_job(connection, owner, wrong)
        add_job(connection, owner, pending)
    assert report(protected, "drift") == []
    disturb(protected, 3)
    assert report(protected, "drift") == [("pending", pending, 3, 0)]
    disturb(protected, 5)
    assert report(protected, "drift") == [
        ("pending", pending, 5, 0),
        ("right", right, 5, 3),
        ("wrong", wrong, 5, 3),
    ]
    check = protected.alembic("check")
    assert check.returncode == 1
    for name in ("pending", "right", "wrong"):
        assert f"instance {name} (" in check.stderr
    assert "busy_blocks is 5, should be 3" in check.stderr


def test_anomalies(bare: Database) -> None:
    # With the triggers of the counter alone: those of the status leave none of the last two kinds.
    assert bare.alembic("upgrade", "0002").returncode == 0
    with bare.begin() as connection:
        owner = add_project(connection)
        fine = add_instance(connection, owner, name="fine", status="BUSY")
        add_job(connection, owner, fine, job_runtime_data=job_runtime_data(3))
        add_job(connection, owner, fine)
        add_instance(connection, owner, name="also fine")
        small = add_instance(connection, owner, name="small", status="BUSY", total_blocks=2)
        add_job(connection, owner, small, job_runtime_data=job_runtime_data(3))
        auto = add_instance(connection, owner, name="auto", status="PROVISIONING", total_blocks=None)
        add_job(connection, owner, auto, job_runtime_data=job_runtime_data(3))
        odd = add_instance(connection, owner, name="odd", status="BUSY")
        done = add_job(connection, owner, odd, status="DONE")
        bad = [
            add_job(connection, owner, odd, job_runtime_data=data)
            for data in ("{", job_runtime_data("2"), job_runtime_data(-1), job_runtime_data(1_000_000))
        ]
        add_job(connection, owner, odd, job_runtime_data="{}")
        alone = add_instance(connection, owner, name="alone", status="BUSY")
        idle = add_instance(connection, owner, name="idle", status="IDLE")
        job = add_job(connection, owner, idle, status="PULLING")
    unreadable = "the job_runtime_data of an attached job cannot be read"
    assert report(bare, "anomalies") == [
        ("BUSY without a job", "alone", alone, None, None),
        ("IDLE with a job", "idle", idle, job, "PULLING"),
        ("a finished job is still attached", "odd", odd, done, "DONE"),
        ("busy_blocks is above total_blocks", "small", small, None, "3 of 2"),
        *((unreadable, "odd", odd, job, "counted as 1 block") for job in sorted(bad)),
    ]
    with bare.begin() as connection:
        assert counters(connection) == truth(connection)


def test_check_needs_no_right_to_write(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        add_job(connection, owner, add_instance(connection, owner))
    if protected.dialect == "sqlite":
        with protected.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
        bytes_before = protected.path.read_bytes()
        url = protected.url.replace("///", "///file:", 1) + "?mode=ro&uri=true"
        for command in ("check", "current"):
            result = alembic(command, DSTACK_DATABASE_URL=url)
            assert result.returncode == 0, result.stderr
        assert protected.path.read_bytes() == bytes_before
        return
    with protected.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN")
        connection.exec_driver_sql(f"GRANT SELECT ON instances, jobs, busy_blocks_alembic_version TO {name}")
        connection.exec_driver_sql(f"ALTER ROLE {name} SET default_transaction_read_only = on")
    url = make_url(protected.url).set(username=name).render_as_string(hide_password=False)
    for command in ("check", "current"):
        result = alembic(command, DSTACK_DATABASE_URL=url)
        assert result.returncode == 0, result.stderr
    with protected.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}")
        connection.exec_driver_sql(f"DROP ROLE {name}")


def test_check_names_what_is_wrong(protected: Database) -> None:
    statements = {
        "sqlite": ("DROP TRIGGER busy_blocks_jobs_delete", "trigger/busy_blocks_jobs_delete is missing"),
        "postgresql": (
            "ALTER TABLE jobs DISABLE TRIGGER busy_blocks_jobs_delete",
            "trigger/busy_blocks_jobs_delete is disabled",
        ),
    }
    statement, said = statements[protected.dialect]
    with protected.begin() as connection:
        connection.exec_driver_sql(statement)
    before = schema_of(protected)
    result = protected.alembic("check")
    assert result.returncode == 1
    assert result.stderr.startswith(f"FAILED: {said}. ")
    assert schema_of(protected) == before
