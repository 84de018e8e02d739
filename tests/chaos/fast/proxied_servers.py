"""The launcher's embedded servers, with a proxy between them and everybody else (`link_proxy`)."""

from pathlib import Path
from typing import Any

from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from tests.chaos.link_proxy import ProxiedAddresses


def proxied(addresses: ProxiedAddresses) -> tuple[type[EmbeddedNats], type[EmbeddedValkey]]:
    """Returns the classes of servers that listen at their own addresses, and tell clients the proxies'."""

    class ProxiedNats(EmbeddedNats):
        def __init__(self, directory: Path, *arguments: Any, **named: Any) -> None:
            super().__init__(directory, *arguments, **named)
            self._known = True  # the proxy knows it
            clients = f":{addresses.nats_port}"
            self.url, self.guest_url = (url.replace(f":{self.port}", clients) for url in (self.url, self.guest_url))
            self.port = addresses.own_nats_port
            self.address = ("127.0.0.1", self.port)

    class ProxiedValkey(EmbeddedValkey):
        def __init__(self, directory: Path, *arguments: Any, **named: Any) -> None:
            super().__init__(directory, *arguments, **named)
            clients, own = addresses.valkey_path, Path(addresses.own_valkey_path)
            self.url, self.guest_url = (url.replace(str(self.address), clients) for url in (self.url, self.guest_url))
            self.address, self._socket_directory = str(own), own.parent

    return ProxiedNats, ProxiedValkey
