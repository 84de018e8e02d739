"""Receives commands to one rank's receiver: JSON lines over a Unix socket in a private directory, one connection each.

A command that needs the model is answered with ``{"queued": true}``, and begun on its connection's thread as far as that can be. Then it is
answered with ``{"begun": true}`` and run by the caller of `CommandSession.work`: the engine's scheduler, when SGLang calls the loader. All
others run at once, on their connection's thread, even while the scheduler is busy. The final answer is ``{"ok": true, …}`` or ``{"ok":
false, "error": text, "touched": bool}``.

An idle scheduler spins, and every call of another thread that lets go of the interpreter waits a tenth of a millisecond to have it back:
beginning a push makes thirty of them. `SchedulerGate` has the scheduler wait meanwhile, for `CLOSED_SECONDS` at most.
"""

import contextlib
import functools
import json
import logging
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.rollout.engine.receiver.peer_transfer import send_to_peer
from services.rollout.engine.receiver.receiver import ReceiveError, Receiver, Reception, said_by
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.tasks import SupervisedThread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.digest import decoded_digests
from shared.transfer.weight_channel import TransferDeadline

CLOSED_SECONDS = 0.005  # the longest that the gate stays closed, whatever the other thread does


class SchedulerGate:
    """One scheduler's gate. Any thread may close it; it opens once no one keeps it closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._until = 0.0
        self._closing, self._closed_by = threading.Lock(), 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps the gate closed in the body, or for `CLOSED_SECONDS`."""
        with self._closing:
            self._closed_by += 1
            self._until = time.monotonic() + CLOSED_SECONDS
            self._open.clear()
        try:
            yield
        finally:
            with self._closing:
                self._closed_by -= 1
                if not self._closed_by:
                    self._open.set()

    def wait(self) -> None:
        """Returns once the gate is open; on the scheduler's thread."""
        if not self._open.is_set() and (left := self._until - time.monotonic()) > 0:
            self._open.wait(left)

    def install(self, scheduler: Any) -> bool:
        """Puts the gate before the scheduler's processing of requests, once in each turn of its loop. Returns whether it could be."""
        process = getattr(scheduler, "process_input_requests", None)
        if process is None:
            return False

        @functools.wraps(process)
        def gated(*arguments: Any, **options: Any) -> Any:
            self.wait()
            return process(*arguments, **options)

        scheduler.process_input_requests = gated
        return True


log = logging.getLogger(__name__)

COMMAND_SECONDS = 30.0  # the deadline of a command that names none
LINE_BYTES = 64 * 2**20  # the longest command, enough to name every tensor of a model with 100,000 of them
SOCKET_BYTES = 65_536  # the longest answer that a scheduler writes itself: a socket takes so much without anybody reading
ANSWER_MARGIN = 15.0  # seconds beyond a command's deadline after which the connection stops waiting for its answer

Fields = Mapping[str, Any]

# ------------------------------------------------------------------------------------------------------------- verbs


