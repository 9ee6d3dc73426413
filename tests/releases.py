"""Pythons that have another release of dstack, installed by the wheel `uv` and kept between runs."""

import os
import shutil
import subprocess
import sys
import tempfile
from fcntl import LOCK_EX, flock
from pathlib import Path

import uv


def cache() -> Path:
    """The folder that keeps the environments; BUSY_BLOCKS_TEST_CACHE names another one."""
    named = os.environ.get("BUSY_BLOCKS_TEST_CACHE")
    return Path(named) if named else Path("~/.cache/dstack-busy-blocks").expanduser()


def python_of(version: str) -> str:
    """The path of a python with `dstack[server]` of that version and psycopg, installed if need be.

    It is this Python's own kind. An environment holds its own path, so it is made in place; the marker
    `complete` is written last, and one without it (an install that was cut off) is made anew. A lock
    file keeps two test runs from making the same one.
    """
    folder = cache() / f"{version}-{sys.version_info.major}.{sys.version_info.minor}"
    python, marker = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        flock(lock, LOCK_EX)
        # A Python that was removed since leaves a dangling link.
        if not (marker.exists() and python.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            _uv("venv", "--quiet", "--python", sys.executable, str(folder))
            packages = [f"dstack[server]=={version}", "psycopg[binary]"]
            _uv("pip", "install", "--quiet", "--python", str(python), *packages)
            marker.touch()
    return str(python)


def _uv(*arguments: str) -> None:
    # From a folder without a pyproject.toml or uv.toml, which uv would read.
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run([uv.find_uv_bin(), *arguments], cwd=empty, check=True, stdin=subprocess.DEVNULL)
