"""Closes an engine's ZeroMQ sockets at TCP ports to all but the engine's own processes; the launchers apply it before SGLang starts.

With data-parallel attention SGLang's processes send each other pickled objects over such sockets, also between nodes, and whoever reaches
a port could have anything unpickled. ZeroMQ's CURVE (RFC 26) lets nobody in who does not know the server's public key. Here that key is
made of a secret which the engine's nodes alone know, so that it is none to others; what passes is encrypted, too. Sockets of other kinds
(ipc, inproc) stay as they are.
"""

import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

SECRET_VARIABLE = "MYXO_ENGINE_SECRET"
"""The variable with the secret, the same in all processes of the engine, on all of its nodes."""


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
