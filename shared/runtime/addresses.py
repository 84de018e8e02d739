"""Addresses: of the servers, of this process for other machines, of its HTTP endpoint; and the rank of its node."""

import array
import contextlib
import ipaddress
import os
import secrets
import socket
import ssl
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from shared.runtime.errors import ConfigError

# The variables with the address of a service's own metrics, and with that of a gateway's API, which wins over the run's
HTTP_VARIABLE, GATEWAY_VARIABLE = "MYXO_HTTP", "MYXO_GATEWAY"

LAST_PORT = 65535


class HttpAddress(NamedTuple):
    """``host``: a name or an address, IPv6 without brackets, or ``private``: `shared.runtime.addresses`. ``port``: 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def next(self, count: int, field: str = HTTP_VARIABLE) -> "HttpAddress":
        """Returns the address ``count`` ports further on. ``field``: where it stands. Raises ConfigError where there are not so many."""
        if self.port + count > LAST_PORT:
            raise ConfigError(field, str(self), f"a port with room for {count} more services up to {LAST_PORT}, or 0: free ones")
        return HttpAddress(self.host, self.port + count if self.port else 0)

    @property
    def wildcard(self) -> bool:
        """Whether it means all addresses of the machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def chosen_by() -> str:
    """Returns the name of what chooses this process's address, for errors."""
    return HTTP_VARIABLE if os.environ.get(HTTP_VARIABLE) else "monitoring.http_host"


def parsed(text: str, field: str = HTTP_VARIABLE) -> HttpAddress:
    """Returns the address in a text. ``field``: where it stands. Raises ConfigError where it is none."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > LAST_PORT:
        raise ConfigError(field, text, "host:port, such as 127.0.0.1:9464; port 0: any free one")
    return HttpAddress(host, int(port))


def http_address(host: str) -> HttpAddress:
    """Returns this process's address. ``host``: the run's, for where the environment says nothing. Raises ConfigError."""
    given = os.environ.get(HTTP_VARIABLE)
    return parsed(given) if given else HttpAddress(host, 0)


CA_VARIABLE = "MYXO_CA_FILE"

ROUTER_KEY = "MYXO_ROUTER_KEY"  # The variable of the key to a router's control plane
CONSOLE_TOKEN = "MYXO_CONSOLE_TOKEN"  # The variable of the token that opens the console
CONSOLE_TOKEN_BYTES = 32


def nats_url() -> str | None:
    """Returns ``NATS_URL``, or what is in the file of ``NATS_URL_FILE``; None where neither is set. Raises ConfigError."""
    return _given("NATS_URL")


def redis_url() -> str | None:
    """Returns the same for ``REDIS_URL``. Raises ConfigError."""
    return _given("REDIS_URL")


def router_key() -> str | None:
    """Returns the same for ``MYXO_ROUTER_KEY``. Raises ConfigError."""
    return _given(ROUTER_KEY)


def console_token() -> str | None:
    """Returns the same for ``MYXO_CONSOLE_TOKEN``. Raises ConfigError."""
    return _given(CONSOLE_TOKEN)


def new_console_token() -> str:
    """Returns a random token for a console."""
    return secrets.token_urlsafe(CONSOLE_TOKEN_BYTES)


def _given(variable: str) -> str | None:
    text, name = os.environ.get(variable), f"{variable}_FILE"
    if text or not (path := os.environ.get(name)):
        return text or None
    try:
        content = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(name, path, f"{reason}; expected a file with the value") from error
    if not content:
        raise ConfigError(name, path, "the file is empty; expected the value in it")
    return content


def authorities() -> str | None:
    """Returns the file of ``MYXO_CA_FILE``; None where it is not set and the system's authorities hold. Raises ConfigError."""
    if path := os.environ.get(CA_VARIABLE):
        trusted(path)
    return path or None


