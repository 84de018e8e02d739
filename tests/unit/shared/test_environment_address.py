"""Where an environment may be, and where never."""

import pytest

from shared.environment.environment_url import blocked, parse
from tests.support.tables import table


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
