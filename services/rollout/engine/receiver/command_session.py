"""Orders to one rank's receiver: JSON lines over a Unix socket in a private directory, one connection each.

An order that needs the model waits in a queue, says ``{"queued": true}``, and is done by whoever calls `CommandSession.work`: the engine's
scheduler, when SGLang calls `load`. All others are done at once, on their connection's thread, whatever the scheduler is at. The answer
is ``{"ok": true, …}`` or ``{"ok": false, "error": text, "touched": bool}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socketserver
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.receiver.channel_receiver import ReceiveDeadline
from services.rollout.engine.receiver.peer_transfer import receive_from_peer, send_to_peer
from services.rollout.engine.receiver.receiver import Received, ReceiveError, Receiver, Verb
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.failures import SupervisedThread
from shared.schema.messages import WeightChannelAddress
from shared.transfer.digest import TensorDigest

log = logging.getLogger(__name__)

ORDER_SECONDS = 30.0
"""Deadline of an order that names none."""

LINE_BYTES = 64 * 2**20
"""The longest order: what names every tensor of a model with 100,000 of them."""

ANSWER_MARGIN = 15.0
"""Seconds beyond an order's deadline after which nobody will have done it."""


def socket_path(directory: Path, rank: int) -> Path:
    """Where a rank listens."""
    return directory / f"rank-{rank}.sock"


# ------------------------------------------------------------------------------------------------------------- verbs


