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
import os
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.rollout.engine.private_endpoints import ADDRESS_VARIABLE
from services.rollout.engine.receiver import load_plan
from services.rollout.engine.receiver.load_plan import TensorCopy
from services.rollout.engine.receiver.receiver import PEER_DONE, ReceiveError, Receiver, Reception, said_by
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.tasks import SupervisedThread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.digest import decoded_digests
from shared.transfer.group_channel import GroupSender, on_stream
from shared.transfer.manifest import Bucket, lay_out
from shared.transfer.weight_channel import POLL_INTERVAL_S, TransferDeadline

BUCKET_BYTES = 128 * 1024**2  # the bytes of a bucket, over the number of ranks: a destination has buffers for all of them
TRANSFERS = 2  # the number of transfers that an engine sends at once: each takes two flat buffers of device memory, and a share of the link

# The time that the source's store outlives a transfer, for a destination that has not read all of it, and an aborted transfer.
LINGER_SECONDS = 20.0
BROKEN_LINGER_SECONDS = 2.0


def send_to_peer(receiver: Receiver, order: Mapping[str, Any], deadline: TransferDeadline) -> dict[str, Any]:
    """Begins to send ``version`` to ``ranks`` ranks over a channel called ``name`` at ``address``, within ``seconds``. The destination
    receives it as push number ``version``. Answers with the channel. Raises BadMessage: it cannot be had here."""
    if not receiver.known or receiver.version != int(order["version"]):
        raise BadMessage(f"version {order['version']} is not to be had here: this engine holds version {receiver.version}")
    if len(receiver.before_change) >= TRANSFERS:
        raise BadMessage(f"this engine sends to {TRANSFERS} others already")
    address = os.environ.get(ADDRESS_VARIABLE) or str(order["address"])  # the service may be on another node than this rank
    transfer = PeerTransfer(receiver, str(order["name"]), address, int(order["ranks"]), float(order["seconds"]))
    threading.Thread(target=transfer.run, name=transfer.channel.name, daemon=True).start()
    return {"digest": receiver.digest, "channel": transfer.channel.address.model_dump()}


class PeerTransfer:
    """A transfer of weights from engine to engine, at one of the source's ranks, as many as the destination's. Raises BadMessage.

    Each of the source's ranks looks up which parameters loading a tensor would set, and puts what it holds of the tensor back in its place.
    All of the destination's ranks take from all of the source's, lay the parts over each other, and load, hash and count the tensors as in
    a push: the digest has to be the trainer's, so that nothing that the source says of its weights is believed. The source only reads, in a
    thread of its own, and continues to generate. A change of its parameters ends the transfer first (`Receiver.before_change`).
    """

    def __init__(self, receiver: Receiver, name: str, address: str, ranks: int, seconds: float) -> None:
        self._receiver, self._version, self._deadline, self._ranks = receiver, receiver.version, TransferDeadline(seconds), ranks
        self.channel = GroupSender(name, address, 1 + ranks, receiver.device, paced=True)
        receiver.before_change.add(self.channel.abort)  # ahead of the look at the parameters, which takes seconds
        try:
            specs = [(name, known.dtype, known.shape) for name, known in receiver.known.items()]
            self._manifest = lay_out(specs, BUCKET_BYTES // ranks, "partial")
            self._copies = [self._held(bucket) for bucket in self._manifest.buckets]
        except BaseException:
            receiver.before_change.discard(self.channel.abort)
            self.channel.close()
            raise

    def run(self) -> None:
        channel, linger = self.channel, BROKEN_LINGER_SECONDS
        if self._receiver.device.type == "cuda":
            torch.cuda.set_device(self._receiver.device)  # the current device is per thread
        try:
            channel.join(self._deadline.left)
            self._send()
            linger = LINGER_SECONDS
        except Exception as error:
            channel.abort(said_by(error))
            log.info("transfer %s ended: %s", channel.name, channel.broken)
        finally:
            self._receiver.before_change.discard(channel.abort)
            end = time.monotonic() + linger
            with contextlib.suppress(RuntimeError):
                while time.monotonic() < end and self.channel.store.add(PEER_DONE, 0) < self._ranks:
                    time.sleep(POLL_INTERVAL_S)
            channel.close()

    def _held(self, bucket: Bucket) -> list[TensorCopy]:
        """Returns the copies by which the bucket would be loaded. Where there is one rank, they are all of its bytes."""
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._receiver.device)
        copies = load_plan.held_copies(self._receiver.model, bucket, flat)
        held, wanted = sum(copy.target.numel() * copy.dtype.itemsize for copy in copies), sum(slot.nbytes for slot in bucket.slots)
        if self._ranks == 1 and held != wanted:
            first = bucket.slots[0].name
            raise BadMessage(f"of {wanted} bytes of weights from {first} on this engine holds {held} as they were pushed: it can send none")
        return copies

    @torch.inference_mode()
    def _send(self) -> None:
        channel, device = self.channel, self._receiver.device
        with on_stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # beside the engine's own
            channel.announce(self._version, self._manifest, self._deadline.left)
            for index, bucket in enumerate(self._manifest.buckets):
                flat = channel.buffer(index, bucket.nbytes)
                flat.zero_()
                for copy in self._copies[index]:
                    copy.source(flat).copy_(copy.target)
                channel.send(index, flat)
            channel.finish()
        channel.raise_if_broken()


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
RECEIVE = "receive"


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
            answer = _answer_of(RECEIVE, lambda: self.receiver.finish(command.reception.result(command.deadline.left + ANSWER_MARGIN)))
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
            if name not in (*AT_ONCE, RECEIVE):
                raise BadMessage(f"command {name!r}: not one of {', '.join(sorted({*AT_ONCE, RECEIVE, 'abort'}))}")
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
        if command.answer.cancelled() and command.reception.done() and command.reception.exception() is None:
            self.receiver.call_off(command.reception.result())

    def _begin(self, command: _Command) -> None:
        try:
            command.deadline.check("its turn", "the engine")
            command.reception.set_result(prepare(self.receiver, command.fields, command.deadline))
        except Exception as error:  # of what was received, too
            command.reception.set_exception(error)

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
