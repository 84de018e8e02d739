"""Addresses: of servers, of this process, of environments, and names on the bus."""

import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.bus.subjects import RUN_ID, Subjects
from shared.environment.environment_url import blocked, parse
from shared.process.embedded_servers import LOAD_BYTES_S, EmbeddedServer, EmbeddedValkey, free_port
from shared.runtime import addresses
from shared.runtime.addresses import address_towards, listening_interfaces, own_address
from shared.runtime.errors import ConfigError
from tests.support.tables import table

READ: dict[str, Callable[[], str | None]] = {"NATS_URL": addresses.nats_url, "REDIS_URL": addresses.redis_url}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    others = (addresses.CA_VARIABLE, "MYXO_HOST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in (*READ, *(f"{name}_FILE" for name in READ), *others):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", READ)
def test_the_variable_goes_before_the_file(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, path = READ[variable], tmp_path / "url"
    assert read() is None
    path.write_text("nats://of-the-file:1\n")
    monkeypatch.setenv(f"{variable}_FILE", str(path))
    assert read() == "nats://of-the-file:1"
    monkeypatch.setenv(variable, "nats://of-the-variable:1")
    assert read() == "nats://of-the-variable:1"
    monkeypatch.setenv(variable, "")
    assert read() == "nats://of-the-file:1"


@pytest.mark.parametrize("variable", READ)
@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_url_is_bad_input(variable: str, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "url"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(f"{variable}_FILE", str(path))
    with pytest.raises(ConfigError, match=f"{variable}_FILE = '{path}'"):
        READ[variable]()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:1/0", False),
        ("unix:///a/b.sock", False),
        ("redis://user:x@host", True),
        ("redis://:x@host", True),
        ("rediss://user@host", True),
        ("redis://host/0?password=x", True),
        ("redis://host/0?protocol=3", False),
    ],
)
def test_whether_a_url_has_credentials(url: str, expected: bool) -> None:
    assert addresses.has_credentials(url) is expected


# --- the address by which other machines reach a process


def test_loopback_where_the_bus_is_here_or_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("NATS_URL", "nats://user:p@127.0.0.1:4222,nats://10.1.2.3:4222")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("NATS_URL", "nats://no-such-host.invalid:4222")
    assert own_address() == "127.0.0.1"