def trusted(path: str | None) -> ssl.SSLContext:
    """Returns a TLS context that trusts the certificates of a file (None: the system's) and checks host names. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(CA_VARIABLE, path, f"{error.strerror or error}; expected a file of PEM certificates") from error


def has_credentials(url: str) -> bool:
    """Returns whether a URL carries a user or a password."""
    parts = urlsplit(url)
    return parts.username is not None or parts.password is not None or bool({"username", "password"} & parse_qs(parts.query).keys())


def still_there(url: str | None) -> str | None:
    """Returns the URL of a store; None for a socket that is gone with the run that had it."""
    return None if url is None or (url.startswith("unix:") and not Path(urlsplit(url).path).is_socket()) else url


HOST_VARIABLE = "MYXO_HOST"
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"

PRIVATE = "private"  # In the place of an address to listen at: `own_address`, of whatever networks the process is on

# The request, the most addresses that it is asked for, and the bytes of each answer: a name of 16, a socket address
_SIOCGIFCONF, _INTERFACES, _ENTRY_BYTES = 0x8912, 1024, 40

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"  # The interface of that address, by which gloo and NCCL know it


def own_address() -> str:
    """Returns an IPv4 address. Raises ConfigError for a ``MYXO_HOST`` that does not resolve, or means all addresses."""
    host = os.environ.get(HOST_VARIABLE)
    if not host:
        with contextlib.suppress(ValueError):  # no URL
            return address_towards(urlsplit((nats_url() or "").split(",")[0]).hostname or LOOPBACK)
        return LOOPBACK
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            HOST_VARIABLE, host, f"does not resolve ({error.strerror or error}); expected this machine's name or address"
        ) from None
    if address == EVERYWHERE:  # no other machine finds it there, and stores would listen on all interfaces
        raise ConfigError(HOST_VARIABLE, host, "means all addresses; expected the one by which other machines reach this one")
    return address


def address_towards(host: str) -> str:
    """Returns the local address of the route to a host. Connecting a UDP socket chooses the route and sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such name, no route
        return LOOPBACK


def listening_interfaces(*, across_machines: bool = False) -> dict[str, str]:
    """Returns the variables that tell gloo and NCCL where ranks listen for each other; what is set already stays.

    Left to themselves gloo takes the address that the host's name means, NCCL the first interface that is not loopback. NCCL has one choice
    for all groups of a process, and carries weights, too: where other machines reach this process, the choice is left to NCCL.

    Args:
        across_machines: ranks are on several machines; else they are all on this one.

    Raises ConfigError.
    """
    address = own_address()
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if address == LOOPBACK else ("GLOO_SOCKET_IFNAME",)
    interface = interface_of(address) if across_machines else LOOPBACK_INTERFACE
    return {name: os.environ.get(name, interface) for name in names}


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an IPv4 address, on Linux (``SIOCGIFCONF``, netdevice(7)). Raises ConfigError."""
    import fcntl

    entries = array.array("B", bytes(_INTERFACES * _ENTRY_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            reported = fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, struct.pack("iL", len(entries), entries.buffer_info()[0]))
        except OSError as error:
            raise ConfigError(HOST_VARIABLE, address, f"this system does not say which interface has it ({error})") from None
    content = entries.tobytes()[: struct.unpack("iL", reported)[0]]
    for begin in range(0, len(content), _ENTRY_BYTES):
        entry = content[begin : begin + _ENTRY_BYTES]
        if socket.inet_ntoa(entry[20:24]) == address:
            return entry[:16].split(b"\0")[0].decode().split(":")[0]  # a second address has a label: eth0:1
    raise ConfigError(
        HOST_VARIABLE, address, "no interface of this machine has it; expected the address by which other machines reach this one"
    )


NODE_RANK = "MYXO_NODE_RANK"

# Where the rank stands, first match: given by hand, by SLURM (one task a node), by an indexed Job or a LeaderWorkerSet of Kubernetes
RANK_VARIABLES = (NODE_RANK, "SLURM_NODEID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX")


def node_rank(nodes: int, environment: Mapping[str, str] = os.environ, *, of: str = "the trainer") -> int:
    """Returns this node's rank, 0 to ``nodes`` - 1; ``of``: whose nodes. Raises ConfigError that names the variable."""
    for variable in RANK_VARIABLES:
        if given := environment.get(variable, "").strip():
            if not given.isdecimal() or int(given) >= nodes:
                raise ConfigError(variable, given, f"the rank of this node, 0 to {nodes - 1}: {of} has {nodes} nodes")
            return int(given)
    expected = f"the rank of this node, 0 to {nodes - 1}, in the environment of each of {of}'s {nodes} nodes"
    raise ConfigError(NODE_RANK, None, f"{expected} (or {', '.join(RANK_VARIABLES[1:])})")
