"""The address of a service's ``/healthz`` and ``/metrics``: the environment's ``MYXO_HTTP``, else the run's, at any free port."""

import ipaddress
import os
from typing import NamedTuple

from shared.runtime.errors import ConfigError

HTTP_VARIABLE, GATEWAY_VARIABLE = "MYXO_HTTP", "MYXO_GATEWAY"
"""The variables with the address of a service's own metrics, and with that of a gateway's API, which wins over the run's."""

LAST_PORT = 65535


class HttpAddress(NamedTuple):
    """``host``: a name or an address, IPv6 without brackets, or ``private``: `shared.runtime.own_address`. ``port``: 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def next(self, count: int) -> "HttpAddress":
        """Returns the address ``count`` ports further on. Raises ConfigError where there are not so many."""
        if self.port + count > LAST_PORT:
            raise ConfigError(HTTP_VARIABLE, str(self), f"a port with room for {count} more services up to {LAST_PORT}, or 0: free ones")
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
