"""SQLite's shell of any release, compiled from the source that the npm package `sqlite3` carries."""

import subprocess
import tarfile
import tempfile
from pathlib import Path

from releases import cache

# Release of SQLite: version of the npm package. 3.9.0 is the first with indexes on expressions and JSON.
PACKAGES = {
    "3.9.1": "3.1.5",
    "3.15.0": "4.0.0",
    "3.24.0": "4.0.3",
    "3.31.1": "4.2.0",
    "3.34.0": "5.0.2",
    "3.38.2": "5.0.3",
    "3.40.0": "5.1.4",
    "3.41.1": "5.1.5",
    "3.44.2": "5.1.7",
    "3.52.0": "6.0.1",
}


def sqlite_shell(version: str, option: str = "-DSQLITE_ENABLE_JSON1") -> Path:
    """The program, made with npm and cc if need be. Up to 3.37 JSON has to be asked for."""
    program = cache() / f"sqlite3-{version}{option}"
    if not program.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            compile_in(Path(folder), version, option).rename(program)
    return program


def compile_in(folder: Path, version: str, option: str) -> Path:
    def run(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)

    run("npm", "pack", "--silent", f"sqlite3@{PACKAGES[version]}")
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("package/deps/sqlite-autoconf-*.tar.gz")
    with tarfile.open(source) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("sqlite-autoconf-*/sqlite3.c")
    files = [str(source), str(source.with_name("shell.c"))]
    run(
        "cc",
        "-O0",
        "-DSQLITE_THREADSAFE=0",
        "-DSQLITE_OMIT_LOAD_EXTENSION",
        option,
        *files,
        "-o",
        "sqlite3",
        "-lm",
    )
    return folder / "sqlite3"
