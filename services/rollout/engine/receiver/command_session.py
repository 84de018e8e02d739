"""Receives commands to one rank's receiver: JSON lines over a Unix socket in a private directory, one connection each.

A command that needs the model is answered with ``{"queued": true}``, then with ``{"begun": true}`` and run by the caller of
`CommandSession.work`: the engine's scheduler, when SGLang calls the loader. All others run at once, on their connection's thread, even
while the scheduler is busy. The final answer is ``{"ok": true, …}`` or ``{"ok": false, "error": text, "touched": bool}``.
"""

import contextlib
import json
import logging
import queue
import socketserver
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.receiver.peer_transfer import send_to_peer
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver, said_by
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.failures import SupervisedThread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.digest import decoded_digests
from shared.transfer.weight_channel import TransferDeadline

log = logging.getLogger(__name__)

COMMAND_SECONDS = 30.0
"""The deadline of a command that names none."""

LINE_BYTES = 64 * 2**20
"""The longest command, enough to name every tensor of a model with 100,000 of them."""

ANSWER_MARGIN = 15.0
"""Seconds beyond a command's deadline after which the connection stops waiting for its answer."""

Fields = Mapping[str, Any]

# ------------------------------------------------------------------------------------------------------------- verbs


def receive(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Receives a push: ``version``, ``push``, ``channels``, ``check``."""
    check = bool(command.get("check", False))
    return receiver.receive(int(command["version"]), int(command["push"]), list(command["channels"]), deadline, check=check)


def join(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to join ``channels``; ``rank``: of the engine's first process, see `Receiver.join`; ``timeout``: for all of it."""
    addresses = [WeightChannelAddress.model_validate(address) for address in command["channels"]]
    receiver.join(addresses, int(command["rank"]), float(command["timeout"]))
    return {}


def leave(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Leaves all channels."""
    receiver.leave(free=True)
    return {}


def state(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Returns the engine's ``version`` and ``digest``, -1 and empty where they are unknown, and the ``channels`` that it is in."""
    return {"version": receiver.version, "digest": receiver.digest, "channels": receiver.channels}


def adopt(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Notes a load by other means: ``version``, ``tensors``: name → dtype, shape, digest. No tensors: the weights are unknown."""
    receiver.adopt(int(command["version"]), decoded_digests(command["tensors"]))
    return {"digest": receiver.digest}


Verb = Callable[[Receiver, Fields, TransferDeadline], dict[str, Any]]
"""A command's function: the receiver, the command, its deadline → the answer's fields. Raises MyxoError."""

AT_ONCE: dict[str, Verb] = {"join": join, "leave": leave, "state": state, "adopt": adopt, "send_to_peer": send_to_peer}
QUEUED: dict[str, Verb] = {"receive": receive}
"""Verbs by the thread that runs them: the one that owns the model, or the connection's own."""


# ----------------------------------------------------------------------------------------------------------- session


@dataclass(eq=False)
class _Command:
    fields: Fields
    verb: Verb
    deadline: TransferDeadline
    begun: threading.Event = field(default_factory=threading.Event)
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class CommandSession:
    """One rank's socket and queue.

    Args:
        directory: private to this engine and its service; the socket is ``rank-<r>.sock`` in it.
    """

    def __init__(self, directory: Path, receiver: Receiver) -> None:
        self.path, self.receiver = directory / f"rank-{receiver.rank}.sock", receiver
        self._queue: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._held: set[_Command] = set()  # queued or being done
        self._lock = threading.Lock()
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def open(self) -> None:
        """Listens, on a thread; returns once commands can come."""
        session = self

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller no longer waits for the answer
                    session._handle(self)

        opening = self.path.with_suffix(".opening")
        self._server = socketserver.ThreadingUnixStreamServer(str(opening), Connection)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        opening.rename(self.path)  # a client that sees the socket can connect
        SupervisedThread(self._server.serve_forever, "receiver", (0.5,)).start()

    def close(self) -> None:
        """Stops accepting commands, and leaves all channels."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._abort()
        self.receiver.leave()

    def work(self) -> bool:
        """Runs the next queued command on this thread. Returns whether there was one; never raises."""
        try:
            command = self._queue.get_nowait()
        except queue.Empty:
            return False
        if command.answer.set_running_or_notify_cancel():
            command.begun.set()
            command.answer.set_result(self._do(command))
        return True

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
            verb = AT_ONCE.get(name) or QUEUED.get(name)
            if verb is None:
                raise BadMessage(f"command {name!r}: not one of {', '.join(sorted({*AT_ONCE, *QUEUED, 'abort'}))}")
            command = _Command(fields, verb, TransferDeadline(float(fields.get("deadline", COMMAND_SECONDS))))
        except (MyxoError, ValueError, KeyError, TypeError) as error:
            say(_failed(error))
            return
        if name in AT_ONCE:
            say(self._do(command))
        else:
            self._wait_for(command, say)

    def _wait_for(self, command: _Command, say: Callable[[dict[str, Any]], None]) -> None:
        with self._lock:
            self._held.add(command)
        self._queue.put(command)
        try:
            say({"queued": True})
            if command.begun.wait(command.deadline.left + ANSWER_MARGIN) and not command.answer.cancelled():
                say({"begun": True})
            say(command.answer.result(command.deadline.left + ANSWER_MARGIN))
        except CancelledError:
            say({"ok": False, "error": "called off before it began", "touched": False})
        except TimeoutError:
            say({"ok": False, "error": "nobody has done this command: the engine was not asked to", "touched": command.answer.running()})
        finally:
            with self._lock:
                self._held.remove(command)
            command.deadline.abort()
            command.answer.cancel()  # if it is still queued, it is not run any more

    def _do(self, command: _Command) -> dict[str, Any]:
        try:
            command.deadline.check("its turn", "the engine")
            return {"ok": True, **command.verb(self.receiver, command.fields, command.deadline)}
        except Exception as error:
            if not isinstance(error, MyxoError):
                log.exception("command %r failed", command.fields.get("verb"))
            return _failed(error)

    def _abort(self) -> None:
        """Ends the running and the queued commands, and the joining of channels."""
        with self._lock:
            held = list(self._held)
        for command in held:
            command.deadline.abort()
            command.answer.cancel()  # does nothing to one that has begun
            command.begun.set()
        self.receiver.abort()


def _failed(error: BaseException) -> dict[str, Any]:
    return {"ok": False, "error": said_by(error), "touched": isinstance(error, ReceiveError) and error.touched}
