"""Runs of several databases in turn, and what comes of them: ratios with their spread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import NamedTuple

from support import Database, counters, truth

BASELINE = "none"
ROUNDS_BETWEEN = 5  # before dead rows are cleared away


class Run(NamedTuple):
    """One timed run on one database, with the rows that the driver says were updated."""

    seconds: float
    cpu_seconds: float  # of the database's own process or processes
    cycles: int
    jobs: int
    instances: int


@dataclass
class Line:
    """One line of a table: the runs of each database, the first of each round being compared with the others."""

    name: str
    target: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    wrong: dict[str, dict[str, int]] = field(default_factory=dict)

    def microseconds(self, kind: str) -> float:
        return median(run.seconds / run.cycles for run in self.runs[kind]) * 1e6

    def ratios(self, kind: str, measure: str = "seconds") -> list[float]:
        """Throughput beside that without triggers in the same round: quartiles."""
        pairs = zip(self.runs[BASELINE], self.runs[kind], strict=True)
        ratios = [
            getattr(bare, measure) / bare.cycles / (getattr(run, measure) / run.cycles) for bare, run in pairs
        ]
        return quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3

    def rows(self, kind: str) -> tuple[int, int]:
        return sum(run.jobs for run in self.runs[kind]), sum(run.instances for run in self.runs[kind])


def alternate(
    line: Line,
    databases: Mapping[str, Database],
    rounds: int,
    run: Callable[[Database, int], Run],
    between: Callable[[Database], None],
    right: tuple[str, ...] = ("ours",),
) -> Line:
    """Run each database in turn, forth and back, so that what the machine does meanwhile hits all alike."""
    line.runs = {kind: [] for kind in databases}
    for number in range(rounds):
        order = list(databases) if number % 2 == 0 else list(reversed(databases))
        for kind in order:
            line.runs[kind].append(run(databases[kind], number))
        if number % ROUNDS_BETWEEN == ROUNDS_BETWEEN - 1:
            for database in databases.values():
                between(database)
    for kind, database in databases.items():
        line.wrong[kind] = wrong_counters(database)
    for kind in right:
        assert not line.wrong[kind], f"{line.name}: {kind} left wrong counters: {line.wrong[kind]}"
    for kind in databases:
        jobs, instances = line.rows(kind)
        assert jobs and instances, f"{line.name}: {kind} worked on {jobs} jobs and {instances} instances"
    return line


def wrong_counters(database: Database) -> dict[str, int]:
    """Counter minus truth, of each instance where they differ."""
    with database.begin() as connection:
        right, found = truth(connection), counters(connection)
    return {key: found[key] - right[key] for key in right if found[key] != right[key]}


def show(line: Line) -> None:
    """Print a line of the table."""
    bare = line.microseconds(BASELINE)
    cells = []
    for kind in line.runs:
        if kind == BASELINE:
            continue
        low, middle, high = line.ratios(kind)
        cells.append(
            f"{kind} {middle:.2f} ({low:.2f}-{high:.2f}) cpu {line.ratios(kind, 'cpu_seconds')[1]:.2f}"
        )
    jobs, instances = line.rows(BASELINE)
    wrong = {kind: sum(map(abs, found.values())) for kind, found in line.wrong.items() if found}
    print(
        f"{line.name} | target {line.target} | none {bare:.0f} us | {' | '.join(cells)}"
        f" | {jobs} jobs, {instances} instances updated each | wrong blocks {wrong or 0}",
        flush=True,
    )
