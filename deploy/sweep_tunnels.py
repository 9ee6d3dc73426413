"""Run a command in this process's place and, beside it, end the ssh processes that it forgets.

    python sweep_tunnels.py SECONDS COMMAND [ARGUMENT...]

dstack closes a tunnel through its control socket. Where that file is gone (a cleaner of /tmp, an opening
that was cancelled), SSHTunnel.close() returns early (dstack 0.22.5) or its `ssh -O exit` fails (0.19.36),
and the daemonized ssh lives on. So does the ssh to a jump host when the one that it serves is killed because
a tunnel does not open in time. An init reaps what is dead; this ends what is forgotten, every SECONDS, and
whatever the command has left behind once it is gone. It needs psutil, which dstack itself needs.
"""

import contextlib
import os
import select
import sys
import uuid

import psutil

# Every process that the command starts inherits it: nobody else's tunnel is ever looked at.
MARK = "BUSY_BLOCKS_SWEEP"


def main() -> None:
    seconds, *command = sys.argv[1:]
    mark = uuid.uuid4().hex
    commands_pid = os.getpid()
    if os.fork():
        os.execvpe(command[0], command, {**os.environ, MARK: mark})
    # No signal of the command's terminal or group.
    os.setsid()
    # Readable once the command has ended (pidfd_open(2)).
    ended = os.pidfd_open(commands_pid)
    before: set[psutil.Process] = set()
    while not select.select([ended], [], [], float(seconds))[0]:
        # At two looks in a row, so that nothing is ended that was only seen between two states.
        now = forgotten(started(mark))
        terminate(now & before)
        before = now
    terminate(set(started(mark)))


def terminate(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()


def started(mark: str) -> dict[psutil.Process, list[str]]:
    """The command lines of everything alive that the command has started, and its own."""
    found = {}
    for process in psutil.process_iter():
        # Else it has ended, or is a zombie or another user's.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found[process] = process.cmdline()
    return found


def forgotten(processes: dict[psutil.Process, list[str]]) -> set[psutil.Process]:
    words = [word for arguments in processes.values() for word in arguments]
    proxy_commands = [word for word in words if word.startswith("ProxyCommand=")]
    found = set()
    for process, arguments in processes.items():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if is_forgotten_tunnel(process, arguments) or is_forgotten_proxy(arguments, proxy_commands):
                found.add(process)
    return found


def is_forgotten_tunnel(process: psutil.Process, arguments: list[str]) -> bool:
    """A tunnel of SSHTunnel's own command line that nobody can close and nobody is connected through."""
    if not {"-N", "-f", "ControlMaster=auto", "-S"} <= set(arguments):
        return False
    # ssh makes the control socket first, and then `-f` makes it the leader of a session: before that it
    # is still opening (OpenSSH's ssh.c, ssh_session2).
    if os.getsid(process.pid) != process.pid:
        return False
    if os.path.exists(arguments[arguments.index("-S") + 1]):
        return False
    sockets = process.net_connections("all")
    # What is accepted has the address of the socket that listens. Through a reverse forward ssh itself
    # connects, beside its connection to the host.
    addresses = [socket.laddr for socket in sockets if socket.laddr]
    connected = [socket for socket in sockets if socket.status == psutil.CONN_ESTABLISHED]
    return len(addresses) == len(set(addresses)) and len(connected) <= 1


def is_forgotten_proxy(arguments: list[str], proxy_commands: list[str]) -> bool:
    """The ssh to a jump host, by the key file in its tunnel's own folder; that tunnel's ssh is gone."""
    if not {"-i", "-W"} <= set(arguments):
        return False
    key = arguments[arguments.index("-i") + 1]
    return not any(key in command for command in proxy_commands)


if __name__ == "__main__":
    main()
