"""Printing: the machine, and tables in Markdown."""

import os
import platform
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from support import Database

from bench import postgresql
from bench.measure import BASELINE, Line

MEASURES = ("seconds", "cpu_seconds")


def say(*what: object) -> None:
    """What goes on, for who waits."""
    print(*what, file=sys.stderr, flush=True)


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> None:
    """Print each row when it is there."""
    print("\n| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for cells in body:
        print("| " + " | ".join(cells) + " |", flush=True)


def ratio(line: Line, kind: str, measure: str, baseline: str = BASELINE) -> str:
    if kind not in line.runs:
        return ""
    low, middle, high = line.ratios(kind, measure, baseline)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def ratios(lines: Sequence[Line], kinds: Sequence[str]) -> None:
    """Throughput beside that without triggers: median of the rounds, and quartiles; by the clock and by CPU time."""
    head = [
        "work",
        "target",
        "",
        "none, µs",
        *kinds,
        "rows updated: jobs, instances",
        "blocks wrong afterwards",
    ]
    body = []
    for line in lines:
        for name, measure in (("clock", "seconds"), ("CPU", "cpu_seconds")):
            first = measure == "seconds"
            rows = {kind: line.rows(kind) for kind in line.runs}
            body.append(
                [
                    line.work * first,
                    line.target * first,
                    name,
                    f"{line.microseconds(BASELINE, measure):.0f}",
                    *(ratio(line, kind, measure) for kind in kinds),
                    ", ".join(map(str, rows[BASELINE])) * first,
                    (", ".join(f"{kind} {blocks}" for kind, blocks in line.wrong.items() if blocks) or "0")
                    * first,
                ]
            )
    table(head, body)


def flatness(lines: Sequence[Line], few: int, many: int) -> None:
    """Cost of the same work with many jobs attached beside few: from the ratios to no triggers, each of one time."""
    found = {line.work: line for line in lines}
    body = []
    for work, line in found.items():
        other = found.get(work.replace(f" {few} attached", f" {many} attached"))
        if other not in (None, line):
            cells = [
                line.ratios("ours", measure)[1] / other.ratios("ours", measure)[1] for measure in MEASURES
            ]
            body.append([work, *(f"{cell:.2f}" for cell in cells)])
    table([f"ours, {many} attached beside {few}: cost; target 1.20", "clock", "CPU"], body)


def costs(line: Line, pairs: Sequence[tuple[str, str]]) -> None:
    """Cost of the second of each pair beside the first."""
    head = [
        "",
        "",
        *(f"{kind}, µs" for pair in pairs for kind in pair),
        *(f"cost, {few}" for few, _ in pairs),
    ]
    body = []
    for name, measure in (("clock", "seconds"), ("CPU", "cpu_seconds")):
        cells = [f"{line.microseconds(kind, measure):.0f}" for pair in pairs for kind in pair]
        # The cost of one is the throughput of the other beside it.
        cells += [ratio(line, few, measure, baseline=more) for few, more in pairs]
        body.append([line.work if measure == "seconds" else "", name, *cells])
    table(head, body)
    print("rows updated (jobs, instances): " + ", ".join(f"{kind} {line.rows(kind)}" for kind in line.runs))


def machine(server: Database) -> None:
    model = "unknown"
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            model = text.partition(":")[2].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with postgresql.connect(server) as connection:
        settings = {
            name: connection.execute(f"SHOW {name}").fetchone()
            for name in ("server_version", "shared_buffers", "fsync", "synchronous_commit")
        }
    found = {name: row[0] for name, row in settings.items() if row}
    print(
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}, load"
        f" {os.getloadavg()[0]:.1f}; PostgreSQL {found.pop('server_version')}"
        f" ({', '.join(f'{name} {value}' for name, value in found.items())}),"
        f" SQLite {sqlite3.sqlite_version} (WAL, synchronous NORMAL), dstack {version('dstack')},"
        f" Python {platform.python_version()}",
        flush=True,
    )
