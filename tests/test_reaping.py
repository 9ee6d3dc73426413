"""dstack#3291: dead and forgotten ssh processes of a server, in a PID namespace like a container's.

The server's part is played by tunnels.py with dstack's own tunnels, the host's by a real sshd.
BUSY_BLOCKS_TEST_CYCLES says how often a tunnel is opened and closed.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from releases import python_of
from support import ROOT

CYCLES = int(os.environ.get("BUSY_BLOCKS_TEST_CYCLES", "6"))
RELEASES = ["newest", pytest.param("0.19.36", marks=pytest.mark.releases)]
# PID 1 waits for its own child only, as dstack itself does, and outlives it.
PARENT = "import subprocess, sys, time; print(subprocess.call(sys.argv[1:]), flush=True); time.sleep(3600)"
# What comes before the server's command line.
NO_INIT: list[str] = []
TINI = ["tini", "--"]
TINI_BELOW_A_PARENT = [sys.executable, "-c", PARENT, "tini", "-s", "--"]


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A real sshd on loopback that lets this user in: its port, and the private key."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("not installed: sshd; apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    if getpass.getuser() == "root":
        # Debian's service would make it.
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "PidFile": "none",
        "UsePAM": "no",
        # The tests come and go quickly.
        "MaxStartups": "1000",
    }
    # OpenSSH 9.8 and later hold it against a client that it goes without logging in.
    test = [program, "-t", "-f", "/dev/null", "-h", folder / "host", "-o", "PerSourcePenalties=no"]
    if subprocess.run(test, stderr=subprocess.DEVNULL).returncode == 0:
        options["PerSourcePenalties"] = "no"
    arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", "/dev/null", *arguments], stderr=log)
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield port, folder / "user"
    finally:
        process.terminate()
        process.wait()


class HangingHost:
    """Greets as sshd does, takes the client's proposal of algorithms (RFC 4253, 7.1), and says nothing more."""

    def __init__(self, listening: socket.socket):
        self.port = listening.getsockname()[1]
        self.proposals = 0
        self._held: list[socket.socket] = []
        self._listening = listening
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            threading.Thread(target=self._greet, args=[connection], daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-hanging\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            while b"ssh-ed25519" not in received:
                more = connection.recv(4096)
                if not more:
                    return
                received += more
            # Before the count, which says that it is held; as a host that hangs, it does not hang up either.
            self._held.append(connection)
            self.proposals += 1


@pytest.fixture(scope="session")
def hanging_host() -> HangingHost:
    return HangingHost(socket.create_server(("127.0.0.1", 0), backlog=100))


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Server:
    """A process of tunnels.py in a namespace, seen from outside."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        assert self.read() == "ready"
        self.unshare = psutil.Process(process.pid)
        (self.pid1,) = self.unshare.children()
        self.at_first = len(self.processes())

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self.read() == "done", what

    def processes(self) -> list[psutil.Process]:
        """All of the namespace's, dead ones too: whose parent is gone is a child of its PID 1."""
        return self.unshare.children(recursive=True)

    def dead(self) -> list[psutil.Process]:
        return [process for process in self.processes() if process.status() == psutil.STATUS_ZOMBIE]

    def running(self, word: str) -> list[psutil.Process]:
        """Those alive that have the word in their command line."""
        return [process for process in self.processes() if word in cmdline(process)]

    def wait(self) -> int:
        return self._process.wait(60)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


TUNNEL, PROXY = "ControlMaster=auto", "-W"
SCRIPT = str(ROOT / "tests" / "tunnels.py")


@pytest.fixture
def serving(
    unshare: list[str], sshd: tuple[int, Path], hanging_host: HangingHost, tmp_path: Path
) -> Callable[[str, list[str]], Any]:
    @contextmanager
    def start(release: str, before: list[str]) -> Iterator[Server]:
        python = sys.executable if release == "newest" else python_of(release)
        arguments = [str(sshd[0]), str(hanging_host.port), str(sshd[1])]
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen(
                [*unshare, *before, python, SCRIPT, *arguments],
                # Short, as it becomes part of a socket's path.
                env={**os.environ, "TMPDIR": "/tmp"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            yield Server(process)
        finally:
            process.kill()
            process.communicate()

    return start


def sweep(release: str) -> list[str]:
    """The sweep as the container starts it, by the server's own python; every second."""
    python = sys.executable if release == "newest" else python_of(release)
    return [python, str(ROOT / "deploy" / "sweep_tunnels.py"), "1"]


def cycles() -> Iterator[str]:
    """Tunnels of health checks that succeed, whose request fails, and that do not open in time."""
    return islice(cycle(["return", "raise", "time_out"]), CYCLES)


def time_out_behind_a_jump_host(server: Server, host: HangingHost) -> None:
    """Such that the host had its say: earlier, the ssh to the jump host ends by itself."""
    for seconds in (1, 2, 4, 8, 15):
        proposals = host.proposals
        server.do(f"time_out_behind_a_jump_host {seconds}")
        if host.proposals > proposals:
            return
    raise AssertionError("the host was not reached")


@pytest.mark.parametrize("release", RELEASES)
def test_without_an_init(
    serving: Callable[[str, list[str]], Any], hanging_host: HangingHost, release: str
) -> None:
    """The bug, by the same measure as below: each tunnel that was open is a zombie."""
    with serving(release, NO_INIT) as server:
        assert server.at_first == 1
        dead = 0
        for kind in cycles():
            server.do(kind)
            # An ssh that did not open in time is dstack's own child yet, and waited for.
            dead += kind != "time_out"
            wait_until(lambda: len(server.dead()) == dead)  # noqa: B023
            assert len(server.processes()) == 1 + dead
        # And two kinds are forgotten alive, which no init can help.
        for number in (1, 2):
            server.do("lose")
            assert len(server.running(TUNNEL)) == number
        time_out_behind_a_jump_host(server, hanging_host)
        assert len(server.running(PROXY)) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_with_tini(serving: Callable[[str, list[str]], Any], release: str) -> None:
    with serving(release, TINI) as server:
        for kind in cycles():
            server.do(kind)
            wait_until(lambda: len(server.processes()) == server.at_first)
            assert server.dead() == []
        # Signals reach the server; its status comes back; nothing outlives it.
        for _ in range(3):
            server.do("stay_open")
        everything = server.processes()
        assert len(everything) == server.at_first + 3
        server.pid1.terminate()
        assert server.wait() == 7
        psutil.wait_procs(everything, timeout=30)
        assert [process for process in everything if process.is_running()] == []


@pytest.mark.parametrize("release", RELEASES)
def test_with_tini_and_the_sweep_below_another_process(
    serving: Callable[[str, list[str]], Any], hanging_host: HangingHost, release: str
) -> None:
    with serving(release, [*TINI_BELOW_A_PARENT, *sweep(release)]) as server:
        assert server.pid1.name() != "tini"
        for kind in cycles():
            server.do(kind)
            wait_until(lambda: len(server.processes()) == server.at_first)
            assert server.dead() == []
        # What is in use stays, what is forgotten goes.
        for kind in ("stay_open_behind_a_jump_host", "lose_in_use", "lose_in_use_from_the_host"):
            server.do(kind)
        in_use = server.running(TUNNEL) + server.running(PROXY)
        assert len(in_use) == 4
        for _ in range(2):
            server.do("lose")
            time_out_behind_a_jump_host(server, hanging_host)
        wait_until(lambda: server.running(TUNNEL) + server.running(PROXY) == in_use)
        server.do("use")
        server.do("hang_up")
        wait_until(lambda: len(server.running(TUNNEL)) == 1)
        server.do("use")
        assert len(server.processes()) == server.at_first + 2
        # Killed with open tunnels: PID 1 lives on and reaps nothing, but nothing else is alive.
        server.do("stay_open")
        (killed,) = [process for process in server.running(SCRIPT) if process.parent().name() == "tini"]
        killed.kill()
        assert server.read() == str(128 + signal.SIGKILL)
        wait_until(lambda: [p for p in server.processes() if p not in server.dead()] == [server.pid1])
