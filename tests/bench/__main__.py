"""Prints what the triggers cost.

    cd tests && python -m bench [--quick]

BUSY_BLOCKS_TEST_POSTGRESQL names a server, as for the tests; it has to be on this machine, and its role a superuser.
Without it, the server of the wheel is started. Linux only: CPU times and memory are read from /proc.
"""

import argparse
import tempfile
from pathlib import Path

from conftest import Databases, running_server

from bench.suite import FULL, QUICK, run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, a minute or two")
    sizes = QUICK if parser.parse_args().quick else FULL
    with tempfile.TemporaryDirectory() as folder, running_server() as server:
        databases = Databases(server, Path(folder))
        try:
            run(databases, sizes)
        finally:
            databases.drop()


if __name__ == "__main__":
    main()
