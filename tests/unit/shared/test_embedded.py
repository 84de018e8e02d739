"""Ports for servers that begin to listen later."""

import socket
from pathlib import Path

from shared.process.embedded_servers import free_port


def test_a_port_is_free_and_none_that_an_outgoing_connection_may_get() -> None:
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    assert all(1024 <= port < max(first, 32768) for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