def prepare(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> Reception:
    """Begins to receive a push: ``version``, ``push``, ``channels``, ``check``, ``manifests``."""
    version, push, channels = int(command["version"]), int(command["push"]), list(command["channels"])
    manifests = {str(name): str(identity) for name, identity in dict(command.get("manifests", {})).items()}
    return receiver.prepare(version, push, channels, deadline, check=bool(command.get("check", False)), manifests=manifests)


def join(receiver: Receiver, command: Fields, deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to join ``channels``; ``rank``: of the engine's first process, see `Receiver.join`; ``timeout``: for all of it.

    ``machines``: of an engine over several with channels of their own, address and rank of the first of each one's ``ranks`` processes."""
    addresses, first = [WeightChannelAddress.model_validate(address) for address in command["channels"]], int(command["rank"])
    elsewhere: list[str] = []
    if machines := command.get("machines"):
        node, size = receiver.rank // int(command["ranks"]), int(command["ranks"])
        machine, first = str(machines[node][0]), int(machines[node][1]) - node * size
        elsewhere = [address.name for address in addresses if address.address != machine]
        addresses = [address for address in addresses if address.address == machine]
    receiver.join(addresses, first, float(command["timeout"]), elsewhere)
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


# A command's function: the receiver, the command, its deadline → the answer's fields. Raises MyxoError.
Verb = Callable[[Receiver, Fields, TransferDeadline], dict[str, Any]]

# Verbs by the thread that ends them: the connection's own, or the one that owns the model (`Receiver.finish`).
AT_ONCE: dict[str, Verb] = {"join": join, "leave": leave, "state": state, "adopt": adopt, "send_to_peer": send_to_peer}
QUEUED: dict[str, Callable[[Receiver, Fields, TransferDeadline], Reception]] = {"receive": prepare}


# ----------------------------------------------------------------------------------------------------------- session


class _Answers:
    """The answers to one command, each written once, by whichever thread has it first."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._writing, self._written = write, threading.Lock(), set[str]()

    def say(self, name: str, answer: Mapping[str, Any], longest: int | None = None) -> None:
        """Writes the answer called ``name``, unless it was or has more than ``longest`` bytes. Raises OSError."""
        line = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            if name not in self._written and (longest is None or len(line) <= longest):
                self._written.add(name)
                self._write(line)


@dataclass(eq=False)
class _Command:
    fields: Fields
    deadline: TransferDeadline
    answers: _Answers
    reception: Future[Reception] = field(default_factory=Future)
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class CommandSession:
    """One rank's socket and queue. ``directory``: private to this engine and its service; the socket is ``rank-<r>.sock`` in it. ``gate``:
    of the scheduler that calls `work`."""

    def __init__(self, directory: Path, receiver: Receiver, gate: SchedulerGate | None = None) -> None:
        self._gate = gate or SchedulerGate()
        self.path, self.receiver = directory / f"rank-{receiver.rank}.sock", receiver
        self._queue: deque[_Command] = deque()
        self._calls = 0  # of `work`
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
        with self._lock:
            self._calls += 1
            command = self._queue.popleft() if self._queue else None
        if command is None:
            return False
        if command.answer.set_running_or_notify_cancel():
            self._answer_here(command, "begun", {"begun": True})
            answer = self._finished(command)
            self._answer_here(command, "answer", answer)
            command.answer.set_result(answer)
        return True

    def _answer_here(self, command: _Command, name: str, answer: dict[str, Any]) -> None:
        """Answers on this thread: the connection's would have to wait for the interpreter, which an idle scheduler holds. What does not fit
        into the socket for certain is left to that one."""
        with contextlib.suppress(OSError):  # the caller no longer waits for the answer
            command.answers.say(name, answer, SOCKET_BYTES)

    # ---------------------------------------------------------------------------------------------------- connections

    def _handle(self, connection: socketserver.StreamRequestHandler) -> None:
        answers = _Answers(connection.wfile.write)
        try:
            fields = json.loads(connection.rfile.readline(LINE_BYTES))
            name = str(fields["verb"])
            if name == "abort":
                self._abort()
                answers.say("answer", {"ok": True})
                return
            if name not in AT_ONCE and name not in QUEUED:
                raise BadMessage(f"command {name!r}: not one of {', '.join(sorted({*AT_ONCE, *QUEUED, 'abort'}))}")
            deadline = TransferDeadline(float(fields.get("deadline", COMMAND_SECONDS)))
        except (MyxoError, ValueError, KeyError, TypeError) as error:
            answers.say("answer", _failed(error))
            return
        if name in AT_ONCE:
            answers.say("answer", _answer_of(name, lambda: AT_ONCE[name](self.receiver, fields, deadline)))
        else:
            self._wait_for(_Command(fields, deadline, answers))

    def _wait_for(self, command: _Command) -> None:
        say = command.answers.say
        asked, unanswered = (int(command.fields.get(name, 0)) for name in ("wakes", "unanswered_wakes"))
        with self._lock:
            self._held.add(command)
            self._forget_called_off(asked, unanswered)
            self._queue.append(command)
        try:
            with self._gate.closed():
                say("queued", {"queued": True})
                self._begin(command)
            say("answer", command.answer.result(command.deadline.left + 2 * ANSWER_MARGIN))
        except CancelledError:
            self._call_off(command)  # before the caller continues to its next command
            say("answer", {"ok": False, "error": "called off before it began", "touched": False})
        except TimeoutError:
            error = "this command was not done: the engine was not asked to"
            say("answer", {"ok": False, "error": error, "touched": command.answer.running()})
        finally:
            with self._lock:
                self._held.remove(command)
            command.deadline.abort()
            command.answer.cancel()  # if it is still queued, it is not run any more
            self._call_off(command)

    def _forget_called_off(self, asked: int, unanswered: int) -> None:
        """Takes commands that were called off out of the queue, where no call of `work` comes for them any more.

        A call that is on its way ends with one of them, so that it never does the next command too early; one too many of them would take
        that command's own call. ``asked``: how many calls the engine was asked for so far; ``unanswered``: of them, those not answered yet.
        """
        if not unanswered:
            self._calls = asked  # some may never have come
        coming = min(unanswered, asked - self._calls)
        off = [command for command in self._queue if command.answer.cancelled()]
        for command in off[max(coming, 0) :]:
            self._queue.remove(command)

    def _call_off(self, command: _Command) -> None:
        """Gives up what was begun for a command that will not be run."""
        if command.answer.cancelled() and command.reception.done() and command.reception.exception() is None:
            self.receiver.call_off(command.reception.result())

    def _begin(self, command: _Command) -> None:
        """Begins the command, beside the scheduler, which has the outcome."""
        try:
            command.deadline.check("its turn", "the engine")
            command.reception.set_result(QUEUED[str(command.fields["verb"])](self.receiver, command.fields, command.deadline))
        except Exception as error:  # of what was received, too
            command.reception.set_exception(error)

    def _finished(self, command: _Command) -> dict[str, Any]:
        def finish() -> dict[str, Any]:
            reception = command.reception.result(command.deadline.left + ANSWER_MARGIN)
            command.deadline.check("its turn", "the engine")
            return self.receiver.finish(reception)

        return _answer_of(str(command.fields.get("verb")), finish)

    def _abort(self) -> None:
        with self._lock:
            held = list(self._held)
        for command in held:
            command.deadline.abort()
            command.answer.cancel()  # does nothing to one that has begun
        self.receiver.abort()


def _answer_of(verb: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"ok": True, **work()}
    except Exception as error:
        if not isinstance(error, MyxoError):
            log.exception("command %r failed", verb)
        return _failed(error)


def _failed(error: BaseException) -> dict[str, Any]:
    return {"ok": False, "error": said_by(error), "touched": isinstance(error, ReceiveError) and error.touched}
