"""The address by which other machines of a run reach this process. This is the only place that decides it.

The rule, first match: ``MYXO_HOST`` (a name or an address), resolved; else the local address from which NATS is reached, that is
loopback where NATS is on this machine and the address of the right interface where it is not; else loopback. A process that reaches NATS
over loopback, but has to be reached from other machines, needs ``MYXO_HOST``.
"""

import array
import contextlib
import os
import socket
import struct
import sys
from urllib.parse import urlsplit

from shared.runtime.errors import ConfigError
from shared.runtime.server_urls import nats_url

HOST_VARIABLE = "MYXO_HOST"
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"

PRIVATE = "private"
"""In the place of an address to listen at: `own_address`, of whatever networks the process is on."""

_SIOCGIFCONF, _INTERFACES, _ENTRY_BYTES = 0x8912, 1024, 40
"""The request, the most addresses that it is asked for, and the bytes of each answer: a name of 16, a socket address."""

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
"""The interface of that address, by which gloo and NCCL know it."""


def own_address() -> str:
    """Returns an IPv4 address. Raises ConfigError for a ``MYXO_HOST`` that does not resolve, or means all addresses."""
    host = os.environ.get(HOST_VARIABLE)
    if not host:
        return _outgoing_address((nats_url() or "").split(",")[0])
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
            told = fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, struct.pack("iL", len(entries), entries.buffer_info()[0]))
        except OSError as error:
            raise ConfigError(HOST_VARIABLE, address, f"this system does not say which interface has it ({error})") from None
    content = entries.tobytes()[: struct.unpack("iL", told)[0]]
    for begin in range(0, len(content), _ENTRY_BYTES):
        entry = content[begin : begin + _ENTRY_BYTES]
        if socket.inet_ntoa(entry[20:24]) == address:
            return entry[:16].split(b"\0")[0].decode().split(":")[0]  # a second address has a label: eth0:1
    raise ConfigError(
        HOST_VARIABLE, address, "no interface of this machine has it; expected the address by which other machines reach this one"
    )


def _outgoing_address(url: str) -> str:
    with contextlib.suppress(ValueError):  # no URL
        return address_towards(urlsplit(url).hostname or LOOPBACK)
    return LOOPBACK
