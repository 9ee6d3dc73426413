"""The order of work, and its sizes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from conftest import Databases
from support import Database

from bench import deploy, explain, postgresql, report, sqlite, variants
from bench.data import EMPTY, Rows, empty_id, fill, record, seed
from bench.measure import BASELINE, Line, Run, alternate
from bench.statements import (
    ASSIGN_TERMINATE,
    FIRST_AND_LAST_JOB,
    FOUR_STATEMENTS,
    HEARTBEATS,
    WHOLE_LIFE,
    Work,
    as_work,
)

# "again" is none a second time: what its ratio differs from 1 is the noise of the machine.
KINDS = ("none", "again", "ours", "delta", "naive")
FEW, MANY = 8, 128  # jobs attached

# With the targets of throughput beside that without triggers.
SERVER_LOOPS: tuple[tuple[Work, int, str], ...] = (
    (HEARTBEATS, FEW, "0.99"),
    (ASSIGN_TERMINATE, FEW, "0.55"),
    (ASSIGN_TERMINATE, MANY, "0.55"),
    (FOUR_STATEMENTS, FEW, "0.55"),
    (FOUR_STATEMENTS, MANY, "0.55"),
    (WHOLE_LIFE, FEW, ""),
    (FIRST_AND_LAST_JOB, 0, ""),
)
SQLITE_LOOPS: tuple[tuple[Work, int, str], ...] = (
    (HEARTBEATS, FEW, "0.99"),
    (ASSIGN_TERMINATE, FEW, "0.50"),
    (ASSIGN_TERMINATE, MANY, "0.50"),
    (FOUR_STATEMENTS, FEW, "0.50"),
    (FOUR_STATEMENTS, MANY, "0.50"),
    (WHOLE_LIFE, FEW, ""),
    (FIRST_AND_LAST_JOB, 0, ""),
)
# By the number of clients: jobs attached, whether all work on one instance, target.
CLIENTS: dict[int, tuple[tuple[int, bool, str], ...]] = {
    4: ((FEW, False, "0.95"), (MANY, False, "0.90")),
    16: ((FEW, True, "0.95"), (FEW, False, "0.95")),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    instances: int = 200  # of each group
    history: int = 100_000  # free jobs
    rounds: int = 40
    cycles: int = 200  # of each run inside a server
    client_rounds: int = 7
    client_cycles: int = 300  # of each run, over all clients
    bulk_rounds: int = 5
    bulk: int = 10_000
    histories: tuple[int, int] = (10_000, 1_000_000)
    deploy_instances: int = 100_000
    wrong_every: int = 100
    writer_seconds: float = 5.0


FULL = Sizes(client_cycles=1200)
QUICK = Sizes(
    history=20_000,
    rounds=12,
    cycles=60,
    client_rounds=3,
    bulk_rounds=2,
    histories=(1000, 50_000),
    deploy_instances=5000,
    writer_seconds=1.0,
)
SMOKE = Sizes(
    instances=4,
    history=200,
    rounds=1,
    cycles=5,
    client_rounds=1,
    client_cycles=32,
    bulk_rounds=1,
    bulk=40,
    histories=(100, 300),
    deploy_instances=20,
    wrong_every=3,
    writer_seconds=0.1,
)


def run(databases: Databases, sizes: Sizes) -> list[Line]:
    """Measure and print everything; the lines of the tables."""
    began = time.monotonic()
    with ExitStack() as stack:
        # Before there is any thread, as they are forks.
        clients = [stack.enter_context(closing(postgresql.Clients(number))) for number in CLIENTS]
        seeded = {dialect: databases.make(dialect, "bare") for dialect in ("postgresql", "sqlite")}
        report.machine(seeded["postgresql"])
        for database in seeded.values():
            seed(database)
        lines = on_postgresql(databases, seeded["postgresql"], sizes, clients)
        lines += on_sqlite(databases, seeded["sqlite"], sizes)
        for database in seeded.values():
            lines.append(with_history(databases, database, sizes))
            deploy_on_few_and_many(databases, database, sizes)
    print(f"\n{time.monotonic() - began:.0f} s in all")
    return lines


def timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def copies(base: Database, databases: Databases, kinds: Sequence[str]) -> dict[str, Database]:
    made = {kind: databases.copy(base) for kind in kinds}
    for kind, database in made.items():
        variants.install(database, kind)
    return made


def on_postgresql(
    databases: Databases, seeded: Database, sizes: Sizes, clients: Sequence[postgresql.Clients]
) -> list[Line]:
    base = databases.copy(seeded)
    free = fill(base, dict.fromkeys((0, FEW, MANY), sizes.instances), sizes.history)
    made = copies(base, databases, (*KINDS, "empty", "reconciler"))
    without_reconciler = {kind: made[kind] for kind in made if kind != "reconciler"}
    connections = {kind: postgresql.connect(database) for kind, database in made.items()}

    def clear(kind: str) -> None:
        postgresql.clear(connections[kind])

    lines = []
    for work, attached, target in SERVER_LOOPS:
        rows = Rows(attached, sizes.instances, free)
        for database in without_reconciler.values():
            postgresql.create_loop(database, work, rows)

        def run_loop(kind: str, number: int) -> Run:
            return postgresql.loop(connections[kind], number, sizes.cycles)

        name = f"in the server: {work.name}, {attached} attached"
        report.say(name)
        lines.append(alternate(name, target, without_reconciler, sizes.rounds, run_loop, clear))
    recording = record(databases.make("postgresql", "bare"))
    everything = as_work(recording, {kind: empty_id(kind) for kind in EMPTY})
    for process, work, (attached, hot, target) in (
        (each, work, line)
        for each in clients
        for work in (everything, ASSIGN_TERMINATE)
        for line in CLIENTS[each.number]
    ):
        rows = Rows(attached, 1 if hot else sizes.instances, free)
        for kind in set(made) - {"ours"}:
            connections[kind].execute(postgresql.RECONCILE)

        def run_clients(
            kind: str,
            number: int,
            rows: Rows = rows,
            process: postgresql.Clients = process,
            work: Work = work,
        ) -> Run:
            reconciler = postgresql.reconciling(made[kind]) if kind == "reconciler" else nullcontext()
            with reconciler:
                cycles = sizes.client_cycles // (8 if work is everything else 1)
                return process.run(made[kind], work, rows, cycles, number)

        name = f"{process.number} clients: {work.name}, {attached} attached, {rows.instances} instance(s)"
        report.say(name)
        lines.append(alternate(name, target, made, sizes.client_rounds, run_clients, clear))
    rows = Rows(0, sizes.instances, free[: sizes.bulk])

    def run_bulk(kind: str, _: int) -> Run:
        return postgresql.detach_all(connections[kind], rows)

    name = f"one statement detaches {len(rows.jobs)} jobs from {rows.instances} instances"
    report.say(name)
    lines.append(alternate(name, "0.50", without_reconciler, sizes.bulk_rounds, run_bulk, clear))
    print("\nPostgreSQL: throughput beside that without triggers, median (quartiles)")
    report.ratios(lines, [kind for kind in made if kind != BASELINE])
    report.flatness(lines, FEW, MANY)
    seconds = [timed(lambda: connections["again"].execute(postgresql.RECONCILE)) for _ in range(3)]
    print(f"\nOne pass of the reconciler: {median(seconds) * 1e3:.0f} ms")
    print("\nWhat limits it, on PostgreSQL (with track_functions, which costs some itself)")
    for attached in (FEW, MANY):
        rows = Rows(attached, sizes.instances, free)
        print("\n".join(explain.functions(made["ours"], rows, sizes.cycles * 5)))
    print("\n".join(explain.plans_postgresql(made["ours"], rows)))
    for connection in connections.values():
        connection.close()
    return lines


def on_sqlite(databases: Databases, seeded: Database, sizes: Sizes) -> list[Line]:
    base = databases.copy(seeded)
    free = fill(base, dict.fromkeys((0, FEW, MANY), sizes.instances), sizes.history)
    made = copies(base, databases, KINDS)
    connections = {kind: sqlite.connect(database) for kind, database in made.items()}

    def clear(kind: str) -> None:
        sqlite.clear(connections[kind])

    lines = []
    for work, attached, target in SQLITE_LOOPS:
        rows = Rows(attached, sizes.instances, free)
        parameters = sqlite.constants(base, work, rows)
        if work.keeps_locks:
            for connection in connections.values():
                sqlite.lock_instances(connection, parameters)

        def run_loop(
            kind: str,
            number: int,
            work: Work = work,
            rows: Rows = rows,
            parameters: dict[str, Any] = parameters,
        ) -> Run:
            return sqlite.loop(connections[kind], work, rows, parameters, number, sizes.cycles)

        name = f"{work.name}, {attached} attached"
        report.say(f"SQLite: {name}")
        lines.append(alternate(name, target, made, sizes.rounds, run_loop, clear))
    rows = Rows(0, sizes.instances, free[: sizes.bulk])

    def run_bulk(kind: str, _: int) -> Run:
        return sqlite.detach_all(connections[kind], rows)

    name = f"one statement detaches {len(rows.jobs)} jobs from {rows.instances} instances"
    report.say(f"SQLite: {name}")
    lines.append(alternate(name, "0.50", made, sizes.bulk_rounds, run_bulk, clear))
    print("\nSQLite, in process: throughput beside that without triggers, median (quartiles)")
    report.ratios(lines, KINDS[1:])
    report.flatness(lines, FEW, MANY)
    seconds = [timed(lambda: connections["again"].execute(sqlite.RECONCILE)) for _ in range(3)]
    print(
        f"\nOne pass of an external reconciler: {median(seconds) * 1e3:.0f} ms, during which nobody else writes"
    )
    print("\nThe plan of the sums on SQLite, from the drift report")
    print("\n".join(explain.plan_sqlite(made["ours"])))
    for connection in connections.values():
        connection.close()
    return lines


def deploy_on_few_and_many(databases: Databases, seeded: Database, sizes: Sizes) -> None:
    """What a deploy costs on few jobs and instances, and on many."""
    few, many = sizes.histories
    others = sizes.deploy_instances - sizes.instances
    small, big = databases.copy(seeded), databases.copy(seeded)
    report.say(f"{seeded.dialect}: deploys on {few} and {many} jobs")
    free = {small: fill(small, {FEW: sizes.instances}, few)}
    free[big] = fill(big, {FEW: sizes.instances, 1: others}, many - FEW * sizes.instances - others)
    ours = databases.copy(small), databases.copy(big)
    print(
        f"\n{seeded.dialect}: a deploy; one in {sizes.wrong_every} counters wrong before it, all right after it"
    )
    report.table(
        ["", *(f"{name} jobs" for name in (few, many))],
        deploys(databases, (small, big), ours, free, sizes),
    )


def with_history(databases: Databases, seeded: Database, sizes: Sizes) -> Line:
    """The same work beside few finished jobs and beside many; the instances and their jobs are the same."""
    made: dict[str, Database] = {}
    runs: dict[str, Callable[[int], Run]] = {}
    clears: dict[str, Callable[[], None]] = {}
    few, many = sizes.histories
    report.say(f"{seeded.dialect}: {few} and {many} finished jobs")
    for finished, more in ((few, ""), (many, ", more")):
        base = databases.copy(seeded)
        rows = Rows(FEW, sizes.instances, fill(base, {FEW: sizes.instances}, finished))
        for kind, database in copies(base, databases, ("none", "ours")).items():
            made[kind + more] = database
            if seeded.dialect == "postgresql":
                postgresql.create_loop(database, ASSIGN_TERMINATE, rows)
                connection = postgresql.connect(database)
                runs[kind + more] = partial(postgresql.loop, connection, cycles=sizes.cycles)
                clears[kind + more] = partial(postgresql.clear, connection)
            else:
                parameters = sqlite.constants(database, ASSIGN_TERMINATE, rows)
                handle = sqlite.connect(database)
                runs[kind + more] = partial(
                    sqlite.loop, handle, ASSIGN_TERMINATE, rows, parameters, cycles=sizes.cycles
                )
                clears[kind + more] = partial(sqlite.clear, handle)
    line = alternate(
        f"{ASSIGN_TERMINATE.name}, {few} and {many} finished jobs",
        "1.05",
        made,
        sizes.rounds,
        lambda kind, number: runs[kind](number),
        lambda kind: clears[kind](),
    )
    print(
        f"\n{seeded.dialect}: {ASSIGN_TERMINATE.name}, cost with {many} finished jobs beside that with {few};"
        " target 1.05"
    )
    report.costs(line, (("none", "none, more"), ("ours", "ours, more")))
    return line


def deploys(
    databases: Databases,
    bare: tuple[Database, Database],
    ours: tuple[Database, Database],
    free: Mapping[Database, range],
    sizes: Sizes,
) -> Iterator[list[str]]:
    """Rows of the table of a deploy, on few and on many jobs; leaves the triggers in `ours`."""

    def install(every: int, do: Callable[[Database], deploy.Process]) -> list[tuple[int, deploy.Process]]:
        done = []
        for database in bare:
            copy = databases.copy(database)
            wrong = deploy.spoil(copy, every)
            process = do(copy)
            copy.check_right()
            done.append((wrong, process))
        return done

    def row(name: str, figures: Iterable[float], digits: int = 2) -> list[str]:
        return [name, *(f"{figure:.{digits}f}" for figure in figures)]

    scans = [deploy.scan(database, 3) for database in bare]
    yield row("instances with jobs attached", (found.instances for found in scans), 0)
    yield row("one sequential scan with the aggregate, s", (found.seconds for found in scans))
    yield row("its CPU time, s", (found.cpu_seconds for found in scans))
    wrong = [deploy.spoil(database, sizes.wrong_every) for database in ours]
    first = [deploy.upgrade(database) for database in ours]
    for database in ours:
        database.check_right()
    again = [deploy.upgrade(database) for database in ours]
    yield row("counters that the backfill corrects", wrong, 0)
    yield row("`alembic upgrade head`, s", (process.seconds for process in first))
    yield row("the same with nothing to do, s", (process.seconds for process in again))
    # Nothing to do on few jobs is the start of Python and the import of dstack.
    for name, measure in (("", "seconds"), (", CPU time", "cpu_seconds")):
        start = getattr(again[0], measure)
        ratio = (getattr(first[1], measure) - start) / getattr(scans[1], measure)
        yield [
            f"the first, less nothing to do on few jobs, beside the scan{name}: target 2",
            "",
            f"{ratio:.2f}",
        ]
    yield row("memory of `alembic upgrade head`, MB", (process.memory for process in first), 0)
    if ours[0].dialect == "postgresql":
        yield row("memory of its backend, MB", (process.server_memory for process in first), 0)
    checks = [deploy.check(database) for database in ours]
    yield row("`alembic check`, s", (process.seconds for process in checks))
    yield row("its memory, MB", (process.memory for process in checks), 0)
    yield row("drift report, s", (deploy.drift(database) for database in ours))
    hooks = [process for _, process in install(sizes.wrong_every, deploy.start_server)]
    yield row("start of a server with the hook, s", (process.seconds for process in hooks))
    yield row("its memory, MB", (process.memory for process in hooks), 0)
    everything = install(1, deploy.upgrade)
    yield row(
        "`alembic upgrade head` where every counter is wrong, s", (done.seconds for _, done in everything)
    )
    yield row("its memory, MB", (done.memory for _, done in everything), 0)
    waits: list[deploy.Waits] = []

    def beside_writer(copy: Database) -> deploy.Process:
        rows = Rows(FEW, sizes.instances, free[bare[len(waits)]])
        process, found = deploy.while_writing(copy, rows, sizes.writer_seconds, lambda: deploy.upgrade(copy))
        waits.append(found)
        return process

    beside = install(sizes.wrong_every, beside_writer)
    yield row("`alembic upgrade head` beside a writer, s", (done.seconds for _, done in beside))
    yield row("transactions of the writer meanwhile", (len(found.meanwhile) for found in waits), 0)
    yield row("its longest wait, ms: target 100", (max(found.meanwhile) * 1e3 for found in waits), 1)
    yield row("its longest wait before, ms", (max(found.before) * 1e3 for found in waits), 1)
