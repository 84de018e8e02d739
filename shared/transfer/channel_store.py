"""Stores for process groups and weight channels: torch's TCP store at its own address alone, and a store whose readers prove a secret.

Left to itself torch listens at all addresses of the machine, whatever host a store is given; whoever reaches its port can read, change and
remove what is in it. `BoundStore` belongs on loopback, or on an address that only the run's machines reach.

Beside a weight channel, named values are served by the channel's source, over TCP, to those who know the channel's secret. Both ends begin
by proving to each other, with fresh nonces, that they know it; it travels over the bus alone (`WeightChannelAddress`). Before that a
connection is read for `PROOF_SECONDS` at most, and nothing that it sends is interpreted. What follows is neither encrypted nor signed:
whoever sits on the way between two machines is not kept out, here no more than by NCCL or gloo.

Each request is a MessagePack list ``[verb, key, value]`` behind its length, each answer a value behind its length. A connection that asks
to ``follow`` is from then on sent what the source has to say (`StoreServer.broadcast`), in the same form.
"""

import contextlib
import datetime
import hmac
import importlib
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, Self

import msgpack
from torch.distributed import DistStoreError, HashStore, Store, TCPStore

from shared.runtime.addresses import HOST_VARIABLE
from shared.runtime.errors import ConfigError

MEETING_SECONDS = 300.0  # torch's own limit for the members of a group to meet in a store


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


NONCE_BYTES = PROOF_BYTES = 32
PROOF_SECONDS = 5.0  # the seconds that a new connection has for its proof
STRANGERS = 128  # the number of connections without a proof at any time; more are closed at once
LARGEST_BYTES = 256 * 1024**2  # the largest request or answer: the manifest of a model of many tensors has some megabytes
REQUEST_SECONDS = 5.0  # the seconds for an answer
WAIT_SECONDS = 60.0  # the seconds that torch waits for a value while it forms a process group
PATIENCE_S = 0.05  # the longest that the source keeps a request waiting for a value; other requests of the reader wait behind it
RETRY_S = 0.1  # the seconds between two attempts to connect, or to accept
_LENGTH = struct.Struct("<I")


class StoreServer:
    """Serves ``values`` at a free port of ``host`` until `close`. Raises ConfigError for an address that is not this machine's.

    Args:
        secret: hexadecimal digits.
    """

    def __init__(self, values: HashStore, host: str, secret: str) -> None:
        self._values, self._secret = values, bytes.fromhex(secret)
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._connections: set[socket.socket] = set()
        self._followers: set[socket.socket] = set()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError as error:
            expected = f"weights cannot be sent from there: {error.strerror or error}; expected an address of this machine"
            raise ConfigError(HOST_VARIABLE, host, expected) from None
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._accept, name=f"store-{self.port}", daemon=True).start()

    def close(self) -> None:
        """Ends the listening and all connections."""
        self._closed = True
        for one in [self._listener, *self._connections.copy()]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it

    @property
    def followers(self) -> int:
        """Returns how many connections follow."""
        return len(self._followers)

    def broadcast(self, said: Any) -> None:
        """Sends something to all followers, without waiting: one that has not taken what came before is cut off.

        Args:
            said: what MessagePack can hold, a few bytes.
        """
        content = msgpack.packb(said)
        for follower in self._followers.copy():
            try:
                if follower.send(_framed(content), socket.MSG_DONTWAIT) < _LENGTH.size + len(content):
                    raise BlockingIOError
            except OSError:
                self._followers.discard(follower)
                with contextlib.suppress(OSError):
                    follower.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # closed, the other end has gone already, or this process has no descriptor left
                    time.sleep(RETRY_S)
                    continue
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name=f"store-{self.port}-reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError), connection:
            try:
                known = self._proved(connection)
            finally:
                self._strangers.release()
            while known and not self._closed:
                verb, key, value = msgpack.unpackb(_receive(connection))
                if verb == "follow":
                    self._followers.add(connection)
                    continue
                _send(connection, msgpack.packb(self._answer(verb, key, value)))
        self._followers.discard(connection)
        self._connections.discard(connection)

    def _proved(self, connection: socket.socket) -> bool:
        """Returns whether the other end knows the secret; if so, proves to it that this end does."""
        connection.settimeout(PROOF_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        answer = _exactly(connection, NONCE_BYTES + PROOF_BYTES, time.monotonic() + PROOF_SECONDS)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(self._secret, b"reader", nonces)):
            return False
        connection.sendall(_proof(self._secret, b"source", nonces))
        connection.settimeout(None)  # a reader is silent between pushes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return True

    def _answer(self, verb: str, key: Any, value: Any) -> Any:
        values = self._values
        match verb:
            case "get":
                return values.get(key) if values.check([key]) else None
            case "set":
                return values.set(key, value)
            case "add":
                return values.add(key, value)
            case "wait":
                return self._there(key, value)
        raise ValueError(f"no verb {verb!r}")

    def _there(self, keys: list[str], seconds: float) -> bool:
        """Returns whether all the keys are there, as soon as they are."""
        if not seconds:
            return bool(self._values.check(keys))
        try:
            self._values.wait(keys, datetime.timedelta(seconds=min(seconds, PATIENCE_S)))
        except DistStoreError:
            return False
        return True