def receive(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Takes a push: ``version``, ``push``, ``channels``, ``check``."""
    check = bool(order.get("check", False))
    got: Received = receiver.receive(int(order["version"]), int(order["push"]), list(order["channels"]), watch, check=check)
    return {"digest": got.digest, "bytes": got.bytes, "seconds": got.seconds, "differences": got.differences}


def join(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Begins to join ``channels``; ``rank``: of the engine's first process; ``timeout``: for all of it."""
    channels = [WeightChannelAddress.model_validate(channel) for channel in order["channels"]]
    receiver.join(channels, int(order["rank"]), float(order["timeout"]))
    return {}


def leave(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    receiver.leave()
    return {}


def state(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """What the engine holds: ``version`` and ``digest``, -1 and empty where that is not known, and the ``channels`` that it is in."""
    return {"version": receiver.version, "digest": receiver.digest, "channels": receiver.channels}


def adopt(receiver: Receiver, order: Mapping[str, Any], watch: ReceiveDeadline) -> dict[str, Any]:
    """Says what was loaded by other means: ``version``, ``tensors``: name → dtype, shape, digest. No tensors: nothing is known."""
    tensors = {name: TensorDigest(dtype, tuple(shape), int(found)) for name, (dtype, shape, found) in order["tensors"].items()}
    receiver.adopt(int(order["version"]), tensors)
    return {"digest": receiver.digest}


AT_ONCE: dict[str, Verb] = {"join": join, "leave": leave, "state": state, "adopt": adopt, "send_to_peer": send_to_peer}
QUEUED: dict[str, Verb] = {"receive": receive, "receive_from_peer": receive_from_peer}
"""Verbs by who does them: the connection's thread, or the thread that owns the model."""


def _verb(name: str) -> tuple[Verb, bool]:
    """What does the order, and whether it needs the model. Raises BadMessage."""
    if name in QUEUED:
        return QUEUED[name], True
    if name in AT_ONCE:
        return AT_ONCE[name], False
    raise BadMessage(f"order {name!r}: not one of {', '.join(sorted({*AT_ONCE, *QUEUED, 'abort'}))}")


# ----------------------------------------------------------------------------------------------------------- session


@dataclass
class _Order:
    fields: Mapping[str, Any]
    verb: Verb
    watch: ReceiveDeadline
    answer: dict[str, Any] = field(default_factory=dict)
    begun: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class CommandSession:
    """One rank's socket and queue.

    Args:
        directory: private to this engine and its service. rank: in the engine's tensor parallelism. receiver: None where `serve` makes it.
    """

    def __init__(self, directory: Path, rank: int, receiver: Receiver | None = None) -> None:
        self.directory, self.rank, self.receiver = directory, rank, receiver
        self.stopping = threading.Event()
        self._queue: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._held: list[_Order] = []  # queued or being done
        self._lock = threading.Lock()
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def open(self) -> None:
        """Listens, on a thread; returns once orders can come."""
        session = self

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for the answer any more
                    session._handle(self)

        path = socket_path(self.directory, self.rank)
        opening = path.with_suffix(".opening")
        self._server = socketserver.ThreadingUnixStreamServer(str(opening), Connection)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        opening.rename(path)  # who sees it can connect
        SupervisedThread(self._server.serve_forever, "receiver", (0.5,)).start()

    def close(self) -> None:
        """Hears of no more orders, and leaves all channels."""
        self.stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._abort()
        if self.receiver is not None:
            self.receiver.leave()

    def work(self, wait: float = 0.0) -> bool:
        """Does the next queued order, on this thread. ``wait``: seconds to wait for one. Returns whether there was one; never raises."""
        try:
            order = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
        except queue.Empty:
            return False
        order.begun = True
        order.answer = self._done(order)
        order.done.set()
        return True

    def serve(self, model: Any, device: str = "cpu", model_path: str | None = None) -> None:
        """What an engine does, in a plain process: opens the socket and does what comes, until ``stopping`` is set."""
        self.receiver = Receiver(model, self.rank, device, model_path)
        self.open()
        try:
            while not self.stopping.is_set():
                self.work(wait=0.1)
        finally:
            self.close()

    # ---------------------------------------------------------------------------------------------------- connections

    def _handle(self, connection: socketserver.StreamRequestHandler) -> None:
        def say(answer: dict[str, Any]) -> None:
            connection.wfile.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")

        try:
            fields = json.loads(connection.rfile.readline(LINE_BYTES))
            name = str(fields["verb"])
            if name == "abort":
                self._abort()
                say({"ok": True})
                return
            verb, queued = _verb(name)
            watch = ReceiveDeadline(float(fields.get("deadline", ORDER_SECONDS)))
        except (MyxoError, ValueError, KeyError, TypeError, ImportError) as error:
            say(_failed(error))
            return
        order = _Order(fields, verb, watch)
        if not queued:
            say(self._done(order))
            return
        with self._lock:
            self._held.append(order)
        self._queue.put(order)
        say({"queued": True})
        try:
            end = time.monotonic() + watch.left + ANSWER_MARGIN
            while not order.done.wait(0.5) and time.monotonic() < end:
                pass
            late = {"ok": False, "error": "nobody has done this order: the engine was not asked to", "touched": order.begun}
            say(order.answer if order.done.is_set() else late)
        finally:
            with self._lock:
                self._held.remove(order)
            order.watch.abort()  # should it still be queued, it is not done any more

    def _done(self, order: _Order) -> dict[str, Any]:
        assert self.receiver is not None  # given, or made by serve
        try:
            order.watch.look("its turn", "the engine")
            return {"ok": True, **order.verb(self.receiver, order.fields, order.watch)}
        except Exception as error:
            if not isinstance(error, MyxoError):
                log.exception("order %r failed", order.fields.get("verb"))
            return _failed(error)

    def _abort(self) -> None:
        """Ends what is under way or waits, and the joining of channels."""
        with self._lock:
            held = list(self._held)
        for order in held:
            order.watch.abort()
            if not order.begun:
                order.answer = {"ok": False, "error": "called off before it began", "touched": False}
                order.done.set()
        if self.receiver is not None:
            self.receiver.abort()


def _failed(error: BaseException) -> dict[str, Any]:
    reason = str(error) if isinstance(error, MyxoError) else f"{type(error).__name__}: {error}"
    return {"ok": False, "error": reason, "touched": isinstance(error, ReceiveError) and error.touched}
