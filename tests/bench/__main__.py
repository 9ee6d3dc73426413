"""Prints what the triggers cost.

    cd tests && python -m bench [--quick]

BUSY_BLOCKS_TEST_POSTGRESQL names a server, as for the tests; without it, that of a wheel is started.
"""

import argparse
import tempfile
from pathlib import Path

from conftest import Databases, postgresql_server

from bench import postgresql, statements, variants
from bench.data import fill
from bench.measure import Line, alternate, show

GROUPS = {0: 200, 8: 200, 128: 200}
KINDS = ("none", "again", "ours", "delta", "naive")
WORKS = {
    "heartbeats": (statements.HEARTBEATS, True),
    "four": (statements.FOUR_STATEMENTS, False),
    "locks": (statements.WITH_LOCKS, True),
    "first": (statements.FIRST_AND_LAST_JOB, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: a minute or two")
    quick = parser.parse_args().quick
    history, rounds, cycles = (20_000, 20, 100) if quick else (100_000, 40, 300)
    with tempfile.TemporaryDirectory() as folder, postgresql_server() as server:
        databases = Databases(server, Path(folder))
        try:
            base = databases.make("postgresql", "bare")
            fill(base, GROUPS, history)
            for name, (transactions, locks) in WORKS.items():
                with postgresql.connect(base) as connection:
                    connection.execute(postgresql.procedure(name, transactions, locks))
            made = {kind: databases.copy(base) for kind in KINDS}
            for kind, database in made.items():
                variants.install(database, kind)
            connections = {database: postgresql.connect(database) for database in made.values()}
            first = sum(group * number for group, number in GROUPS.items())
            free = range(first, first + history)
            for title, target, name, attached in (
                ("server loop, heartbeats and locks", "0.99", "heartbeats", 8),
                ("server loop, 4 statements, 8 attached", "0.55", "four", 8),
                ("server loop, 4 statements, 128 attached", "0.55", "four", 128),
                ("server loop, with locks, 8 attached", "0.55", "locks", 8),
                ("server loop, with locks, 128 attached", "0.55", "locks", 128),
                ("server loop, first and last job", "-", "first", 0),
            ):

                def run(database, number):
                    return postgresql.loop(
                        connections[database], name, attached, GROUPS[attached], free, number * 101, cycles
                    )

                for database in made.values():
                    postgresql.lock_instances(database)
                    run(database, 0)  # plans and caches
                show(alternate(Line(title, target), made, rounds, run, postgresql.vacuum))
        finally:
            # Of a server that was named; dropping ends what is still connected.
            databases.drop()


main()
