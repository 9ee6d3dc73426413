"""The rows of dstack's tables as they have to be, kept in Python: what tests/test_model.py compares with.

A Model is one state of the database: every statement makes a new one out of the one before, so a rollback,
also to a savepoint, is going back to an older one. It says what the counters have to be, which statements the
schema refuses, and which counters are in doubt: those that sql/README.md says are not held.
"""

import builtins
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

Id = Any  # a uuid.UUID on PostgreSQL, 32 hex digits on SQLite


class Job(NamedTuple):
    project: Id
    run: Id
    instance: Id | None
    data: str | None
    status: str


class Instance(NamedTuple):
    project: Id
    status: str
    name: str


class Pairs(list[tuple[str, Any]]):
    """A JSON object with all its pairs: a key that occurs twice is read differently by the databases."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")  # but Python reads NaN and Infinity


def _integer(digits: str) -> int | None:
    # Python refuses to read an integer of more than 4300 digits, which both databases do.
    return int(digits) if len(digits) < 10 else None


# PostgreSQL reads neither the escape of a NUL nor that of half a surrogate pair
# (documentation of PostgreSQL, 8.14.1 "JSON Input and Output Syntax").
_UNREADABLE = re.compile(
    r"\\u0000|\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)


@functools.lru_cache(maxsize=10_000)
def blocks_of(data: str | None, dialect: str) -> int:
    """Blocks of a job, as sql/README.md has it: "no JSON that the database can read" depends on it."""
    if data is None:
        return 1
    if dialect == "postgresql" and _UNREADABLE.search(re.sub(r"\\[^u]", "_", data)):
        return 1
    try:
        parsed = json.loads(
            data, object_pairs_hook=Pairs, parse_constant=_refuse, parse_int=_integer, parse_float=str
        )
    except (ValueError, RecursionError):
        return 1
    offers = [value for key, value in parsed if key == "offer"] if isinstance(parsed, Pairs) else []
    if dialect == "sqlite":
        offers = offers[:1]
    found = [value for offer in offers if isinstance(offer, Pairs) for key, value in offer if key == "blocks"]
    if not found:
        return 1
    value = found[0 if dialect == "sqlite" else -1]
    return value if type(value) is int and 0 <= value <= 999_999 else 1


# The statuses that the triggers keep, too.
DERIVED = ("IDLE", "BUSY")


def status_of(written: str, attached: bool) -> str:
    """What the status of an instance has to be, from the one that was written last."""
    if written in DERIVED:
        return "BUSY" if attached else "IDLE"
    return written


class Outcome(Enum):
    """What a statement has to do, without triggers and so with them."""

    SUCCEEDS = 1
    FAILS = 2
    EITHER = 3


@dataclass
class Pragmas:
    """SQLite's, which no rollback takes back."""

    foreign_keys: bool = True
    recursive_triggers: bool = False


