"""Has an engine's HTTP server listen where nobody else comes; the launchers apply it before SGLang starts.

SGLang's server loads weights and unpickles on some of its endpoints, tells its keys on others, and logs them when it starts. So it gets no
key and no port: it listens on a Unix socket in the engine's private directory, as the receivers of weights do.
"""

import functools
import os
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "MYXO_RECEIVER"
"""The variable that names the engine's private directory."""

ADDRESS_VARIABLE = "MYXO_ENGINE_ADDRESS"
"""The variable that names this node's address, where the engine has ranks on several nodes."""

SOCKET = "http.sock"
"""The name of the HTTP server's socket in it."""


def serve_on_socket() -> None:
    """Has every server that uvicorn starts in this process listen on the socket alone; does nothing in a process that is no engine's."""
    import uvicorn

    if (directory := os.environ.get(DIRECTORY_VARIABLE)) is None:
        return
    path, initialise = str(Path(directory, SOCKET)), uvicorn.Config.__init__

    @functools.wraps(initialise)
    def on_socket(config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        initialise(config, *arguments, **options | {"uds": path})

    uvicorn.Config.__init__ = on_socket  # type: ignore[method-assign,assignment]


def leave_out_own_requests(http_server: Any) -> None:
    """Has SGLang's ``http_server`` send itself no request over a port that it has not: the service does that."""
    http_server._freeze_gc_after_server_warmup = lambda _arguments: None
