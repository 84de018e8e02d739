"""Keeps what an engine's processes listen on out of reach of others; the launchers apply it before SGLang is imported.

SGLang's HTTP server loads weights and unpickles on some of its endpoints, tells its keys on others, and logs them when it starts. So it
gets no key and no port: it listens on a Unix socket in the engine's private directory, as the receivers of weights do. The store by which
the engine's ranks find each other would listen on all interfaces: it is given a socket on the address that its clients use.
"""

import functools
import os
import socket
import sys
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "MYXO_RECEIVER"
"""The variable that names the engine's private directory."""

SOCKET = "http.sock"
"""The name of the HTTP server's socket in it."""


def apply() -> None:
    """Has this process's HTTP servers and stores listen in private. Does nothing in a process that is no engine's."""
    if (directory := os.environ.get(DIRECTORY_VARIABLE)) is not None:
        _serve_on(Path(directory, SOCKET))
        _bind_stores()


def leave_out_own_requests() -> None:
    """Has SGLang's server send itself no request over a port that it does not have. What it would ask for, the rollout service does."""
    from sglang.srt.entrypoints import http_server

    http_server._freeze_gc_after_server_warmup = lambda _arguments: None


def _serve_on(path: Path) -> None:
    import uvicorn

    initialise = uvicorn.Config.__init__

    @functools.wraps(initialise)
    def on_socket(config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        initialise(config, *arguments, **options | {"uds": str(path)})

    uvicorn.Config.__init__ = on_socket  # type: ignore[method-assign,assignment]


def _bind_stores() -> None:
    import torch.distributed

    rendezvous = sys.modules["torch.distributed.rendezvous"]  # as an attribute, that name is a function
    store: Any = torch.distributed.TCPStore

    def bound(host_name: str, port: int, is_master: bool = False, **options: Any) -> Any:
        if is_master:
            listener = socket.create_server((host_name, port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        return store(host_name=host_name, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = bound  # type: ignore[attr-defined]
