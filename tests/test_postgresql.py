"""PostgreSQL alone: roles, schemas, plans, snapshots, dumps, and columns that dstack may yet add."""

import subprocess
import uuid

import pytest
from conftest import Databases, migrate
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError
from support import (
    Database,
    add_instance,
    add_job,
    add_project,
    counters,
    job_runtime_data,
    key,
    run_sql,
    schema_of,
    table,
)
from test_offline import POSTGRESQL_PROGRAMS, postgresql_program


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
def role(empty: Database) -> Database:
    """An empty database whose owner, an ordinary role, is the one that connects."""
    url = make_url(empty.url)
    name = f"role_{uuid.uuid4().hex[:8]}"
    with empty.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN NOSUPERUSER PASSWORD 'secret'")
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} OWNER TO {name}")
        connection.exec_driver_sql(f"GRANT {name} TO CURRENT_USER")
    return Database(url.set(username=name, password="secret").render_as_string(hide_password=False))


def assign_and_terminate(database: Database) -> None:
    with database.begin() as connection:
        owner = add_project(connection)
        instance, job = add_instance(connection, owner), add_job(connection, owner)
    with database.begin() as connection:
        run_sql(
            connection, "UPDATE instances SET status = 'BUSY', busy_blocks = 5 WHERE id = :id", id=instance
        )
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=instance, job=job)
    with database.begin() as connection:
        assert counters(connection)[instance] == 1
    database.check_right()


def test_an_ordinary_role_installs_works_dumps_and_restores(role: Database, databases: Databases) -> None:
    migrate(role.url)
    role.upgrade()
    assert role.alembic("check").returncode == 0
    assign_and_terminate(role)
    dump = postgresql_program(role, "pg_dump", "--no-privileges")
    # The wheel's pg_dump is newer than a server that is named may be.
    dump = dump.replace("SET transaction_timeout = 0;\n", "")
    restored = databases.make("postgresql", "empty")
    owner = make_url(role.url).username
    with restored.begin() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {make_url(restored.url).database} OWNER TO {owner}")
    target = make_url(role.url).set(database=make_url(restored.url).database)
    copy = Database(target.render_as_string(hide_password=False))
    postgresql_program(copy, "psql", "-v", "ON_ERROR_STOP=1", "-q", "-f", "-", given=dump)
    assert copy.alembic("check").returncode == 0, copy.alembic("check").stderr
    assert "nothing to do" in copy.upgrade()
    assign_and_terminate(copy)


def test_a_superuser_installs_for_the_owner(role: Database, empty: Database) -> None:
    """What is put on belongs to the tables' owner: the server, which is that role, can take it off."""
    migrate(role.url)
    before = schema_of(empty)
    empty.upgrade()
    with empty.begin() as connection:
        owners = connection.execute(
            text("SELECT DISTINCT pg_get_userbyid(proowner) FROM pg_proc WHERE proname LIKE 'busy_blocks_%'"
                 " UNION SELECT tableowner FROM pg_tables WHERE tablename = 'busy_blocks_alembic_version'")
        ).scalars().all()  # fmt: skip
    assert owners == [make_url(role.url).username]
    assert role.alembic("downgrade", "base").returncode == 0
    assert schema_of(empty) == before


@pytest.mark.parametrize("moved", ["all tables", "dstack's"])
def test_a_superuser_removes_what_belongs_to_a_former_owner(bare: Database, moved: str) -> None:
    """ALTER TABLE ... OWNER TO leaves the functions behind."""
    before = schema_of(bare)
    bare.upgrade()
    role = f"role_{uuid.uuid4().hex[:8]}"
    with bare.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        connection.exec_driver_sql(f"GRANT CREATE ON SCHEMA public TO {role}")
        tables = connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")).all()
        for name in tables:
            if moved == "all tables" or name != "busy_blocks_alembic_version":
                connection.exec_driver_sql(f'ALTER TABLE "{name}" OWNER TO {role}')
    result = bare.alembic("downgrade", "base")
    assert result.returncode == 0, result.stderr
    assert schema_of(bare) == before


