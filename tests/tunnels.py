"""What a dstack server does with ssh tunnels; a script, run by the python of any dstack release.

    python tunnels.py SSHD_PORT HANGING_PORT KEY_FILE

It reads one of THINGS to do a line and answers each with `done`. The tunnels, how they are opened and closed, and
the decorator that the health checks of instances and jobs use are dstack's own, unmodified.
"""

import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstack._internal.core.errors import SSHError
from dstack._internal.core.models.backends.base import BackendType
from dstack._internal.core.models.instances import InstanceType, Resources, SSHConnectionParams
from dstack._internal.core.models.runs import JobProvisioningData, JobRuntimeData
from dstack._internal.core.services.ssh import tunnel
from dstack._internal.server.services.runner import ssh
from dstack._internal.utils.path import FileContent

RUNNER_PORT = 10999
SSHD_PORT, HANGING_PORT = int(sys.argv[1]), int(sys.argv[2])
KEY = Path(sys.argv[3]).read_text()


def greet(address: Any) -> socket.socket:
    """A connection through a tunnel, over which the sshd at its other end has sent its banner."""
    family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
    connection = socket.socket(family)
    connection.connect(("127.0.0.1", address) if isinstance(address, int) else str(address))
    assert connection.recv(8) == b"SSH-2.0-"
    return connection


def health_check(fails: bool) -> None:
    def request(addresses: Any) -> bool:
        greet(addresses[RUNNER_PORT]).close()
        if fails:
            raise RuntimeError
        return True

    # Before 0.20 with the ports as an argument.
    old = not hasattr(ssh, "instance_connection_pool")
    decorate = ssh.runner_ssh_tunnel([RUNNER_PORT]) if old else ssh.runner_ssh_tunnel
    host = JobProvisioningData(
        backend=BackendType.RUNPOD,
        instance_type=InstanceType(
            name="", resources=Resources(cpus=1, memory_mib=1, gpus=[], spot=False, disk={"size_mib": 1})
        ),
        instance_id="",
        hostname="127.0.0.1",
        region="",
        price=0,
        username=getpass.getuser(),
        ssh_port=SSHD_PORT,
        # Of a backend of containers, whose tunnels 0.22.5 does not keep open from one check to the next.
        dockerized=False,
    )
    # The runner's port is another one on the host, as with blocks: sshd's own.
    data = JobRuntimeData(network_mode="bridge", ports={RUNNER_PORT: SSHD_PORT})
    assert decorate(request)(KEY, host, data) is True


def new_tunnel(port: int = SSHD_PORT, **more: Any) -> Any:
    """Both of its sockets, here and on the host, lead to an sshd."""
    made = tunnel.SSHTunnel(
        destination=f"{getpass.getuser()}@127.0.0.1", port=port, identity=FileContent(KEY), **more
    )
    sshd = tunnel.IPSocket("127.0.0.1", SSHD_PORT)
    made.local, made.remote = (f"{made.temp_dir.name}/{name}.sock" for name in ("local", "remote"))
    made.forwarded_sockets = [tunnel.SocketPair(tunnel.UnixSocket(made.local), sshd)]
    made.reverse_forwarded_sockets = [tunnel.SocketPair(sshd, tunnel.UnixSocket(made.remote))]
    return made


def jump_host() -> Any:
    host = SSHConnectionParams(hostname="127.0.0.1", username=getpass.getuser(), port=SSHD_PORT)
    return {"ssh_proxies": [(host, None)]}


def time_out(seconds: float, **more: Any) -> None:
    """To a host that greets and then says nothing: dstack kills the ssh that does not open in time."""
    # dstack's own constant, only shorter.
    tunnel.SSH_TIMEOUT = seconds
    try:
        new_tunnel(port=HANGING_PORT, **more).open()
    except SSHError as error:
        if "did not open" not in str(error):
            raise
    else:
        raise AssertionError
    finally:
        tunnel.SSH_TIMEOUT = 15


open_tunnels: list[Any] = []
open_connections: list[socket.socket] = []


def lose(keep: str | None = None) -> None:
    """What closes a tunnel finds no control socket: dstack is done with it, ssh is not."""
    with new_tunnel() as lost:
        connections = {name: greet(getattr(lost, name)) for name in ("local", "remote")}
        os.unlink(lost.control_sock_path)
    if keep:
        open_connections.append(connections[keep])


def stay_open(**more: Any) -> None:
    open_tunnels.append(new_tunnel(**more))
    open_tunnels[-1].open()


def use() -> None:
    """Everything that is open works."""
    for opened in open_tunnels:
        greet(opened.local).close()
    for connection in open_connections:
        connection.send(b"SSH-2.0-test\r\n")
        assert connection.recv(1000)


def fail() -> None:
    try:
        health_check(fails=True)
    except RuntimeError:
        return
    raise AssertionError


def hang_up() -> None:
    for connection in open_connections:
        connection.close()
    open_connections.clear()


THINGS: dict[str, Callable[..., None]] = {
    "return": lambda: health_check(fails=False),
    "raise": fail,
    "time_out": lambda: time_out(0.5),
    "time_out_behind_a_jump_host": lambda seconds: time_out(seconds, **jump_host()),
    "lose": lose,
    "lose_in_use": lambda: lose("local"),
    "lose_in_use_from_the_host": lambda: lose("remote"),
    "stay_open": stay_open,
    "stay_open_behind_a_jump_host": lambda: stay_open(**jump_host()),
    "use": use,
    "hang_up": hang_up,
}

if __name__ == "__main__":
    # As a server that is asked to stop: a status of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    for line in sys.stdin:
        word, *number = line.split()
        THINGS[word](*map(float, number))
        print("done", flush=True)