class RemoteStore(Store):
    """A reader's end, as a store that torch can form process groups over. Any thread may use it.

    The constructor and all methods raise RuntimeError where the source cannot be reached, or does not know the secret; the store is then of
    no more use.

    Args:
        seconds: to connect, with as many attempts as it takes.
    """

    def __init__(self, host: str, port: int, secret: str, seconds: float) -> None:
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=WAIT_SECONDS))
        self._name = f"the store at {host}:{port}"
        self._asking = threading.Lock()
        self._owed = 0  # answers that have not been read yet
        end = time.monotonic() + seconds
        while True:
            try:
                self._connection = _connected(host, port, bytes.fromhex(secret), end)
                return
            except (OSError, EOFError, ValueError) as error:
                if time.monotonic() + RETRY_S >= end:
                    raise RuntimeError(f"{self._name} cannot be used: {error}") from error
            time.sleep(RETRY_S)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def post(self, key: str, value: str | bytes) -> None:
        """Sets a value without waiting for the answer, which the next request reads. Raises RuntimeError, too, while one is under way."""
        if not self._asking.acquire(blocking=False):
            raise RuntimeError(f"{self._name} is being asked something else")
        try:
            self._read_owed()
            _send(self._connection, msgpack.packb(["set", key, value]))
            self._owed += 1
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise RuntimeError(f"{self._name} cannot be reached: {error}") from error
        finally:
            self._asking.release()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key, None))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: list[str], patience_s: float = 0.0) -> bool:
        """Returns whether all the keys are there. ``patience_s``: how long they may take to come, `PATIENCE_S` at most."""
        return bool(self._ask("wait", keys, patience_s))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Returns once all the keys are there."""
        seconds = WAIT_SECONDS if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        while not self.check(keys, PATIENCE_S):
            if time.monotonic() >= end:
                raise RuntimeError(f"{self._name} had no {', '.join(keys)} within {seconds:g} s")

    def clone(self) -> Self:
        """Returns a store for another thread of torch's: this one, which any thread may use."""
        return self

    def close(self) -> None:
        """Ends the connection; a request that waits for its answer fails."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read_owed(self) -> None:
        while self._owed:
            _receive(self._connection)
            self._owed -= 1

    def _ask(self, verb: str, key: str | list[str], value: Any) -> Any:
        try:
            with self._asking:
                _send(self._connection, msgpack.packb([verb, key, value]))
                self._read_owed()
                return msgpack.unpackb(_receive(self._connection))
        except (OSError, EOFError, ValueError) as error:
            self.close()  # a late answer would be taken for the next one
            raise RuntimeError(f"{self._name} does not answer: {error}") from error


class StoreFollower:
    """A reader's connection over which the source speaks. The constructor raises RuntimeError, as `RemoteStore`."""

    def __init__(self, host: str, port: int, secret: str, seconds: float) -> None:
        try:
            self._connection = _connected(host, port, bytes.fromhex(secret), time.monotonic() + seconds)
            _send(self._connection, msgpack.packb(["follow", None, None]))
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, EOFError, ValueError) as error:
            raise RuntimeError(f"the store at {host}:{port} cannot be followed: {error}") from error

    def heard(self, seconds: float | None) -> Any:
        """Returns what the source says next; None once one of the two has hung up. Raises TimeoutError after ``seconds``; None: never."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1000):
            raise TimeoutError
        try:
            return msgpack.unpackb(_receive(self._connection))
        except (OSError, EOFError, ValueError):
            return None

    def close(self) -> None:
        """Hangs up; `heard` returns."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _connected(host: str, port: int, secret: bytes, end: float) -> socket.socket:
    """Returns a connection over which both ends have proved that they know the secret."""
    connection = socket.create_connection((host, port), timeout=max(RETRY_S, end - time.monotonic()))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonces = _exactly(connection, NONCE_BYTES, end) + (own := secrets.token_bytes(NONCE_BYTES))
        connection.sendall(own + _proof(secret, b"reader", nonces))
        if not hmac.compare_digest(_exactly(connection, PROOF_BYTES, end), _proof(secret, b"source", nonces)):
            raise ValueError("it does not know the channel's secret")
        connection.settimeout(REQUEST_SECONDS)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_framed(content))


def _framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > LARGEST_BYTES:
        raise ValueError(f"a message of {length} bytes; {LARGEST_BYTES} are the most")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    """Returns the next ``count`` bytes. ``end``: the monotonic time by which all are to be there; None: the socket has a limit."""
    parts = bytearray()
    while len(parts) < count:
        if end is not None:
            connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)