def test_the_interface_that_leads_to_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 127/8 is this machine: the route to 127.0.0.9 begins at an address that the kernel chooses."""
    monkeypatch.setenv("NATS_URL", "tls://user@127.0.0.9:4222")
    assert own_address().startswith("127.")


def test_what_is_given_wins_and_has_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:4222")
    monkeypatch.setenv("MYXO_HOST", "127.0.0.7")
    assert own_address() == "127.0.0.7"
    monkeypatch.setenv("MYXO_HOST", "no-such-host.invalid")
    with pytest.raises(ConfigError, match="MYXO_HOST = 'no-such-host.invalid': does not resolve"):
        own_address()
    for everywhere in ("0.0.0.0", "0"):
        monkeypatch.setenv("MYXO_HOST", everywhere)
        with pytest.raises(ConfigError, match=f"MYXO_HOST = '{everywhere}': means all addresses"):
            own_address()


def test_ranks_listen_on_loopback_and_nccl_where_other_machines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("MYXO_HOST", "127.0.0.7")
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert listening_interfaces() == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_the_way_to_a_host_begins_at_an_address_of_this_machine() -> None:
    assert address_towards("127.0.0.9").startswith("127.")
    assert address_towards("no-such-host.invalid") == "127.0.0.1"


# --- where an environment may be, and where never


@pytest.mark.parametrize(
    ("text", "url", "responder", "shown"),
    [
        ("http://judge:8080", "http://judge:8080", "", "http://judge:8080"),
        ("https://judge.example.org/rm/", "https://judge.example.org/rm", "", "https://judge.example.org/rm"),
        ("http://me:hush@judge:80/rm", "http://me:hush@judge:80/rm", "", "http://judge:80/rm"),
        ("http://[::1]:8080", "http://[::1]:8080", "", "http://[::1]:8080"),
        ("http://127.0.0.1", "http://127.0.0.1", "", "http://127.0.0.1"),
        ("http://10.0.0.7:1", "http://10.0.0.7:1", "", "http://10.0.0.7:1"),
        ("nats:judge_2", "", "judge_2", "nats:judge_2"),
    ],
)
def test_addresses(text: str, url: str, responder: str, shown: str) -> None:
    found = parse(text)
    assert (found.url, found.responder, found.shown) == (url, responder, shown)


@table(
    ("text", "words"),
    [
        ("", "expected http://host:port"),
        ("judge:8080", "expected http://host:port"),
        ("ftp://judge", "expected http://host:port"),
        ("file:///etc/passwd", "expected http://host:port"),
        ("unix:///var/run/docker.sock", "expected http://host:port"),
        ("nats://judge:4222", "expected nats:NAME"),
        ("nats:", "expected nats:NAME"),
        ("nats:a.b", "expected nats:NAME"),
        ("nats:>", "expected nats:NAME"),
        ("http://", "names no host"),
        ("http://:8080", "names no host"),
        ("http://judge:port", "ort"),
        ("http://judge:99999", "ort"),
        ("http://judge?x=1", "query"),
        ("http://judge/#a", "query"),
        ("http://judge?", "query"),
        ("http://jud ge", "white space"),
        ("http://judge\n", "white space"),
        ("http://judge\\@169.254.169.254", "backslash"),
        ("http://[::1", "expected http://host:port"),
        ("http://169.254.169.254/latest", "169.254.169.254 is a link-local address, which is never connected to"),
        ("http://me:hush@169.254.169.254", "link-local"),
        ("http://[fe80::1]:80", "link-local"),
        ("http://[::ffff:169.254.169.254]", "link-local"),
        ("http://0.0.0.0:8080", "unspecified"),
        ("http://[::]:8080", "unspecified"),
    ],
)
def test_what_is_no_address_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)


@table(
    ("host", "is_blocked"),
    [
        ("169.254.0.1", True),
        ("169.254.169.254", True),
        ("fe80::1", True),
        ("fe80::1%eth0", True),
        ("febf::1", True),
        ("::ffff:169.254.169.254", True),
        ("::169.254.169.254", True),
        ("64:ff9b::a9fe:a9fe", True),
        ("2002:a9fe:a9fe::", True),
        ("0.0.0.0", True),
        ("0.1.2.3", True),
        ("::", True),
        ("::ffff:0.0.0.0", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("10.0.0.1", False),
        ("192.168.1.1", False),
        ("169.253.255.255", False),
        ("fec0::1", False),
        ("2001:db8::1", False),
        ("judge", False),
    ],
)
def test_blocked_addresses(host: str, is_blocked: bool) -> None:
    assert bool(blocked(host)) is is_blocked


# --- ports for servers that begin to listen later, and a server that reads its files first

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


# --- names on the bus: apart between runs, and legal


def names(run: str) -> list[str]:
    of = Subjects(run)
    plain = [value for name, value in vars(of).items() if name != "run"]
    built = [of.task("train"), of.generated("math"), of.scored("reward"), of.ledger("x"), of.event("weights", "live")]
    built += [of.replica_weights("r", "commit")]
    return [*plain, *built, of.payload_key("g", 0, 0)]


def test_names_of_two_runs_never_meet() -> None:
    assert not set(names("a")) & set(names("a-b"))
    assert len(set(names("a"))) == len(names("a"))


def test_streams_and_buckets_have_no_dots_and_subjects_start_with_the_run() -> None:
    of = Subjects("my_run-1")
    for name in (of.task_stream, of.ledger_stream, of.events_stream, of.config_bucket, of.services_bucket, of.weights_bucket):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)
    for subject in (of.task("train"), of.scored("reward"), of.batch, of.ledger("x"), of.replica_weights("r", "v")):
        assert subject.startswith("my_run-1.")


@table("run", ["a", "0", "a-b_c", "a" * 63])
def test_legal_run_ids(run: str) -> None:
    assert RUN_ID.match(run)


@table("run", ["", "A", "-a", "_a", "a.b", "a b", "a*", "a>", "a\n", "a" * 64, "ä"])
def test_illegal_run_ids(run: str) -> None:
    assert not RUN_ID.match(run)
