"""The files of deploy/, by the tools that are to read them, and the container's command lines in a namespace."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url, text
from support import ROOT, Database, add_project, as_hex, counters, truth
from test_hook import add_fleet, add_rows, inject_drift, python, serving, start, write_wrong

DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"


def found(program: str, package: str) -> str:
    """The path of a program that only a system's packages have."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"not installed: {program}; apt-get install {package}")
    return path


def test_the_compose_file_is_of_the_specification() -> None:
    compose = PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text())
    assert compose.service_names() == ["postgres", "dstack"]


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """systemd-analyze also looks for the program, and its exit status says nothing of unknown words."""
    unit = tmp_path / "dstack.service"
    unit.write_text((DEPLOY / "dstack.service").read_text().replace("/opt/dstack/bin/python", sys.executable))
    verify = [found("systemd-analyze", "systemd"), "verify", "--man=no", str(unit)]
    result = subprocess.run(verify, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


# The container, without an engine: the image's files, environment and commands


class Image:
    """What deploy/Containerfile says, with the folder that its COPY lines fill in a place of ours."""

    def __init__(self, folder: Path, release: str):
        self.folder = folder
        instructions: dict[str, list[str]] = {}
        parser = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Containerfile").read_bytes()))
        for line in parser.structure:
            instructions.setdefault(line["instruction"], []).append(line["value"])
        for copied in instructions["COPY"]:
            source, target = copied.split()
            path = folder / target.removeprefix("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                path.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, path)
        # Beside them the entry point of dstack's image; this is the line of it that starts the server.
        entrypoint = folder / "entrypoint.sh"
        entrypoint.write_text("#!/bin/bash\nset -e\nexec dstack server --host 0.0.0.0\n")
        entrypoint.chmod(0o755)
        self.entrypoint = self._here(json.loads(instructions["ENTRYPOINT"][0]))
        (health,) = instructions["HEALTHCHECK"]
        self._health = self._here(json.loads(health.partition(" CMD ")[2]))
        variables = dict(line.split("=", 1) for line in instructions["ENV"])
        self.hook = variables["DSTACK_ALEMBIC_MIGRATIONS_LOCATION"].replace(
            "/busy-blocks", f"{folder}/busy-blocks"
        )
        # dstack's environment is elsewhere here, and first in PATH as there.
        assert variables["PATH"].endswith("/uv/tools/dstack/bin:$PATH")
        self.path = f"{Path(python(release)).parent}:{os.environ['PATH']}"

    def _here(self, command: list[str]) -> list[str]:
        return [word.replace("/busy-blocks", f"{self.folder}/busy-blocks") for word in command]

    def health(self, database: Database) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": self.path, "DSTACK_DATABASE_URL": database.url}
        return subprocess.run(self._health, env=environment, cwd="/", capture_output=True, text=True)


@pytest.mark.releases
def test_an_upgrade_in_the_container(empty: Database, unshare: list[str], tmp_path: Path) -> None:
    """A database of 0.20.29 with a wrong counter gets a container of that release, and of the newest."""
    assert start(empty, "0.20.29", location=None).returncode == 0
    with empty.begin() as connection:
        add_project(connection)
        connection.execute(text("UPDATE projects SET name = 'main'"))
    instance = add_fleet(empty)
    write_wrong(empty)
    for release in ("0.20.29", "newest"):
        image = Image(tmp_path / release, release)
        command = [*unshare, *image.entrypoint]
        with serving(empty, image.folder, command, image.hook, PATH=image.path) as call:
            (shown,) = call("project/main/fleets/list")[0]["instances"]
            assert (as_hex(shown["id"]), shown["busy_blocks"]) == (instance, 5)
            health = image.health(empty)
            assert health.returncode == 0, health.stderr
        log = (image.folder / "server.log").read_text()
        assert "Traceback" not in log
        assert "NOT kept right" not in log
        inject_drift(empty)
    assert image.health(empty).returncode == 1


# Monitoring

WRONG_INSTANCES, WRONG_BLOCKS = "dstack_busy_blocks_wrong_instances", "dstack_busy_blocks_wrong_blocks"


def test_the_exported_query_is_that_of_the_drift_report() -> None:
    exported = (MONITORING / "postgres_exporter.yaml").read_text()
    report = re.sub("--.*\n", "", (ROOT / "sql" / "postgresql" / "drift.sql").read_text())
    assert f"( {' '.join(report.split())} ) AS drift" in " ".join(exported.split())


@contextmanager
def exporting(database: Database, folder: Path) -> Iterator[Callable[[], str]]:
    """postgres_exporter with our query, by a role that may read two tables: gives what a scrape reads."""
    program = found("prometheus-postgres-exporter", "prometheus-postgres-exporter")
    role = f"monitor_{uuid.uuid4().hex[:8]}"
    with database.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'"))
        connection.execute(text(f"GRANT SELECT ON instances, jobs TO {role}"))
    url = make_url(database.url).set(drivername="postgresql", username=role, password=role)
    url = url.update_query_dict({"sslmode": "disable"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [f"--extend.query-path={MONITORING / 'postgres_exporter.yaml'}", "--disable-default-metrics"]
    with (folder / "exporter.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments, "--disable-settings-metrics", f"--web.listen-address={address}"],
            env={**os.environ, "DATA_SOURCE_NAME": url.render_as_string(hide_password=False)},
            stderr=log,
        )

    def scrape() -> str:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                    return answer.read().decode()
            except ConnectionError:
                raise
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)

    try:
        yield scrape
    finally:
        process.terminate()
        process.wait()
        with database.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def values(scraped: str) -> dict[str, float]:
    families: Any = text_string_to_metric_families(scraped)
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.name.startswith("dstack_")}


@pytest.mark.parametrize("dialect", ["postgresql"])
def test_the_exported_metric(protected: Database, tmp_path: Path) -> None:
    promtool = found("promtool", "prometheus")
    add_rows(protected)
    with exporting(protected, tmp_path) as scrape:
        assert values(scrape()) == {WRONG_INSTANCES: 0, WRONG_BLOCKS: 0}
        inject_drift(protected)
        with protected.begin() as connection:
            is_now, should_be = counters(connection), truth(connection)
        differences = [abs(is_now[name] - should_be[name]) for name in is_now]
        scraped = scrape()
        assert values(scraped) == {
            WRONG_INSTANCES: sum(difference > 0 for difference in differences),
            WRONG_BLOCKS: sum(differences),
        }
        ours = "".join(line + "\n" for line in scraped.splitlines() if "dstack_" in line)
        linted = subprocess.run([promtool, "check", "metrics"], input=ours, capture_output=True, text=True)
        assert (linted.returncode, linted.stderr) == (0, "")
        # Without the triggers there is no figure, and that is an alert of its own.
        assert protected.alembic("downgrade", "base").returncode == 0
        assert values(scrape()) == {}


def test_the_alerts(tmp_path: Path) -> None:
    promtool = found("promtool", "prometheus")
    rules = str(MONITORING / "alerts.yaml")
    checked = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr

    def case(series: str, **expected: int) -> dict[str, Any]:
        """What fires after 15 minutes of that metric."""
        return {
            "interval": "1m",
            "input_series": [{"series": f'{WRONG_INSTANCES}{{server="db"}}', "values": series}],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert}"}}) or vector(0)',
                    "eval_time": "15m",
                    "exp_samples": [{"labels": "{}", "value": number}],
                }
                for alert, number in expected.items()
            ],
        }

    tests = {
        "rule_files": [rules],
        "evaluation_interval": "1m",
        "tests": [
            case("0x20", DstackBusyBlocksWrong=0, DstackBusyBlocksUnknown=0),
            case("2x20", DstackBusyBlocksWrong=1, DstackBusyBlocksUnknown=0),
            case("_x20", DstackBusyBlocksWrong=0, DstackBusyBlocksUnknown=1),
            # An exporter that is restarted is none.
            case("0 _x4 0x20", DstackBusyBlocksWrong=0, DstackBusyBlocksUnknown=0),
        ],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps(tests))
    result = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