def test_tables_that_are_not_in_the_first_schema_of_the_path(bare: Database) -> None:
    with bare.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.exec_driver_sql("CREATE SCHEMA zz")
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path TO zz, public")
    before = schema_of(bare)
    bare.upgrade()
    assert bare.alembic("check").returncode == 0
    assert bare.alembic("downgrade", "base").returncode == 0
    assert schema_of(bare) == before
    with bare.begin() as connection:
        assert not connection.execute(
            text("SELECT 1 FROM pg_class WHERE relnamespace = 'zz'::regnamespace")
        ).all()


def test_parallel_plans(bare: Database) -> None:
    """A sum over many jobs may be planned with parallel workers, which may not open subtransactions."""
    with bare.begin() as connection:
        name = connection.scalar(text("SELECT current_database()"))
        for setting in ("parallel_setup_cost", "parallel_tuple_cost", "min_parallel_table_scan_size"):
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET {setting} = 0")
        version = connection.scalar(text("SELECT current_setting('server_version_num')::integer"))
        forced = "debug_parallel_query" if version >= 160000 else "force_parallel_mode"
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET {forced} = on")
        owner = add_project(connection)
        instance = add_instance(connection, owner, busy_blocks=5)
        job = add_job(connection, owner, instance, job_runtime_data=job_runtime_data(2))
        columns = [c["name"] for c in connection.dialect.get_columns(connection, "jobs")]
        copied = ", ".join("gen_random_uuid()" if c == "id" else c for c in columns)
        connection.execute(
            text(
                f"INSERT INTO jobs ({', '.join(columns)}) SELECT {copied} FROM jobs, generate_series(1, 4999)"
            )
        )
    assert "was 5, is 10000" in bare.upgrade()
    assert bare.alembic("check").returncode == 0
    with bare.begin() as connection:
        run_sql(connection, "DELETE FROM jobs WHERE id = :job", job=job)
    bare.check_right()


def test_one_statement_on_very_many_instances(protected: Database) -> None:
    """More than the 256 that are collected: the rest is added at once."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance, job = add_instance(connection, owner), add_job(connection, owner)
        for table, count in (("instances", 700), ("jobs", 1400)):
            columns = [c["name"] for c in connection.dialect.get_columns(connection, table)]
            copied = ", ".join("gen_random_uuid()" if c == "id" else c for c in columns)
            connection.execute(
                text(
                    f"INSERT INTO {table} ({', '.join(columns)}) SELECT {copied} FROM {table}, generate_series(2, {count})"
                )
            )
        connection.execute(
            text("UPDATE jobs SET instance_id = i.id FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM instances) AS i,"
                 " (SELECT id, row_number() OVER (ORDER BY id) AS n FROM jobs) AS j"
                 " WHERE jobs.id = j.id AND j.n % 700 + 1 = i.n")
        )  # fmt: skip
    with protected.begin() as connection:
        assert set(counters(connection).values()) == {2}
        connection.execute(text("UPDATE jobs SET instance_id = NULL"))
    protected.check_right()
    assert instance != job


def test_columns_that_dstack_may_yet_add(protected: Database) -> None:
    """No name in the functions may become ambiguous."""
    with protected.begin() as connection:
        for table in ("instances", "jobs"):
            for column in ("blocks", "pending", "entry", "difference", "instance", "own", "writer"):
                connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN {column} integer")
    assign_and_terminate(protected)
    with protected.begin() as connection:
        connection.execute(text("UPDATE jobs SET instance_id = NULL"))
        connection.execute(text("UPDATE instances SET status = 'IDLE'"))
    with protected.begin() as connection:
        connection.execute(text("TRUNCATE jobs CASCADE"))
    protected.check_right()


def test_truncate_by_a_transaction_with_an_older_snapshot(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        instance, job = add_instance(connection, owner), add_job(connection, owner)
    with protected.engine.connect() as older:
        older = older.execution_options(isolation_level="REPEATABLE READ")
        older.execute(text("SELECT 1 FROM runs"))
        with protected.begin() as connection:
            run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=instance, job=job)
        with pytest.raises(DBAPIError, match="could not serialize"):
            older.execute(text("TRUNCATE jobs CASCADE"))
    protected.check_right()


@pytest.mark.parametrize("by", ["INSERT", "UPDATE"])
def test_an_id_used_again_behind_an_older_snapshot(protected: Database, by: str) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        instance, other = add_instance(connection, owner), add_instance(connection, owner, name="other")
        add_job(connection, owner, instance)
    with protected.engine.connect() as older:
        older = older.execution_options(isolation_level="REPEATABLE READ")
        older.execute(text("SELECT 1 FROM runs"))
        with protected.begin() as connection:
            run_sql(connection, "DELETE FROM instances WHERE id = :id", id=instance)
        if by == "INSERT":
            add_instance(older, owner, id=instance)
        else:
            run_sql(
                older,
                "UPDATE instances SET id = :id, busy_blocks = 5 WHERE id = :other",
                id=instance,
                other=other,
            )
            run_sql(older, "UPDATE instances SET busy_blocks = 0 WHERE name = 'other'")
        with pytest.raises(DBAPIError, match="could not serialize access"):
            older.commit()
    protected.check_right()


def test_an_instance_deleted_and_inserted_by_one_statement(protected: Database) -> None:
    """The jobs go after the instance is there again."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        for _ in range(3):
            add_job(connection, owner, instance)
    again = (
        "WITH x AS (DELETE FROM instances WHERE id = :id RETURNING *) INSERT INTO instances SELECT * FROM x"
    )
    with protected.begin() as connection:
        run_sql(connection, again, id=instance)
    with protected.begin() as connection:
        assert counters(connection) == {instance: 0}
    protected.check_right()


