"""`alembic` as an operator runs it: order of work, repair, removal, and every error."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import make_url, text
from support import (
    Database,
    add_instance,
    add_job,
    add_project,
    alembic,
    counters,
    job_runtime_data,
    run_sql,
    schema_of,
)
from test_surface import break_counter


def add_drift(database: Database) -> tuple[str, str]:
    """Two instances, of which the first has a wrong counter; the database has no triggers yet."""
    with database.begin() as connection:
        owner = add_project(connection)
        wrong = add_instance(connection, owner, name="wrong", status="BUSY", busy_blocks=7)
        right = add_instance(connection, owner, name="right", status="BUSY", busy_blocks=2)
        for instance in (wrong, right):
            add_job(connection, owner, instance, job_runtime_data=job_runtime_data(2))
    return wrong, right


def rows(database: Database) -> list[str]:
    """All rows of both tables but for the counters."""
    with database.begin() as connection:
        return sorted(
            str({k: v for k, v in row._mapping.items() if k != "busy_blocks"})
            for table in ("instances", "jobs")
            for row in connection.execute(text(f"SELECT * FROM {table}"))
        )


def fails(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit status 1, one sentence or two, no traceback, no password."""
    assert result.returncode == 1, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("FAILED: ")
    assert "Traceback" not in result.stderr
    assert "secret" not in result.stderr
    for part in parts:
        assert part in line


def test_fresh_machine(empty: Database) -> None:
    """With dstack beside us, the database is created and brought to dstack's head first."""
    printed = empty.upgrade()
    assert "Database " in printed
    assert "an empty database" in printed
    assert empty.alembic("check").returncode == 0
    assert "nothing to do" in empty.upgrade()


def test_backfill_corrects_only_what_differs_and_reports_it(bare: Database) -> None:
    wrong, right = add_drift(bare)
    before = rows(bare)
    printed = bare.upgrade()
    bare.check_right()
    assert rows(bare) == before
    line = next(line for line in printed.splitlines() if wrong in line.replace("-", ""))
    assert "Instance wrong" in line
    assert "was 7, is 2" in line
    assert right not in printed.replace("-", "")
    assert "1 instance had a wrong busy_blocks: corrected" in printed


