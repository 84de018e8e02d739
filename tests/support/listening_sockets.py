"""The sockets on which a process and all below it listen."""

import contextlib
import socket
from pathlib import Path
from typing import NamedTuple

import psutil


class ListeningSocket(NamedTuple):
    """A TCP socket that takes connections, or a UDP one that takes packets from anybody. ``pid``, ``command``: its process."""

    pid: int
    command: str
    address: str
    port: int


def listening_sockets(pid: int) -> set[ListeningSocket]:
    """Returns those of the process ``pid`` and of its descendants; processes that end meanwhile are left out."""
    found: set[ListeningSocket] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline()).strip()
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr):
                        found.add(ListeningSocket(process.pid, command, connection.laddr.ip, connection.laddr.port))
    return found


def listening_inodes() -> frozenset[str]:
    """Returns the inodes of all sockets here that take connections, or packets: what tells cheaply that something has changed."""
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING or table.startswith("udp"):
                found.add(fields[9])
    return frozenset(found)


LISTENING = "0A"
"""As the kernel's tables name the state."""