def test_sums_and_differences_beyond_an_integer(protected: Database) -> None:
    """What has no room in the column must not make a statement fail."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance, other = (add_instance(connection, owner, status="BUSY") for _ in range(2))
        job = add_job(connection, owner, instance, job_runtime_data=job_runtime_data(999_999))
        # Triggers off, so that it is quick.
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        connection.exec_driver_sql(
            "INSERT INTO jobs SELECT (jsonb_populate_record(jobs, jsonb_build_object('id', gen_random_uuid()))).*"
            " FROM jobs, generate_series(1, 2150)"
        )
        run_sql(connection, "UPDATE instances SET busy_blocks = -2147483648 WHERE id = :id", id=other)
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = status WHERE id = :id", id=instance)
    with protected.begin() as connection:
        assert counters(connection)[instance] == 2**31 - 1
        run_sql(connection, "DELETE FROM jobs WHERE instance_id = :id AND id <> :job", id=instance, job=job)
        run_sql(connection, "UPDATE jobs SET instance_id = :other", other=other)
    with protected.begin() as connection:
        run_sql(connection, "UPDATE jobs SET instance_id = NULL")
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = status")
    protected.check_right()


def test_sums_are_not_taken_from_a_snapshot_older_than_the_wait(protected: Database) -> None:
    """Two jobs that end at the same time: the naive trigger leaves 1 (design, section 3)."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        jobs = [add_job(connection, owner, instance) for _ in range(2)]
    detach = "UPDATE jobs SET instance_id = NULL WHERE id = :job"
    with protected.engine.connect() as one:
        run_sql(one, detach, job=jobs[0])
        # As its commit does, and then holds the row for as long as the commit takes.
        one.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        url = make_url(protected.url).set(drivername="postgresql").render_as_string(hide_password=False)
        statement = detach.replace(":job", f"'{key(one, jobs[1])}'")
        other = subprocess.Popen(
            [str(POSTGRESQL_PROGRAMS / "psql"), url, "-c", statement], stdout=subprocess.PIPE
        )
        with protected.engine.connect() as watching:
            watching = watching.execution_options(isolation_level="AUTOCOMMIT")
            waiting = text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            while watching.scalar(waiting) != 1:
                assert other.poll() is None
        one.commit()
    assert other.wait() == 0
    with protected.begin() as connection:
        assert counters(connection)[instance] == 0
    protected.check_right()


