"""The address by which other machines of a run reach this process. This is the only place that decides it.

The rule, first match: ``MYXO_HOST`` (a name or an address), resolved; else the local address from which NATS is reached, that is
loopback where NATS is on this machine and the address of the right interface where it is not; else loopback. A process that reaches NATS
over loopback, but has to be reached from other machines, needs ``MYXO_HOST``.
"""

import os
import socket
from urllib.parse import urlsplit

from shared.runtime.errors import ConfigError
from shared.runtime.server_urls import nats_url

HOST_VARIABLE = "MYXO_HOST"
LOOPBACK = "127.0.0.1"


def own_address() -> str:
    """Returns an IPv4 address. Raises ConfigError for a ``MYXO_HOST`` that does not resolve."""
    host = os.environ.get(HOST_VARIABLE)
    if not host:
        return _outgoing_address((nats_url() or "").split(",")[0])
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            HOST_VARIABLE, host, f"does not resolve ({error.strerror or error}); expected this machine's name or address"
        ) from None


def _outgoing_address(url: str) -> str:
    """Returns the local address of the route to a server. Connecting a UDP socket chooses the route and sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(url).hostname or LOOPBACK, 9))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # no such name, no route, no URL
        return LOOPBACK
