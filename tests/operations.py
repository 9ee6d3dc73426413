"""Statements that write the two tables in every way there is, each with what it does to the model.

An operation is a function of the machine and five small numbers, which choose rows, values and variants. It
makes the model as the statement has to leave it, and hands both to `machine.statement`.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from model import DERIVED, Id, Instance, Job, Model, Outcome

JOBS, INSTANCES, RUNS, PROJECTS = 10, 6, 3, 2
STATUSES = ("IDLE", "BUSY", "PENDING", "PROVISIONING", "TERMINATING", "TERMINATED")
JOB_STATUSES = ("RUNNING", "SUBMITTED", "TERMINATING", "DONE")
# The largest and the smallest leave room for what other statements add.
NUMBERS = (0, 3, 1, -1, 7, None, 1_000_000, -2_147_000_000, 2_147_000_000)


class Machine(Protocol):
    model: Model
    data: Sequence[str | None]
    sqlite: bool
    has_merge: bool

    def id(self, table: str, number: int) -> Id: ...

    def columns(self, table: str, row: dict[str, Any]) -> dict[str, Any]: ...

    def statement(
        self, sql: str, parameters: Sequence[Any], after: Model, outcome: Outcome | None = None
    ) -> bool: ...

    def copy(
        self, table: str, rows: Sequence[dict[str, Any]], after: Model, outcome: Outcome | None
    ) -> None: ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def savepoint(self) -> None: ...

    def rollback_to(self, number: int) -> None: ...

    def release(self, number: int) -> None: ...

    def truncate(self, table: str) -> None: ...


Operation = Callable[[Machine, int, int, int, int, int], None]
T = TypeVar("T")


def choose(values: Sequence[T], number: int) -> T:
    return values[number % len(values)]


def some(m: Machine, table: str, number: int) -> Id:
    """A row that is there, mostly: else one that may be or not."""
    there = getattr(m.model, table)
    if not there or number % 16 == 15:
        return m.id(table, number >> 4)
    return next(islice(there, number % len(there), None))


def some_instance(m: Machine, number: int) -> Id | None:
    """What a job is attached to."""
    return None if number % 8 == 7 else some(m, "instances", number)


def some_data(m: Machine, number: int) -> str | None:
    if number < 128:
        return f'{{"offer": {{"blocks": {number % 9}}}}}'
    return choose(m.data, number)


def some_number(m: Machine, number: int) -> int | None:
    # Kept where no trigger replaces it, and then added to: it must not overflow the column.
    return choose(NUMBERS if m.model.firing else NUMBERS[:6], number)


def where_jobs(m: Machine, a: int, b: int) -> tuple[str, list[Any], list[Id]]:
    """A condition on jobs and the ids of those it is true for."""
    jobs = m.model.jobs
    kind = a % 8
    if kind < 3:
        chosen = dict.fromkeys(some(m, "jobs", b >> 2 * i) for i in range(kind + 1))
        marks = ", ".join("?" * len(chosen))
        return f"id IN ({marks})", list(chosen), [id for id in jobs if id in chosen]
    if kind < 5:
        instance = some(m, "instances", b)
        return "instance_id = ?", [instance], [id for id, row in jobs.items() if row.instance == instance]
    if kind == 5:
        status = choose(JOB_STATUSES, b)
        return "status = ?", [status], [id for id, row in jobs.items() if row.status == status]
    if kind == 6:
        return "job_runtime_data IS NULL", [], [id for id, row in jobs.items() if row.data is None]
    return "id IS NOT NULL", [], list(jobs)


def where_instances(m: Machine, a: int, b: int) -> tuple[str, list[Any], list[Id]]:
    instances = m.model.instances
    if a % 4 < 2:
        id = some(m, "instances", b)
        return "id = ?", [id], [id] if id in instances else []
    if a % 4 == 2:
        # One that the triggers do not change behind the model's back.
        status = choose([status for status in STATUSES if status not in DERIVED], b)
        return "status = ?", [status], [id for id, row in instances.items() if row.status == status]
    return "id IS NOT NULL", [], list(instances)


def insert_into(m: Machine, table: str, rows: Sequence[dict[str, Any]]) -> tuple[str, list[Any]]:
    full = [m.columns(table, row) for row in rows]
    marks = f"({', '.join('?' * len(full[0]))})"
    sql = f"INSERT INTO {table} ({', '.join(full[0])}) VALUES {', '.join([marks] * len(full))}"
    return sql, [value for row in full for value in row.values()]


def job_columns(id: Id, row: Job) -> dict[str, Any]:
    return {
        "id": id,
        "project_id": row.project,
        "run_id": row.run,
        "instance_id": row.instance,
        "job_runtime_data": row.data,
        "status": row.status,
    }


def new_jobs(m: Machine, a: int, b: int, c: int, d: int) -> dict[Id, Job]:
    """One to three rows to insert, some of which may be there already."""
    rows = {}
    for i in range(1 + a % 3):
        rows[m.id("jobs", b + i * (1 + a // 3 % 3))] = Job(
            some(m, "projects", a + i),
            some(m, "runs", d + i),
            some_instance(m, c + 3 * i),
            some_data(m, d ^ i),
            choose(JOB_STATUSES, b + c + i),
        )
    return rows


def attach_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """UPDATE jobs, one or many, of any of the columns."""
    condition, parameters, ids = where_jobs(m, a, b)
    instance, data, status = some_instance(m, c), some_data(m, d), choose(JOB_STATUSES, c)
    assignments, values, change = [
        ("instance_id = ?", [instance], lambda row: row._replace(instance=instance)),
        ("instance_id = ?, job_runtime_data = ?", [instance, data],
         lambda row: row._replace(instance=instance, data=data)),
        ("instance_id = NULL, status = ?", [status], lambda row: row._replace(instance=None, status=status)),
        ("job_runtime_data = ?", [data], lambda row: row._replace(data=data)),
        ("status = ?", [status], lambda row: row._replace(status=status)),
        ("instance_id = instance_id, job_runtime_data = job_runtime_data", [], lambda row: row._replace()),
        ("instance_id = NULL", [], lambda row: row._replace(instance=None)),
        ("job_runtime_data = NULL, instance_id = ?", [instance],
         lambda row: row._replace(instance=instance, data=None)),
    ][e % 8]  # fmt: skip
    after = m.model.copy()
    for id in ids:
        after.change_job(id, change(after.jobs[id]))
    m.statement(f"UPDATE jobs SET {assignments} WHERE {condition}", [*values, *parameters], after)


def swap_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """One statement moves the jobs of two instances crosswise."""
    one, two = some(m, "instances", a), some(m, "instances", b)
    after = m.model.copy()
    for id, row in m.model.jobs.items():
        if row.instance == one:
            after.change_job(id, row._replace(instance=two))
        elif row.instance == two:
            after.change_job(id, row._replace(instance=one))
    m.statement(
        "UPDATE jobs SET instance_id = CASE WHEN instance_id = ? THEN ? ELSE ? END WHERE instance_id IN (?, ?)",
        [one, two, one, one, two],
        after,
    )


def insert_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    rows = new_jobs(m, a, b, c, d)
    there = rows.keys() & m.model.jobs.keys()
    into, parameters = insert_into(m, "jobs", [job_columns(id, row) for id, row in rows.items()])
    update = " ON CONFLICT (id) DO UPDATE SET "
    kinds = ["", " ON CONFLICT DO NOTHING", update + "status = excluded.status",
             update + "instance_id = excluded.instance_id",
             update + "instance_id = excluded.instance_id, job_runtime_data = excluded.job_runtime_data",
             update + "job_runtime_data = NULL, instance_id = NULL WHERE jobs.status <> excluded.status"]  # fmt: skip
    if m.sqlite:
        kinds += ["REPLACE", "REPLACE", "OR IGNORE"]
    kind = e % len(kinds)
    after = m.model.copy()
    for id, new in rows.items():
        old = after.jobs.get(id)
        if old is None:
            after.change_job(id, new)
        elif kind == 2:
            after.change_job(id, old._replace(status=new.status))
        elif kind == 3:
            after.change_job(id, old._replace(instance=new.instance))
        elif kind == 4:
            after.change_job(id, old._replace(instance=new.instance, data=new.data))
        elif kind == 5 and old.status != new.status:
            after.change_job(id, old._replace(instance=None, data=None))
        elif kind in (6, 7):
            after.replace_job(id, new)
    if kind < 6:
        sql = into + kinds[kind]
    else:
        sql = into.replace("INSERT", "INSERT OR IGNORE" if kind == 8 else "REPLACE", 1)
    m.statement(sql, parameters, after, Outcome.FAILS if kind == 0 and there else None)


def delete_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    condition, parameters, ids = where_jobs(m, a % 7 if c % 8 else a, b)
    after = m.model.copy()
    after.delete_jobs(ids)
    m.statement(f"DELETE FROM jobs WHERE {condition}", parameters, after)


def change_job_id(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    old, new, instance = some(m, "jobs", a), m.id("jobs", b), some_instance(m, c)
    replace = m.sqlite and bool(d & 1)
    after = m.model.copy()
    if old in after.jobs and (replace or new == old or new not in after.jobs):
        after.rename_job(old, new)
        if e & 1:
            after.change_job(new, after.jobs[new]._replace(instance=instance))
        taken = False
    else:
        taken = old in after.jobs
    m.statement(
        f"UPDATE {'OR REPLACE ' if replace else ''}jobs SET id = ?{', instance_id = ?' if e & 1 else ''} WHERE id = ?",
        [new, *([instance] if e & 1 else []), old],
        after,
        Outcome.FAILS if taken else None,
    )


def update_instances(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """What dstack and an operator write: numbers, statuses, both, or something else."""
    condition, parameters, ids = where_instances(m, a, b)
    number, status = some_number(m, c), choose(STATUSES, d)
    kind = e % 9
    assignments, values, names_status, names_number = [
        ("busy_blocks = ?", [number], False, True),
        ("status = ?", [status], True, False),
        ("status = ?, busy_blocks = ?", [status, number], True, True),
        ("status = ?", [status], True, False),
        ("status = status", [], True, False),
        ("busy_blocks = busy_blocks + 1", [], False, True),
        ("name = ?", [f"name {d}"], False, False),
        ("status = status, busy_blocks = busy_blocks - 2, name = ?", [f"name {d}"], True, True),
        ("busy_blocks = busy_blocks, name = ?", [f"name {d}"], False, True),
    ][kind]
    ignore = m.sqlite and number is None and bool(b & 64)
    outcome = None
    if kind in (0, 2) and number is None and ids:
        if m.sqlite:
            outcome = None if ignore else Outcome.FAILS
            ids = []
        else:
            # The trigger may put a number there before the column's NOT NULL is looked at.
            outcome = Outcome.EITHER if m.model.firing else Outcome.FAILS
    after = m.model.copy()
    for id in ids:
        row = after.instances[id]
        if kind in (1, 2, 3):
            row = row._replace(status=status)
        if kind in (6, 7, 8):
            row = row._replace(name=f"name {d}")
        after.change_instance(id, row._replace(), names_status, names_number)
    m.statement(
        f"UPDATE {'OR IGNORE ' if ignore else ''}instances SET {assignments} WHERE {condition}",
        [*values, *parameters],
        after,
        outcome,
    )


def insert_instances(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    rows, numbers = {}, {}
    for i in range(1 + a % 2):
        id = m.id("instances", b + i)
        rows[id] = Instance(some(m, "projects", a + i), choose(STATUSES, d + i), f"name {d}")
        numbers[id] = some_number(m, c + i)
    there = rows.keys() & m.model.instances.keys()
    into, parameters = insert_into(m, 
        "instances",
        [
            {"id": id, "project_id": row.project, "status": row.status, "name": row.name, "busy_blocks": numbers[id]}
            for id, row in rows.items()
        ],
    )  # fmt: skip
    update = " ON CONFLICT (id) DO UPDATE SET "
    kinds = ["", " ON CONFLICT DO NOTHING", update + "busy_blocks = excluded.busy_blocks",
             update + "status = excluded.status, busy_blocks = excluded.busy_blocks",
             update + "name = excluded.name"]  # fmt: skip
    if m.sqlite:
        kinds += ["REPLACE", "OR IGNORE"]
    kind = e % len(kinds)
    outcome = Outcome.FAILS if kind == 0 and there else None
    if None in numbers.values():
        if m.sqlite and kind == 6:
            rows = {id: row for id, row in rows.items() if numbers[id] is not None}
        elif m.sqlite or not m.model.firing:
            outcome = Outcome.FAILS
        elif outcome is None:
            outcome = Outcome.EITHER
    after = m.model.copy()
    for id, new in rows.items():
        old = after.instances.get(id)
        if old is None:
            after.insert_instance(id, new)
        elif kind == 2:
            after.change_instance(id, old._replace(), busy_blocks=True)
        elif kind == 3:
            after.change_instance(id, old._replace(status=new.status), status=True, busy_blocks=True)
        elif kind == 4:
            after.change_instance(id, old._replace(name=new.name))
        elif kind == 5:
            after.delete_instance(id)
            after.insert_instance(id, new)
    if kind < 5:
        sql = into + kinds[kind]
    else:
        sql = into.replace("INSERT", "INSERT OR IGNORE" if kind == 6 else "REPLACE", 1)
    m.statement(sql, parameters, after, outcome)


def delete_instances(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    condition, parameters, ids = where_instances(m, a % 3, b)
    after = m.model.copy()
    for id in ids:
        after.delete_instance(id)
    m.statement(f"DELETE FROM instances WHERE {condition}", parameters, after)


def reinsert_instance(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """Deleted and inserted by one statement: its jobs go after it is there again."""
    id = some(m, "instances", a)
    if id not in m.model.instances or not m.model.enforcing:
        return
    after = m.model.copy()
    row = after.instances[id]
    after.delete_instance(id)
    after.insert_instance(id, row)
    if after.immediate:
        # Documented: "one statement that both moves jobs of an instance and changes its status or inserts it".
        after.doubt[id] = None
    m.statement(
        "WITH gone AS (DELETE FROM instances WHERE id = ? RETURNING *) INSERT INTO instances SELECT * FROM gone",
        [id],
        after,
    )


def change_instance_id(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    old, new = some(m, "instances", a), m.id("instances", b)
    replace = m.sqlite and bool(c & 1)
    after = m.model.copy()
    taken = new in after.instances and new != old and not replace
    if old in after.instances and not taken:
        after.rename_instance(old, new)
    m.statement(
        f"UPDATE {'OR REPLACE ' if replace else ''}instances SET id = ? WHERE id = ?",
        [new, old],
        after,
        Outcome.FAILS if taken and old in after.instances else None,
    )


def assign(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """As dstack does: the instance first, with a number computed from an older read."""
    instance, job = some(m, "instances", a), some(m, "jobs", b)
    after = m.model.copy()
    if instance in after.instances:
        row = after.instances[instance]._replace(status="BUSY")
        after.change_instance(instance, row, status=True, busy_blocks=True)
    m.statement(
        "UPDATE instances SET status = ?, busy_blocks = ? WHERE id = ?", ["BUSY", c % 9, instance], after
    )
    after = m.model.copy()
    data = some_data(m, d)
    if job in after.jobs:
        after.change_job(job, after.jobs[job]._replace(instance=instance, data=data))
    m.statement(
        "UPDATE jobs SET instance_id = ?, job_runtime_data = ? WHERE id = ?", [instance, data, job], after
    )


def terminate(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """As dstack does: the job first; the instance, with a stale number, unless its lock was lost."""
    job = some(m, "jobs", b)
    row = m.model.jobs.get(job)
    after = m.model.copy()
    if row is not None:
        after.change_job(job, row._replace(instance=None, status="TERMINATING"))
    m.statement("UPDATE jobs SET instance_id = NULL, status = ? WHERE id = ?", ["TERMINATING", job], after)
    instance = row.instance if row is not None else None
    if d & 1 or instance not in m.model.instances:
        return
    after = m.model.copy()
    after.change_instance(instance, after.instances[instance]._replace(status="IDLE"), True, True)
    m.statement(
        "UPDATE instances SET busy_blocks = ?, status = ? WHERE id = ?", [c % 9, "IDLE", instance], after
    )


def delete_run(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    run = some(m, "runs", a)
    after = m.model.copy()
    if run in after.runs:
        after.delete_run(run)
    m.statement("DELETE FROM runs WHERE id = ?", [run], after)


def delete_project(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    project = some(m, "projects", a)
    after = m.model.copy()
    if project in after.projects:
        after.delete_project(project)
    m.statement("DELETE FROM projects WHERE id = ?", [project], after)


def insert_parents(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """The projects and runs that were deleted come back, with the same ids."""
    for i in range(PROJECTS):
        project, repo = m.id("projects", i), m.id("repos", i)
        if project not in m.model.projects:
            after = m.model.copy()
            after.projects[project] = None
            sql, parameters = insert_into(m, "projects", [{"id": project, "name": f"project {i}"}])
            m.statement(sql, parameters, after)
            sql, parameters = insert_into(m, "repos", [{"id": repo, "project_id": project}])
            m.statement(sql + " ON CONFLICT DO NOTHING", parameters, m.model.copy())
    for i in range(RUNS):
        run, of = m.id("runs", i), i % PROJECTS
        if run not in m.model.runs:
            after = m.model.copy()
            after.runs[run] = m.id("projects", of)
            columns = {"id": run, "project_id": m.id("projects", of), "repo_id": m.id("repos", of)}
            sql, parameters = insert_into(m, "runs", [columns])
            m.statement(sql, parameters, after)


def two_in_one(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """Data-modifying WITH: two writes in one statement, on different rows."""
    job, other, instance = some(m, "jobs", a), some(m, "jobs", b), some(m, "instances", c)
    target, status, data = some_instance(m, d), choose(STATUSES, e >> 3), some_data(m, d)
    after = m.model.copy()
    concerned: set[Id] = set()
    named: set[Id] = set()

    def change(id: Id, **columns: Any) -> None:
        if id in after.jobs:
            concerned.update(after.change_job(id, after.jobs[id]._replace(**columns)))

    attach = ("UPDATE jobs SET instance_id = ?, job_runtime_data = ? WHERE id = ?", [target, data, job])
    touch = ("UPDATE jobs SET status = ? WHERE id = ?", ["DONE", other])
    parse = ("UPDATE jobs SET job_runtime_data = ? WHERE id = ?", [data, other])
    remove = ("DELETE FROM jobs WHERE id = ?", [other])
    promote = ("UPDATE instances SET status = ?, busy_blocks = 5 WHERE id = ?", [status, instance])
    kind = e % 6
    one, two = [
        (attach, touch), (touch, attach), (attach, parse), (attach, remove), (attach, promote), (promote, attach),
    ][kind]  # fmt: skip
    if kind < 4 and job == other:
        return
    change(job, instance=target, data=data)
    if kind < 2:
        change(other, status="DONE")
    elif kind == 2:
        change(other, data=data)
    elif kind == 3:
        if other in after.jobs:
            concerned.update(after.change_job(other, None))
    elif instance in after.instances:
        after.change_instance(instance, after.instances[instance]._replace(status=status), True, True)
        named.add(instance)
    if after.immediate:
        # Documented: "one statement that both moves jobs of an instance and changes its status or inserts it".
        after.doubt.update(dict.fromkeys(concerned & named))
    m.statement(f"WITH first AS ({one[0]} RETURNING 1) {two[0]}", [*one[1], *two[1]], after)


def merge_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    if not m.has_merge:
        return
    rows = new_jobs(m, a, b, c, d)
    given = [job_columns(id, row) for id, row in rows.items()]
    constants = {name: value for name, value in m.columns("jobs", {}).items() if name not in given[0]}
    source = ", ".join(["(?::uuid, ?::uuid, ?::uuid, ?::uuid, ?::text, ?::text)"] * len(rows))
    after = m.model.copy()
    for id, new in rows.items():
        old = after.jobs.get(id)
        if old is None:
            after.change_job(id, new)
        elif old.status == new.status and e & 1:
            after.change_job(id, None)
        else:
            after.change_job(id, old._replace(instance=new.instance, data=new.data))
    m.statement(
        f"MERGE INTO jobs USING (VALUES {source}) AS given ({', '.join(given[0])}) ON jobs.id = given.id"
        f" WHEN MATCHED AND {'jobs.status = given.status' if e & 1 else 'false'} THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET instance_id = given.instance_id, job_runtime_data = given.job_runtime_data"
        f" WHEN NOT MATCHED THEN INSERT ({', '.join([*given[0], *constants])})"
        f" VALUES ({', '.join([f'given.{name}' for name in given[0]] + ['?'] * len(constants))})",
        [value for row in given for value in row.values()] + list(constants.values()),
        after,
    )


def merge_instances(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    """MERGE that takes each instance's number from its jobs, wrongly, or names its status."""
    if not m.has_merge:
        return
    status = choose(STATUSES, a)
    sources = {row.instance for row in m.model.jobs.values()}
    after = m.model.copy()
    for id in m.model.instances:
        if id not in sources:
            after.change_instance(id, after.instances[id]._replace(name=f"name {d}"))
        elif e & 1:
            after.change_instance(id, after.instances[id]._replace(status=status), True, True)
        else:
            after.change_instance(id, after.instances[id]._replace(), busy_blocks=True)
    m.statement(
        "MERGE INTO instances USING (SELECT i.id, count(j.id)::integer AS jobs FROM instances AS i"
        " LEFT JOIN jobs AS j ON j.instance_id = i.id GROUP BY i.id) AS s ON instances.id = s.id"
        f" WHEN MATCHED AND s.jobs > 0 THEN UPDATE SET {'status = ?, ' if e & 1 else ''}busy_blocks = s.jobs + 3"
        " WHEN MATCHED THEN UPDATE SET name = ?",
        [*([status] if e & 1 else []), f"name {d}"],
        after,
    )