def test_several_jobs_moved_at_once_after_set_constraints_immediate(protected: Database) -> None:
    """The status that the first job changes must not be a reason to sum jobs that are still to be counted.

    Found by the model: 2 jobs were counted twice.
    """
    with protected.begin() as connection:
        owner = add_project(connection)
        one, two = (add_instance(connection, owner, status="IDLE") for _ in range(2))
        for _ in range(3):
            add_job(connection, owner, one)
    with protected.begin() as connection:
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        run_sql(connection, "UPDATE jobs SET instance_id = :two WHERE instance_id = :one", one=one, two=two)
        assert counters(connection) == {one: 0, two: 3}
    protected.check_right()


def test_a_status_and_a_job_before_set_constraints_immediate(protected: Database) -> None:
    """What is summed anew must not be added as well. Found by the model."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="IDLE")
        add_job(connection, owner, instance)
        job = add_job(connection, owner)
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = 'IDLE' WHERE id = :id", id=instance)
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=instance, job=job)
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        assert counters(connection) == {instance: 2}
    protected.check_right()


def test_a_trigger_of_somebody_elses_cannot_use_our_right_to_write(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        one, two = add_instance(connection, owner, name="one"), add_instance(connection, owner, name="two")
        job = add_job(connection, owner)
        connection.exec_driver_sql(
            "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN UPDATE instances SET busy_blocks = 7 WHERE name = 'two'; RETURN NULL; END$$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER meddle AFTER UPDATE ON instances FOR EACH ROW WHEN (new.name = 'one')"
            " EXECUTE FUNCTION meddle()"
        )
    with protected.begin() as connection:
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=one, job=job)
    protected.check_right()
    assert one != two


@pytest.mark.parametrize(
    "number",
    ["total_blocks", "total_blocks - mod(extract(microseconds FROM clock_timestamp())::integer, 4)"],
    ids=["the same number", "another number each time"],
)
def test_a_deferred_trigger_of_somebody_elses_that_writes_back(protected: Database, number: str) -> None:
    """Neither gives in: without a bound the COMMIT would not end."""
    with protected.begin() as connection:
        owner = add_project(connection)
        clamped = add_instance(connection, owner, total_blocks=4)
        other = add_instance(connection, owner, total_blocks=4)
        jobs = [add_job(connection, owner, job_runtime_data=job_runtime_data(9)) for _ in range(2)]
        connection.exec_driver_sql(
            "CREATE FUNCTION clamp() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN UPDATE instances"
            f" SET busy_blocks = {number} WHERE id = new.id AND busy_blocks > total_blocks; RETURN NULL; END$$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER clamp AFTER UPDATE OF busy_blocks ON instances DEFERRABLE INITIALLY"
            f" DEFERRED FOR EACH ROW WHEN (new.id = '{key(connection, clamped)}') EXECUTE FUNCTION clamp()"
        )
    with protected.begin() as connection:
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=clamped, job=jobs[0])
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=other, job=jobs[1])
    with protected.begin() as connection:
        found = counters(connection)
        assert found[other] == 9
        assert found[clamped] in (1, 2, 3, 4, 9)
        # What it left does not reach into another transaction.
        run_sql(connection, "DROP TRIGGER clamp ON instances")
    with protected.begin() as connection:
        run_sql(connection, "UPDATE instances SET status = status")
    protected.check_right()


def test_the_search_path_of_the_session_comes_back(protected: Database) -> None:
    """The function that writes is found by a search_path that is set for it alone."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        job = add_job(connection, owner)
    path, attach = text("SHOW search_path"), "UPDATE public.jobs SET instance_id = :id WHERE id = :job"
    with protected.engine.connect() as connection:
        connection.execute(text("SET search_path = pg_catalog"))
        connection.execute(text("SET LOCAL search_path = ''"))
        run_sql(connection, attach, id=instance, job=job)
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        assert connection.scalar(path) == '""'
        connection.commit()
        assert connection.scalar(path) == "pg_catalog"
        run_sql(connection, attach, id=None, job=job)
        connection.commit()
        assert connection.scalar(path) == "pg_catalog"
    protected.check_right()


