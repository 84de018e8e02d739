"""Ports for servers that begin to listen later, and a server that reads its files first."""

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from shared.process.embedded_servers import LOAD_BYTES_S, EmbeddedServer, EmbeddedValkey, free_port
from shared.runtime.errors import ConfigError

LOADING = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    ready = time.monotonic() + 1
    while True:
        server.accept()[0].sendall(b"+PONG" if time.monotonic() > ready else b"-LOADING")
"""


class Loading(EmbeddedServer):
    """Says for a second that it reads its log."""

    name, question, answer = "loading", b"PING", b"+PONG"

    def _command(self) -> list[str]:
        self.address = ("127.0.0.1", port := free_port())
        return [sys.executable, "-c", LOADING, str(port)]


def test_a_server_is_waited_for_while_it_reads_what_it_has_written(tmp_path: Path) -> None:
    server = Loading(tmp_path)
    with (tmp_path / "log.aof").open("wb") as log:
        log.truncate(int(60 * LOAD_BYTES_S))
    try:
        server.start(deadline=0.1)
        assert server.alive()
    finally:
        server.stop()


@pytest.mark.parametrize("name", ["with a space", "größe", "d" * 90, "job#12", "a%20b", "what?"])
def test_a_directory_that_no_store_can_have_its_socket_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="TMPDIR = .*: up to 80 letters"):
        EmbeddedValkey(tmp_path)
    assert not list((tmp_path / name).iterdir())


def test_a_port_is_free_and_none_that_an_outgoing_connection_may_get() -> None:
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    assert all(1024 <= port < max(first, 32768) for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
