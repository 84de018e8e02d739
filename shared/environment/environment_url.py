"""Reads an environment's address, ``http(s)://host[:port][/path]`` or ``nats:NAME``, and refuses blocked IP addresses. Pure.

Addresses come from the run's config alone, never from a message or a prompt.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

NAME = re.compile(r"[A-Za-z0-9_-]{1,63}\Z")  # The form of an environment's name, which becomes part of subject and key names
NATS = "nats:"
EXPECTED = "http://host:port, https://host:port or nats:NAME"

_ODD = re.compile(r"[\s\\\x00-\x1f\x7f]")  # two parsers may read such a URL in two ways
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


@dataclass(frozen=True)
class EnvironmentUrl:
    """One environment's address. url: as HTTP requests use it, credentials included, no slash at the end ("" on the bus). responder: its
    name on the bus ("" over HTTP). shown: without credentials, for logs and statuses."""

    url: str
    responder: str
    shown: str


def parse(text: str) -> EnvironmentUrl:
    """Reads an address. Raises ValueError with what is wrong with it."""
    if text.startswith(NATS):
        name = text.removeprefix(NATS)
        if not NAME.match(name):
            raise ValueError("expected nats:NAME, where NAME has 1 to 63 letters, digits, '-' and '_' (the server is the run's own bus)")
        return EnvironmentUrl("", name, text)
    parts, host, port = _split(text, EXPECTED)
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        raise ValueError("a query or fragment has no place here: /describe and /score are appended to it")
    path = parts.path.rstrip("/")
    shown_host = f"[{host}]" if ":" in host else host
    shown = f"{parts.scheme}://{shown_host}{'' if port is None else f':{port}'}{path}"
    return EnvironmentUrl(f"{parts.scheme}://{parts.netloc}{path}", "", shown)


def check_server(text: str) -> None:
    """Checks the URL of a server that is no environment; it may have a query. Raises ValueError with what is wrong with it."""
    parts, _, _ = _split(text, "http://host:port/path or https://host:port/path")
    if parts.fragment:
        raise ValueError("a fragment has no place here: it is not sent")


def problem(text: str | None, check: Callable[[str], object] = parse) -> str:
    """Returns what is wrong with an address; empty where nothing is, or there is none."""
    try:
        if text is not None:
            check(text)
    except ValueError as error:
        return str(error)
    return ""


def without_credentials(url: str) -> str:
    """Returns a URL as logs and errors show it: without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _split(text: str, expected: str) -> tuple[SplitResult, str, int | None]:
    """Returns an HTTP URL's parts, its host and its port. Raises ValueError."""
    if _ODD.search(text):
        raise ValueError(f"holds white space, a control character or a backslash; expected {expected}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{error}; expected {expected}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"expected {expected}")
    if not host:
        raise ValueError(f"names no host; expected {expected}")
    if why := blocked(host):
        raise ValueError(f"{host} is {why}, which is never connected to")
    return parts, host, port


def blocked(host: str) -> str:
    """Returns why an IP address is refused: link-local (clouds keep metadata services there) or unspecified; "" for any other host."""
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):  # an IPv4 address in disguise
        inside = address.ipv4_mapped or address.sixtofour
        if inside is None and (address in _NAT64 or (address.packed[:12] == bytes(12) and int(address) > 1)):
            inside = ipaddress.IPv4Address(address.packed[12:])
        address = inside or address
    if address.is_link_local:
        return "a link-local address"
    if address.is_unspecified or (isinstance(address, ipaddress.IPv4Address) and address in _THIS_NETWORK):
        return "an unspecified address"
    return ""