def test_a_finite_trigger_of_somebody_elses_on_many_instances(protected: Database) -> None:
    """One write an instance is no fight, however many instances there are."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instances = [add_instance(connection, owner, status="BUSY", name=str(n)) for n in range(150)]
        for instance in instances:
            add_job(connection, owner, instance)
        connection.exec_driver_sql(
            "CREATE FUNCTION higher() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN UPDATE instances"
            " SET busy_blocks = busy_blocks + 1 WHERE id = new.id; RETURN NULL; END$$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER zz_higher AFTER UPDATE OF status ON instances DEFERRABLE INITIALLY"
            " DEFERRED FOR EACH ROW EXECUTE FUNCTION higher()"
        )
    for before in ("SET CONSTRAINTS ALL DEFERRED", "SET CONSTRAINTS ALL IMMEDIATE"):
        with protected.begin() as connection:
            connection.execute(text(before))
            run_sql(connection, "UPDATE instances SET status = status, busy_blocks = busy_blocks")
        protected.check_right()


def test_a_temporary_table_called_as_a_type(protected: Database) -> None:
    """PL/pgSQL keeps what a variable's type meant when the session first called the function."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        job = add_job(connection, owner, instance, job_runtime_data=job_runtime_data(2))
    protected.engine.dispose()
    with protected.engine.connect() as connection:
        run_sql(connection, "CREATE TEMP TABLE text (line integer)")
        run_sql(connection, "SELECT busy_blocks_of_job(NULL)")
        run_sql(connection, "UPDATE instances SET busy_blocks = busy_blocks + 5 WHERE id = :id", id=instance)
        connection.commit()
        run_sql(connection, "DROP TABLE text")
        run_sql(connection, "UPDATE jobs SET instance_id = NULL WHERE id = :job", job=job)
        connection.commit()
    protected.check_right()


def test_a_function_of_the_users_path_called_as_one_of_postgresqls(protected: Database) -> None:
    """PostgreSQL has quote_ident(text) alone, and the name of a schema is no text."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        run_sql(connection, "CREATE SCHEMA own")
        connection.exec_driver_sql(
            "CREATE FUNCTION own.quote_ident(name) RETURNS text LANGUAGE sql AS $$SELECT 'own'$$"
        )
    with protected.begin() as connection:
        run_sql(connection, "SET LOCAL search_path = own, public")
        run_sql(connection, "UPDATE instances SET busy_blocks = busy_blocks + 5 WHERE id = :id", id=instance)
    protected.check_right()


def test_many_statements_after_set_constraints_immediate(protected: Database) -> None:
    """Not another trigger's, however often the same number comes."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="BUSY")
        add_job(connection, owner, instance)
    with protected.begin() as connection:
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        for _ in range(120):
            run_sql(
                connection, "UPDATE instances SET busy_blocks = busy_blocks + 1 WHERE id = :id", id=instance
            )
            assert counters(connection) == {instance: 1}


def test_a_sum_that_has_no_room(protected: Database) -> None:
    """It is the largest that has, for the triggers as for the reports."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="IDLE")
        job = add_job(connection, owner, instance, job_runtime_data=job_runtime_data(999999))
        copied = ", ".join(column.name for column in table(connection, "jobs").columns if column.name != "id")
        run_sql(
            connection,
            f"INSERT INTO jobs (id, {copied}) SELECT gen_random_uuid(), {copied} FROM jobs, generate_series(1, 2150)"
            " WHERE id = :id",
            id=job,
        )
    with protected.begin() as connection:
        assert counters(connection) == {instance: 2147483647}
    result = protected.alembic("check")
    assert result.returncode == 0, result.stderr
    with protected.begin() as connection:
        run_sql(connection, "DELETE FROM jobs")
        run_sql(connection, "UPDATE instances SET status = status")
    protected.check_right()


WITH_STATEMENTS = (
    "WITH x AS (UPDATE jobs SET last_processed_at = submitted_at WHERE false) {attach}",
    "WITH x AS ({attach} RETURNING 1) UPDATE jobs SET last_processed_at = submitted_at FROM x",
    "WITH x AS (UPDATE instances SET status = 'BUSY' RETURNING 1) {attach}",
    "WITH x AS ({attach} RETURNING 1) UPDATE instances SET status = 'BUSY' FROM x",
)


@pytest.mark.parametrize("statement", WITH_STATEMENTS)
@pytest.mark.parametrize(
    "after",
    ["", "UPDATE jobs SET instance_id = NULL WHERE job_num = 9", "UPDATE instances SET status = 'IDLE'"],
)
def test_two_updates_in_one_statement(protected: Database, statement: str, after: str) -> None:
    """A statement trigger that the first UPDATE queued is dropped when the second names other columns."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner, status="PROVISIONING")
        add_job(connection, owner, instance, job_num=9, job_runtime_data=job_runtime_data(2))
        job = add_job(connection, owner, job_runtime_data=job_runtime_data(3))
    attach = "UPDATE jobs SET instance_id = :instance WHERE id = :job"
    with protected.begin() as connection:
        run_sql(connection, statement.format(attach=attach), instance=instance, job=job)
        if after:
            connection.execute(text(after))
    protected.check_right()
    with protected.begin() as connection:
        assert counters(connection)[instance] == (3 if "job_num" in after else 5)