def test_a_second_run_changes_nothing(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        add_job(connection, owner, add_instance(connection, owner))
    before = state(protected)
    assert "nothing to do" in protected.upgrade()
    assert state(protected) == before


def state(database: Database) -> object:
    """Changes with every write: the counter of writing transactions, or the bytes of the file."""
    if database.dialect == "sqlite":
        return database.path.read_bytes()
    with database.begin() as connection:
        return connection.execute(
            text("SELECT xmin::text, ctid::text FROM jobs UNION ALL SELECT xmin::text, ctid::text FROM instances"
                 " UNION ALL SELECT xmin::text, ctid::text FROM pg_proc"
                 " UNION ALL SELECT xmin::text, ctid::text FROM busy_blocks_alembic_version")
        ).all()  # fmt: skip


def test_drift_is_corrected_at_a_run_that_finds_everything_installed(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        add_job(connection, owner, add_instance(connection, owner))
    disturb(protected, 5)
    assert protected.alembic("check").returncode == 1
    assert "was 5, is 1" in protected.upgrade()
    protected.check_right()


def disturb(database: Database, number: int) -> None:
    with database.engine.connect() as connection:
        break_counter(connection, number)


HARM = {
    "postgresql": {
        "missing": "DROP TRIGGER busy_blocks_jobs_delete ON jobs",
        "disabled": "ALTER TABLE jobs DISABLE TRIGGER busy_blocks_jobs_update",
        "all disabled": "ALTER TABLE instances DISABLE TRIGGER ALL",
        "always": "ALTER TABLE jobs ENABLE ALWAYS TRIGGER busy_blocks_jobs_update",
        "body": "CREATE OR REPLACE FUNCTION busy_blocks_apply() RETURNS trigger LANGUAGE plpgsql"
        " AS $$BEGIN RETURN new; END$$",
        "security": "ALTER FUNCTION busy_blocks_apply() SECURITY DEFINER",
        "search_path": "ALTER FUNCTION busy_blocks_collect_jobs() RESET ALL",
        "when": "DROP TRIGGER busy_blocks_jobs_insert ON jobs;; CREATE TRIGGER busy_blocks_jobs_insert"
        " AFTER INSERT ON jobs FOR EACH ROW WHEN (new.instance_id IS NULL) EXECUTE FUNCTION busy_blocks_collect_jobs()",
        "half": "DROP FUNCTION busy_blocks_recompute CASCADE;; DROP FUNCTION busy_blocks_apply CASCADE",
        "version": "DELETE FROM busy_blocks_alembic_version",
        "version table": "DROP TABLE busy_blocks_alembic_version",
    },
    "sqlite": {
        "missing": "DROP TRIGGER busy_blocks_jobs_delete",
        "rebuilt": "DROP TRIGGER busy_blocks_jobs_delete;; DROP TRIGGER busy_blocks_jobs_update;;"
        " DROP TRIGGER busy_blocks_jobs_insert",
        "table": "DROP TABLE busy_blocks_writer",
        "body": "DROP TRIGGER busy_blocks_jobs_delete;; CREATE TRIGGER busy_blocks_jobs_delete AFTER DELETE ON jobs"
        " BEGIN SELECT 1; END",
        "view": "DROP VIEW busy_blocks_derived;; CREATE VIEW busy_blocks_derived AS"
        " SELECT id AS instance_id, 0 AS is_now, 0 AS busy_blocks FROM instances",
        "version": "DELETE FROM busy_blocks_alembic_version",
        "version table": "DROP TABLE busy_blocks_alembic_version",
    },
}


@pytest.mark.parametrize(
    ("dialect", "harm"), [(dialect, harm) for dialect, harms in HARM.items() for harm in harms]
)
def test_repair(protected: Database, dialect: str, harm: str) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        add_job(connection, owner, add_instance(connection, owner))
    installed = schema_of(protected)
    with protected.engine.connect() as connection:
        for statement in HARM[dialect][harm].split(";; "):
            connection.exec_driver_sql(statement)
        connection.commit()
    check = protected.alembic("check")
    assert check.returncode == 1
    assert "FAILED" in check.stderr
    protected.upgrade()
    assert schema_of(protected) == installed
    assert protected.alembic("check").returncode == 0
    protected.check_right()


@pytest.mark.parametrize("lost", [False, True], ids=["", "version table lost"])
def test_downgrade_gives_back_the_schema_that_was_there(bare: Database, lost: bool) -> None:
    add_drift(bare)
    before, data = schema_of(bare), rows(bare)
    bare.upgrade()
    assert schema_of(bare) != before
    if lost:
        with bare.begin() as connection:
            connection.execute(text("DROP TABLE busy_blocks_alembic_version"))
    result = bare.alembic("downgrade", "base")
    assert result.returncode == 0, result.stderr
    assert "The triggers are removed" in result.stderr
    assert schema_of(bare) == before
    assert rows(bare) == data
    bare.upgrade()
    bare.check_right()


def test_check_says_what_it_could_not_compare(protected: Database) -> None:
    what = {"postgresql": "FUNCTION busy_blocks_of_job", "sqlite": "VIEW busy_blocks_derived"}
    with protected.begin() as connection:
        connection.execute(text(f"DROP {what[protected.dialect]}"))
    fails(protected.alembic("check"), "is missing", "the counters cannot be compared without it")
    protected.upgrade()
    assert protected.alembic("check").returncode == 0


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize(
    "other", [None, "jobs (status, instance_id)", "jobs (instance_id) WHERE status = 'RUNNING'"]
)
def test_index_of_sqlite_only_where_dstack_has_none(bare: Database, other: str | None) -> None:
    bare.upgrade()
    assert not any("busy_blocks_jobs " in str(row) for row in schema_of(bare))
    assert bare.alembic("downgrade", "base").returncode == 0
    with bare.begin() as connection:
        connection.execute(text("DROP INDEX ix_jobs_instance_id"))
        if other is not None:
            connection.execute(text(f"CREATE INDEX other ON {other}"))
    before = schema_of(bare)
    bare.upgrade()
    installed = schema_of(bare)
    assert any("busy_blocks_jobs " in str(row) for row in installed)
    assert "nothing to do" in bare.upgrade()
    with bare.begin() as connection:
        connection.execute(text("DROP INDEX busy_blocks_jobs"))
    fails(bare.alembic("check"), "index/busy_blocks_jobs is missing")
    bare.upgrade()
    assert schema_of(bare) == installed
    assert bare.alembic("check").returncode == 0
    assert bare.alembic("downgrade", "base").returncode == 0
    assert schema_of(bare) == before


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_index_only_where_dstack_has_none(bare: Database) -> None:
    with bare.begin() as connection:
        connection.execute(text("DROP INDEX ix_jobs_instance_id"))
    before = schema_of(bare)
    bare.upgrade()
    assert any("busy_blocks_jobs " in str(row) for row in schema_of(bare))
    assert "nothing to do" in bare.upgrade()
    with bare.begin() as connection:
        connection.execute(
            text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'busy_blocks_jobs'::regclass")
        )
    assert bare.alembic("check").returncode == 1
    bare.upgrade()
    assert bare.alembic("check").returncode == 0
    with bare.begin() as connection:
        connection.execute(text("DROP INDEX busy_blocks_jobs"))
    with bare.engine.connect() as older:
        # An old snapshot, such as a pg_dump has: the index waits for it, the triggers need not.
        older.execution_options(isolation_level="REPEATABLE READ").execute(text("SELECT 1 FROM runs"))
        printed = bare.alembic("-x", "wait=2", "upgrade", "head")
        assert printed.returncode == 0
        assert "waits for an older transaction" in printed.stderr
        assert "index/busy_blocks_jobs is missing" in bare.alembic("check").stderr
    bare.upgrade()
    assert bare.alembic("check").returncode == 0
    assert bare.alembic("downgrade", "base").returncode == 0
    assert schema_of(bare) == before


@pytest.mark.parametrize("dialect", ["postgresql"])
@pytest.mark.parametrize("schema", ["other", 'we "ird'])
def test_tables_in_another_schema(bare: Database, schema: str) -> None:
    quoted = '"' + schema.replace('"', '""') + '"'
    with bare.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.exec_driver_sql(f"ALTER SCHEMA public RENAME TO {quoted}")
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = {quoted}")
    with bare.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner)
        job = add_job(connection, owner)
    bare.upgrade()
    assert bare.alembic("check").returncode == 0
    with bare.begin() as connection:
        connection.exec_driver_sql("SET LOCAL search_path = ''")
        connection.exec_driver_sql(
            "CREATE TEMPORARY TABLE instances (id uuid, busy_blocks integer, status text)"
        )
        run_sql(
            connection,
            f"UPDATE {quoted}.jobs SET instance_id = :instance WHERE id = :job",
            instance=instance,
            job=job,
        )
        connection.exec_driver_sql("DROP TABLE pg_temp.instances")
    bare.check_right()
    with bare.begin() as connection:
        assert counters(connection) == {instance: 1}
    assert bare.alembic("downgrade", "base").returncode == 0


def test_leaves_dstacks_schema_alone_when_told(empty: Database) -> None:
    result = empty.alembic("-x", "dstack=skip", "upgrade", "head")
    fails(result, "no database" if empty.dialect == "sqlite" else "not the database of a dstack server")
    if empty.dialect == "sqlite":
        assert not empty.path.exists()


@pytest.mark.parametrize("argument", ["unknown=1", "dstack=maybe", "wait=soon", "wait"])
def test_unknown_x_argument(bare: Database, argument: str) -> None:
    before = schema_of(bare)
    fails(bare.alembic("-x", argument, "upgrade", "head"), "-x", "Nothing was changed")
    fails(bare.alembic("-x", argument, "upgrade", "head", "--sql"), "-x", "Nothing was changed")
    assert schema_of(bare) == before


def test_not_a_dstack_database(empty: Database) -> None:
    if empty.dialect == "sqlite":
        sqlite3.connect(empty.path).close()
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE somebody (id integer)"))
    before = schema_of(empty)
    for arguments in ((), ("-x", "dstack=skip")):
        fails(empty.alembic(*arguments, "upgrade", "head"), "not the database of a dstack server")
        fails(empty.alembic("check"), "not the database of a dstack server")
    assert schema_of(empty) == before


def test_older_than_blocks(bare: Database) -> None:
    with bare.begin() as connection:
        connection.execute(text("ALTER TABLE instances DROP COLUMN busy_blocks"))
    before = schema_of(bare)
    fails(bare.alembic("upgrade", "head"), "busy_blocks", "0.18.41", "Nothing was changed")
    assert schema_of(bare) == before


def test_ahead_of_the_importable_dstack(bare: Database) -> None:
    add_drift(bare)
    with bare.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'fromthefuture'"))
    printed = bare.upgrade()
    assert "newer dstack" in printed
    bare.check_right()
    with bare.begin() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "fromthefuture"


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_not_the_owner(bare: Database) -> None:
    with bare.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.exec_driver_sql(f"DROP ROLE IF EXISTS {name}")
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
        connection.exec_driver_sql(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
        connection.exec_driver_sql(f"GRANT ALL ON SCHEMA public TO {name}")
    before = schema_of(bare)
    url = make_url(bare.url).set(username=name, password="secret")
    result = alembic("upgrade", "head", DSTACK_DATABASE_URL=url.render_as_string(hide_password=False))
    fails(result, "does not own", "instances and jobs", "Nothing was changed")
    assert schema_of(bare) == before
    with bare.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}")
        connection.exec_driver_sql(f"DROP ROLE {name}")


@pytest.mark.parametrize("dialect", ["postgresql"])
@pytest.mark.parametrize("what", ["migrations lock", "table lock"])
def test_lock_not_obtained(bare: Database, what: str) -> None:
    before = schema_of(bare)
    with bare.engine.connect() as other:
        if what == "table lock":
            other.execute(text("LOCK TABLE jobs IN ROW EXCLUSIVE MODE"))
            other.execute(text("UPDATE jobs SET status = status"))
        else:
            lock = "SELECT pg_advisory_lock(:id)"
            other.execute(text(lock), {"id": migrations_lock()})
        fails(bare.alembic("-x", "wait=2", "upgrade", "head"), "lock", "2 seconds")
    assert {row for row in schema_of(bare) if "alembic_version" not in str(row)} == {
        row for row in before if "alembic_version" not in str(row)
    }
    bare.upgrade()


def migrations_lock() -> int:
    from dstack._internal.server.services.locking import string_to_lock_id

    return string_to_lock_id("migrations")


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_waits_for_a_lock_that_is_given_back(bare: Database) -> None:
    with bare.engine.connect() as other:
        other.execute(text("LOCK TABLE jobs IN ROW EXCLUSIVE MODE"))
        process = subprocess.Popen(
            [sys.executable, "-m", "alembic", "upgrade", "head"],
            env={**__import__("os").environ, "DSTACK_DATABASE_URL": bare.url},
            cwd=Path(__file__).parents[1],
            stderr=subprocess.PIPE,
            text=True,
        )
        with bare.begin() as watching:
            waiting = text("SELECT count(*) FROM pg_locks WHERE relation = 'jobs'::regclass AND NOT granted")
            while not watching.scalar(waiting):
                assert process.poll() is None
        other.rollback()
    assert process.communicate()[0] is None
    assert process.returncode == 0
    assert bare.alembic("check").returncode == 0


def test_read_only(bare: Database) -> None:
    if bare.dialect == "postgresql":
        with bare.begin() as connection:
            name = connection.scalar(text("SELECT current_database()"))
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        fails(bare.alembic("upgrade", "head"), "read-only", "changed")
        return
    with bare.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
    uri = bare.url.replace("///", "///file:", 1) + "?mode=ro&uri=true"
    before = bare.path.read_bytes()
    fails(alembic("upgrade", "head", DSTACK_DATABASE_URL=uri), "read-only")
    assert bare.path.read_bytes() == before


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_locked(bare: Database) -> None:
    before = schema_of(bare)
    with bare.engine.connect() as other:
        other.exec_driver_sql("BEGIN EXCLUSIVE")
        fails(bare.alembic("-x", "wait=1", "upgrade", "head"), "locked by another process")
    assert schema_of(bare) == before


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_sqlite_without_json(bare: Database, tmp_path: Path) -> None:
    """A Python whose SQLite has no JSON functions: sitecustomize takes them from each connection."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sqlite3\n"
        "connect = sqlite3.connect\n"
        "def without_json(*arguments, **named):\n"
        "    connection = connect(*arguments, **named)\n"
        "    for arguments in (1, 2, -1):\n"
        "        connection.create_function('json_valid', arguments, None)\n"
        "    return connection\n"
        "sqlite3.connect = sqlite3.dbapi2.connect = without_json\n"
    )
    before = schema_of(bare)
    fails(
        bare.alembic("upgrade", "head", PYTHONPATH=str(tmp_path)), "no JSON functions", "Nothing was changed"
    )
    assert schema_of(bare) == before


@pytest.mark.parametrize("dialect", ["postgresql"])
@pytest.mark.parametrize("how", ["unreachable", "no such database", "no such host"])
def test_cannot_connect(bare: Database, how: str) -> None:
    url = make_url(bare.url).set(password="secret")
    changes = {
        "unreachable": {"host": "127.0.0.1", "port": 9, "query": {}},
        "no such database": {"database": "nosuchdatabase"},
        "no such host": {"host": "nowhere.invalid", "query": {}},
    }
    url = url.set(**changes[how])
    result = alembic("upgrade", "head", DSTACK_DATABASE_URL=url.render_as_string(hide_password=False))
    fails(result, "could not be used")


def test_no_file_is_created_without_dstack(tmp_path: Path) -> None:
    """An environment that has alembic and this package but no dstack: its import is made to fail."""
    (tmp_path / "dstack").mkdir()
    (tmp_path / "dstack" / "__init__.py").write_text("raise ImportError('no dstack here')")
    home = tmp_path / "home"
    home.mkdir()
    result = alembic(
        "upgrade",
        "head",
        PYTHONPATH=str(tmp_path),
        HOME=str(home),
        DSTACK_DATABASE_URL=f"sqlite+aiosqlite:///{home}/x.db",
    )
    fails(result, "no database", "none was created")
    assert list(home.rglob("*")) == []


# dstack rebuilds no table on PostgreSQL, and so leaves no copy there.
@pytest.mark.parametrize("dialect", ["sqlite"])
def test_leftover_copy_of_a_failed_upgrade(bare: Database) -> None:
    with bare.begin() as connection:
        connection.execute(text("CREATE TABLE _alembic_tmp_jobs AS SELECT * FROM jobs"))
        # One revision back, so that dstack has work to do.
        connection.execute(text("DELETE FROM alembic_version"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:v)"), {"v": previous_revision()})
    bare.alembic("upgrade", "head")
    assert not any("_alembic_tmp_" in str(row) for row in schema_of(bare))


def dstack_script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "dstack._internal.server:migrations")
    config.set_main_option("recursive_version_locations", "true")
    return ScriptDirectory.from_config(config)


def previous_revision() -> str:
    down = dstack_script().get_revision("head").down_revision
    assert isinstance(down, str)
    return down


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_leftover_copy_without_its_original(bare: Database) -> None:
    with bare.begin() as connection:
        connection.execute(text("ALTER TABLE jobs RENAME TO _alembic_tmp_jobs"))
        connection.execute(text("DELETE FROM alembic_version"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:v)"), {"v": previous_revision()})
    before = schema_of(bare)
    fails(bare.alembic("upgrade", "head"), "_alembic_tmp_jobs", "backup", "Nothing was changed")
    assert schema_of(bare) == before


def test_current_history_and_check_write_nothing(bare: Database) -> None:
    before = schema_of(bare)
    for command in ("current", "check", "history"):
        bare.alembic(command)
    assert schema_of(bare) == before


def test_versions_are_linear() -> None:
    result = alembic("history", DSTACK_DATABASE_URL="sqlite+aiosqlite:////none.db")
    assert re.findall(r"-> (\d+)", result.stdout) == ["0004", "0003", "0002", "0001"]


def test_dstacks_own_migrations_fail(bare: Database) -> None:
    """They raise; the triggers are on again, as servers of the release before may be running on."""
    add_drift(bare)
    bare.upgrade()
    first = list(dstack_script().walk_revisions())[-1].revision
    with bare.begin() as connection:
        # All but the first revision again, on tables that have their columns already.
        connection.execute(text("UPDATE alembic_version SET version_num = :v"), {"v": first})
    installed = {row for row in schema_of(bare) if "busy_blocks_" in str(row)}
    fails(bare.alembic("upgrade", "head"), "dstack's own migrations failed", "the triggers are on")
    assert installed <= set(schema_of(bare))
    bare.check_right()
