"""Closes an engine to all but its own service and processes; the launchers apply it before SGLang starts.

SGLang's server loads weights and unpickles on some of its endpoints, shows its keys on others, and logs them when it starts. So it gets no
key and no port: it listens on a Unix socket in the engine's private directory, as the receivers of weights do.

With data-parallel attention SGLang's processes send each other pickled objects over ZeroMQ sockets at TCP ports, also between nodes, and
whoever reaches a port could have anything unpickled. ZeroMQ's CURVE (RFC 26) admits only who knows the server's public key. Here that key
is made of a secret which the engine's nodes alone know; what passes is encrypted, too. Sockets of other kinds (ipc, inproc) stay as they
are.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "MYXO_RECEIVER"  # the variable that names the engine's private directory
ADDRESS_VARIABLE = "MYXO_ENGINE_ADDRESS"  # the variable that names this node's address, where the engine has ranks on several nodes
SOCKET = "http.sock"  # the name of the HTTP server's socket in it


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


SECRET_VARIABLE = "MYXO_ENGINE_SECRET"  # the variable with the secret, the same in all processes of the engine, on all of its nodes


def close_sockets() -> None:
    """Has every socket that this process opens at a TCP address speak CURVE; does nothing in a process without a secret."""
    if not (secret := os.environ.get(SECRET_VARIABLE)):
        return
    import zmq

    public, private = keys_of(secret)

    def guarded(name: str, server: bool) -> Callable[..., Any]:
        plain = getattr(zmq.Socket, name)

        @functools.wraps(plain)
        def with_keys(socket: Any, address: str, *arguments: Any, **options: Any) -> Any:
            if address.startswith("tcp://") and socket.type != zmq.PUB:  # which takes nothing, and is for others (--kv-events-config)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, private)
                socket.setsockopt(zmq.CURVE_SERVER, server)
                if not server:
                    socket.setsockopt(zmq.CURVE_SERVERKEY, public)
            return plain(socket, address, *arguments, **options)

        return with_keys

    for name, server in (("bind", True), ("connect", False)):
        setattr(zmq.Socket, name, guarded(name, server))


def keys_of(secret: str) -> tuple[bytes, bytes]:
    """Returns the public and the private key of a secret, each as 40 characters of Z85."""
    import zmq
    from zmq.utils import z85

    private = z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=b"myxo engine").digest())
    return zmq.curve_public(private), private
