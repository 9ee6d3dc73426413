"""Runs on several databases in turn, and what comes of them: ratios with their spread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

from support import Database, counters, truth

BASELINE = "none"
ROUNDS_BETWEEN = 5  # before dead rows are cleared away


class Run(NamedTuple):
    """One timed run on one database, with the rows that the driver says were updated."""

    seconds: float
    cpu_seconds: float  # of the process or processes that do the database's work
    cycles: int
    jobs: int
    instances: int


@dataclass
class Line:
    """The runs of one kind of work on each database, and what was left wrong there, in blocks."""

    work: str
    target: str
    runs: dict[str, list[Run]]
    wrong: dict[str, int]

    def cost(self, kind: str, measure: str) -> list[float]:
        """Seconds per cycle, of each run."""
        return [getattr(run, measure) / run.cycles for run in self.runs[kind]]

    def ratios(self, kind: str, measure: str, baseline: str = BASELINE) -> tuple[float, float, float]:
        """Throughput, beside the baseline's in the same round: lower quartile, median, upper quartile."""
        pairs = zip(self.cost(baseline, measure), self.cost(kind, measure), strict=True)
        ratios = [bare / run for bare, run in pairs]
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return low, middle, high

    def rows(self, kind: str) -> tuple[int, int]:
        """Jobs and instances updated."""
        return sum(run.jobs for run in self.runs[kind]), sum(run.instances for run in self.runs[kind])

    def microseconds(self, kind: str, measure: str) -> float:
        return median(self.cost(kind, measure)) * 1e6


def alternate(
    work: str,
    target: str,
    databases: Mapping[str, Database],
    rounds: int,
    run: Callable[[str, int], Run],
    clear: Callable[[str], None],
) -> Line:
    """Run on each database in turn, forth and back, so that other work on the machine hits all alike.

    `run` gets the database's name and the round, `clear` takes dead rows away.
    """
    line = Line(work, target, {kind: [] for kind in databases}, {})
    for kind in databases:
        run(kind, 0)  # plans and caches
        clear(kind)
    for number in range(1, rounds + 1):
        for kind in databases if number % 2 else reversed(list(databases)):
            line.runs[kind].append(run(kind, number))
        if number % ROUNDS_BETWEEN == 0:
            for kind in databases:
                clear(kind)
    for kind, database in databases.items():
        if min(line.rows(kind)) == 0:
            raise RuntimeError(
                f"{work}: {kind} updated {line.rows(kind)} jobs and instances: nothing measured"
            )
        line.wrong[kind] = sum(map(abs, wrong_counters(database).values()))
        if kind.startswith("ours") and line.wrong[kind]:
            raise RuntimeError(f"{work}: the triggers left {line.wrong[kind]} blocks wrong")
    return line


def wrong_counters(database: Database) -> dict[str, int]:
    """Counter minus truth, of each instance where they differ."""
    with database.begin() as connection:
        right, found = truth(connection), counters(connection)
    return {key: found[key] - right[key] for key in right if found[key] != right[key]}