@dataclass
class Model:
    dialect: str
    pragmas: Pragmas
    projects: dict[Id, None] = field(default_factory=dict)
    runs: dict[Id, Id] = field(default_factory=dict)
    instances: dict[Id, Instance] = field(default_factory=dict)
    jobs: dict[Id, Job] = field(default_factory=dict)
    # Instances that are not held, with the status and counter that they have; None where that is not said.
    doubt: dict[Id, tuple[str, int] | None] = field(default_factory=dict)
    replica: bool = False  # session_replication_role
    disabled: bool = False  # the triggers are off
    immediate: bool = False  # SET CONSTRAINTS ALL IMMEDIATE
    # Instances whose counter may be written by the deferred triggers that wait.
    waiting: set[Id] = field(default_factory=set)

    def copy(self) -> "Model":
        return replace(
            self,
            projects=self.projects.copy(),
            runs=self.runs.copy(),
            instances=self.instances.copy(),
            jobs=self.jobs.copy(),
            doubt=self.doubt.copy(),
            waiting=self.waiting.copy(),
        )

    def committed(self) -> "Model":
        self.fired()
        return replace(self, immediate=False)

    def fired(self) -> None:
        """The deferred triggers have fired; what they write fires none while triggers are off."""
        if not self.firing:
            for instance in self.waiting & self.instances.keys():
                self.doubt.setdefault(instance, None)
        self.waiting.clear()

    @property
    def firing(self) -> bool:
        return not (self.replica or self.disabled)

    @property
    def enforcing(self) -> bool:
        """Foreign keys are checked and cascade; PostgreSQL does that with triggers, too."""
        return self.pragmas.foreign_keys if self.dialect == "sqlite" else not self.replica

    def truth(self) -> dict[Id, tuple[str, int]]:
        """Status and counter of every instance."""
        sums = dict.fromkeys(self.instances, 0)
        attached = set()
        for job in self.jobs.values():
            if job.instance in sums:
                sums[job.instance] += blocks_of(job.data, self.dialect)
                attached.add(job.instance)
        return {
            id: (status_of(row.status, id in attached), 0 if row.status == "PENDING" else sums[id])
            for id, row in self.instances.items()
        }

    def change_job(self, id: Id, new: Job | None, silent: bool = False) -> set[Id]:
        """Insert, update or delete one job; `silent` where SQLite fires no trigger. The instances concerned."""
        old = self.jobs.get(id)
        concerned: set[Id] = set()
        if old is None or new is None or old.instance != new.instance or old.data != new.data:
            concerned = {row.instance for row in (old, new) if row is not None and row.instance is not None}
        fires = self.firing and not silent
        before = self.truth() if silent else {}
        self.jobs.pop(id, None)
        if new is not None:
            self.jobs[id] = new
        if fires and self.dialect == "sqlite":
            for instance in concerned & self.doubt.keys():
                if old is None or new is None:
                    # What inserts or deletes an attached job sums.
                    del self.doubt[instance]
                else:
                    self.doubt[instance] = None
        elif fires:
            self.waiting |= concerned
        else:
            for instance in concerned & self.instances.keys():
                if not silent:
                    self.doubt[instance] = None
                elif self.truth()[instance] != before[instance]:
                    self.doubt.setdefault(instance, before[instance])
        return concerned

    def replace_job(self, id: Id, new: Job) -> None:
        """SQLite's REPLACE: the old row is deleted, with triggers only if they are recursive."""
        if id in self.jobs:
            self.change_job(id, None, silent=not self.pragmas.recursive_triggers)
        self.change_job(id, new)

    def rename_job(self, old: Id, new: Id) -> None:
        if old != new:
            if new in self.jobs:
                self.change_job(new, None, silent=not self.pragmas.recursive_triggers)
            self.jobs[new] = self.jobs.pop(old)

    def insert_instance(self, id: Id, row: Instance) -> None:
        self.doubt.pop(id, None)
        self.instances[id] = row
        if self.firing:
            self.waiting.add(id)
        else:
            self.doubt[id] = None

    def change_instance(self, id: Id, row: Instance, status: bool = False, busy_blocks: bool = False) -> None:
        """Update one instance; `status` and `busy_blocks` say which columns the statement names."""
        self.instances[id] = row
        if self.firing:
            if status or busy_blocks:
                self.waiting.add(id)
            if status:
                self.doubt.pop(id, None)
            elif busy_blocks and id in self.doubt:
                # Its status may be put right, and then the counter is.
                self.doubt[id] = None
        elif busy_blocks or status:
            self.doubt[id] = None

    def rename_instance(self, old: Id, new: Id) -> None:
        if old == new:
            self.change_instance(old, self.instances[old], status=True)
            return
        if new in self.instances:  # SQLite's UPDATE OR REPLACE
            self.delete_instance(new)
        row = self.instances.pop(old)
        self.doubt.pop(old, None)
        self.instances[new] = row
        if not self.firing:
            self.doubt[new] = None

    def delete_instance(self, id: Id) -> None:
        del self.instances[id]
        self.doubt.pop(id, None)
        if self.enforcing:
            self.delete_jobs(job for job, row in self.jobs.items() if row.instance == id)

    def delete_jobs(self, ids: Iterable[Id]) -> None:
        for id in list(ids):
            self.change_job(id, None)

    def delete_run(self, id: Id) -> None:
        del self.runs[id]
        if self.enforcing:
            self.delete_jobs(job for job, row in self.jobs.items() if row.run == id)

    def delete_project(self, id: Id) -> None:
        del self.projects[id]
        if self.enforcing:
            for run in [run for run, project in self.runs.items() if project == id]:
                self.delete_run(run)
            self.delete_jobs(job for job, row in self.jobs.items() if row.project == id)
            for instance in [instance for instance, row in self.instances.items() if row.project == id]:
                self.delete_instance(instance)

    def outcome_after(self, before: "Model") -> Outcome:
        """What the foreign keys say about a statement that makes this state of `before`."""
        if not self.enforcing:
            return Outcome.SUCCEEDS
        result = Outcome.SUCCEEDS
        for table in ("runs", "instances", "jobs"):
            rows_then = {builtins.id(row) for row in getattr(before, table).values()}
            for row in getattr(self, table).values():
                missing = self._missing(table, row)
                if not missing:
                    continue
                if missing - before.dangling():
                    return Outcome.FAILS
                # Whether a row that dangled before is checked again is the database's business.
                if builtins.id(row) not in rows_then or self.renamed(before, table):
                    result = Outcome.EITHER
        return result

    def renamed(self, before: "Model", table: str) -> bool:
        return getattr(self, table).keys() != getattr(before, table).keys()

    def delete_dangling(self) -> None:
        for run in [id for id, row in self.runs.items() if self._missing("runs", row)]:
            self.delete_run(run)
        for instance in [id for id, row in self.instances.items() if self._missing("instances", row)]:
            self.delete_instance(instance)
        self.delete_jobs(id for id, row in self.jobs.items() if self._missing("jobs", row))

    def dangling(self) -> set[tuple[str, Id]]:
        """What rows refer to and is not there: from a time without foreign keys."""
        tables = ("runs", "instances", "jobs")
        return {
            target
            for table in tables
            for row in getattr(self, table).values()
            for target in self._missing(table, row)
        }

    def _missing(self, table: str, row: Any) -> set[tuple[str, Id]]:
        """What a row refers to and is not there."""
        project = row if table == "runs" else row.project
        result = set() if project in self.projects else {("project", project)}
        if table == "jobs":
            if row.run not in self.runs:
                result.add(("run", row.run))
            if row.instance is not None and row.instance not in self.instances:
                result.add(("instance", row.instance))
        return result