def copy_jobs(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    rows = new_jobs(m, a, b, c, d)
    if e % 8:
        rows = {id: row for id, row in rows.items() if id not in m.model.jobs}
    there = rows.keys() & m.model.jobs.keys()
    after = m.model.copy()
    if not there:
        for id, row in rows.items():
            after.change_job(id, row)
    columns = [m.columns("jobs", job_columns(id, row)) for id, row in rows.items()]
    if columns:
        m.copy("jobs", columns, after, Outcome.FAILS if there else None)


def set_constraints(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    after = m.model.copy()
    after.immediate = bool(a % 3)
    if after.immediate:
        after.fired()
    m.begin()
    m.statement(f"SET CONSTRAINTS ALL {'IMMEDIATE' if after.immediate else 'DEFERRED'}", [], after)


def truncate(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.truncate("instances" if a % 8 == 0 else "jobs")


def begin(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.begin()


def commit(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.commit()


def rollback(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.rollback()


def savepoint(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.savepoint()


def rollback_to(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.rollback_to(a)


def release(m: Machine, a: int, b: int, c: int, d: int, e: int) -> None:
    m.release(a)


# How often each is chosen, of 256 or less; the first does nothing, for Hypothesis to shrink to.
WEIGHTS: dict[str, dict[Operation | None, int]] = {
    "sqlite": {
        None: 1, attach_jobs: 30, insert_jobs: 24, update_instances: 22, assign: 12, terminate: 10,
        insert_instances: 12, swap_jobs: 5, delete_jobs: 5, change_job_id: 5, delete_instances: 2,
        change_instance_id: 4, delete_run: 1, delete_project: 1, insert_parents: 6, begin: 12, commit: 8,
        rollback: 3, savepoint: 6, rollback_to: 3, release: 3,
    },
}  # fmt: skip
WEIGHTS["postgresql"] = WEIGHTS["sqlite"] | {
    begin: 30, commit: 12, two_in_one: 12, merge_jobs: 6, merge_instances: 3, copy_jobs: 4, set_constraints: 3,
    truncate: 2, reinsert_instance: 3,
}  # fmt: skip
