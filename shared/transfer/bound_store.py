"""torch's TCP store, listening at its own address alone.

Left to itself torch listens at all addresses of the machine, whatever host a store is given. Whoever reaches a store can read, change and
remove what is in it, so that it belongs on loopback, or on an address that only the run's machines reach.
"""

import datetime
import importlib
import socket
from typing import Any

from torch.distributed import TCPStore

MEETING_SECONDS = 300.0
"""torch's own limit for the members of a group to meet in a store."""


class BoundStore(TCPStore):
    """Arguments are those of ``TCPStore``; port 0: any free one. Raises OSError where the address is not this machine's, or is taken."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: datetime.timedelta = datetime.timedelta(seconds=MEETING_SECONDS),
        **options: Any,
    ) -> None:
        if is_master:
            listener = socket.create_server((host_name, port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, timeout, **options)


def bind_stores() -> None:
    """Makes every store that torch opens in this process, or that a library opens by its name, a `BoundStore`."""
    for module in ("torch.distributed", "torch.distributed.rendezvous"):  # by name: the attribute `rendezvous` is a function
        vars(importlib.import_module(module))["TCPStore"] = BoundStore