def test_transactions_that_move_jobs_in_opposite_order_do_not_deadlock(protected: Database) -> None:
    """Without triggers these two lock no row in common; with them, instances only at commit, in one order."""
    with protected.begin() as connection:
        owner = add_project(connection)
        a, b = sorted(add_instance(connection, owner, status="BUSY") for _ in range(2))
        jobs = [add_job(connection, owner, instance) for instance in (a, b, b, a)]
    detach = "UPDATE jobs SET instance_id = NULL WHERE id = :job"
    with protected.engine.connect() as one, protected.engine.connect() as two:
        run_sql(one, detach, job=jobs[0])
        run_sql(two, detach, job=jobs[2])
        run_sql(one, detach, job=jobs[1])
        run_sql(two, detach, job=jobs[3])
        one.commit()
        two.commit()
    protected.check_right()


def test_a_trigger_of_somebody_elses_that_moves_jobs(protected: Database) -> None:
    with protected.begin() as connection:
        owner = add_project(connection)
        one, two = add_instance(connection, owner, name="one"), add_instance(connection, owner, name="two")
        job, other = add_job(connection, owner), add_job(connection, owner, job_num=7)
        connection.exec_driver_sql(
            "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN IF new.name = 'one' THEN UPDATE jobs SET instance_id = i.id FROM instances AS i"
            " WHERE i.name = 'two' AND job_num = 7 AND jobs.instance_id IS NULL; END IF; RETURN new; END$$"
        )
        for name, moment in (("a_meddle", "BEFORE"), ("z_meddle", "AFTER")):
            connection.exec_driver_sql(
                f"CREATE TRIGGER {name} {moment} UPDATE ON instances FOR EACH ROW EXECUTE FUNCTION meddle()"
            )
    with protected.begin() as connection:
        run_sql(connection, "UPDATE jobs SET instance_id = :id WHERE id = :job", id=one, job=job)
    protected.check_right()
    with protected.begin() as connection:
        assert counters(connection) == {one: 1, two: 1}
    assert other != job


@pytest.mark.parametrize("attached_again", [False, True])
def test_an_id_used_again_in_one_transaction(protected: Database, attached_again: bool) -> None:
    """What is pending for the instance that was deleted is not added to the one that has its id now."""
    with protected.begin() as connection:
        owner = add_project(connection)
        instance = add_instance(connection, owner)
        add_job(connection, owner, instance, job_runtime_data=job_runtime_data(3))
    with protected.begin() as connection:
        run_sql(connection, "DELETE FROM instances WHERE id = :id", id=instance)
        add_instance(connection, owner, id=instance)
        if attached_again:
            add_job(connection, owner, instance, job_runtime_data=job_runtime_data(2))
    protected.check_right()
    with protected.begin() as connection:
        add_job(connection, owner, instance)
        columns = ", ".join(c["name"] for c in connection.dialect.get_columns(connection, "instances"))
        upsert = f"INSERT INTO instances ({columns}) SELECT {columns} FROM instances ON CONFLICT DO NOTHING"
        connection.execute(text(upsert))
    protected.check_right()
    with protected.begin() as connection:
        assert counters(connection)[instance] == (3 if attached_again else 1)
