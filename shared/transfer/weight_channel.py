"""The base of both ends of every weight channel: the store beside it, deadlines, flat buffers, and the methods of an end.

A channel carries the buckets of pushes from one source to all engine ranks. The source serves a store (`channel_store`), in which it writes
what the buckets hold (``manifest/<push>``) and, should it give up, why (``aborted``); the readers write there that they have come
(``here/<rank>``). The kinds differ in how bytes travel: `group_channel`, `memory_channel`.

Invariant: nothing here waits without checking, at least every `POLL_INTERVAL_S`, whether its deadline has passed or somebody has given
up. What cannot be called off (a store on another machine, the forming of a process group) runs on a thread that may be left behind.
"""

import abc
import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from shared.runtime.errors import BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.tasks import doubling, run_in_thread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.channel_store import RemoteStore, StoreServer
from shared.transfer.manifest import Manifest

POLL_INTERVAL_S = 0.05  # the longest sleep between two checks of a deadline
SENDER_POLL_S = 0.0005  # the longest sleep of a source that waits for a buffer: the readers have nothing to do meanwhile
STORE_POLL_S = 0.1  # the seconds between two checks in the store whether the other end has given up, while an end waits for buckets
# the interval at which a source that waits for its readers' digests checks whether they have failed
HELD_POLL = datetime.timedelta(seconds=0.05)
EAGER_SECONDS = 0.01  # For so long a wait on a GPU checks without sleeping: a bucket of 512 MB takes 1.4 ms, a sleep a tenth of that
CONNECT_SECONDS = 5.0  # the seconds to reach the store of another process, to abort its channel
SECRET_BYTES = 32
T = TypeVar("T")


class ChannelBroken(MyxoError):
    """The channel cannot be used any more; the message says why."""


class TransferAborted(MyxoError):
    """The awaited transfer was aborted."""


class TransferDeadline:
    """The deadline of a transfer, which any thread may abort.

    Args:
        seconds: from now. next_action: what happens should they pass, for the error.
    """

    def __init__(self, seconds: float, next_action: str = "the push is given up") -> None:
        self.seconds, self.next_action = seconds, next_action
        self._end = time.monotonic() + seconds
        self._called_off = threading.Event()

    def abort(self) -> None:
        """Ends the work's waits soon, from any thread."""
        self._called_off.set()

    @property
    def left(self) -> float:
        """Returns the seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str, awaited_from: str) -> None:
        """Raises TransferAborted, or DeadlineExceeded that names what is awaited, and from which process."""
        if self._called_off.is_set():
            raise TransferAborted(f"{what} from {awaited_from} was called off")
        if time.monotonic() >= self._end:
            raise DeadlineExceeded(what, awaited_from, self.seconds, self.next_action)

    def until(
        self,
        done: Callable[[], bool],
        what: str,
        awaited_from: str,
        check: Callable[[], None] = lambda: None,
        *,
        eager: bool = False,
        longest: float = POLL_INTERVAL_S,
    ) -> None:
        """Returns once ``done()``.

        Args:
            check: is called between, and may raise. eager: do not sleep for the first `EAGER_SECONDS`. longest: sleep, in seconds.

        Raises TransferAborted, DeadlineExceeded.
        """
        begin = time.monotonic()
        while not done():
            self.check(what, awaited_from)
            check()
            waited = time.monotonic() - begin
            time.sleep(0 if eager and waited < EAGER_SECONDS else min(longest, 0.0002 + waited / 10))


@contextlib.contextmanager
def breaking(what: str) -> Iterator[None]:
    """Turns what torch raises in the body into ChannelBroken, without torch's stack."""
    try:
        yield
    except RuntimeError as error:
        raise ChannelBroken(f"{what}: {(str(error) or type(error).__name__).splitlines()[0]}") from error


class ChannelSender(abc.ABC):
    """The source's end. One thread calls its methods, any thread `abort`; all that goes wrong raises ChannelBroken.

    Args:
        name: known to all members, new for each channel. host: the address by which the readers reach this process.
        world_size: this process and all engine ranks. device: of the buckets.

    Attributes:
        address: at which the readers find the channel.
    """

    kind: Literal["group", "memory"]

    def __init__(self, name: str, host: str, world_size: int, device: torch.device, backend: str) -> None:
        self.name, self.world_size, self.device, self.backend = name, world_size, device, backend
        self.store, secret = HashStore(), secrets.token_hex(SECRET_BYTES)
        self._server = StoreServer(self.store, host, secret)
        self.address = WeightChannelAddress(
            kind=self.kind, name=name, address=host, port=self._server.port, secret=secret, backend=backend, world_size=world_size
        )
        self.broken: str | None = None
        self._deadline = TransferDeadline(0.0)
        self._announced = ""
        self._store_asked = 0.0

    def join(self, seconds: float) -> None:
        """Returns once every reader has joined. No step that cannot be cancelled begins before that."""
        self._deadline, ranks = TransferDeadline(seconds), range(1, self.world_size)

        def missing() -> list[int]:
            return [rank for rank in ranks if not self.store.check([f"{self.name}/here/{rank}"])]

        try:
            self._deadline.until(lambda: not missing(), "the joining", "the engines", self._check, longest=0.01)
        except DeadlineExceeded as error:
            ranks_missing = ", ".join(map(str, missing()))
            raise ChannelBroken(f"engine ranks {ranks_missing} did not join channel {self.name} within {seconds:g} s") from error
        self.store.set(f"{self.name}/here/0", "1")

    def announce(self, push: int, manifest: Manifest, seconds: float) -> None:
        """Says what the buckets of a push hold; they follow in order, all of them within ``seconds``."""
        self._deadline = TransferDeadline(seconds)
        repeated = manifest.id == self._announced
        self.note(f"manifest/{push}", b"=" if repeated else b"M" + manifest.encoded)
        self._server.broadcast([push, manifest.id, seconds])
        self._announced = manifest.id

    def followed(self, manifest: Manifest) -> bool:
        """Returns whether every reader begins a push of this manifest when it is announced, before it is asked to."""
        return bool(manifest.buckets) and manifest.id == self._announced and self._server.followers == self.world_size - 1

    def note(self, key: str, value: str | bytes) -> None:
        """Writes something into the store, for the readers."""
        with self._breaking():
            self.store.set(key, value)  # type: ignore[arg-type]  # bytes are fine

    @abc.abstractmethod
    def buffer(self, index: int, nbytes: int) -> Tensor:
        """Returns where bucket ``index`` of the push is to be put: uint8 [nbytes]. On a GPU it is free in the current stream's order."""

    @abc.abstractmethod
    def send(self, index: int, flat: Tensor) -> None:
        """Sends what `buffer` gave, once the current stream has filled it. Returns before it has arrived."""

    @abc.abstractmethod
    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Returns once every bucket has left this side. ``meanwhile``: is called while it waits."""

    def held_by_all(self, push: int, digest: str, done: Callable[[], bool]) -> bool:
        """Returns whether every reader has said, by `ChannelReceiver.report_held`, that it holds ``digest`` after this push.

        Waits for them until ``done()``, or until the channel breaks.
        """
        keys = [f"held/{push}/{rank}" for rank in range(1, self.world_size)]
        while self.broken is None and not done():
            with contextlib.suppress(RuntimeError):  # not all of them yet
                self.store.wait(keys, HELD_POLL)
                held = [self.store.get(key) for key in keys]
                for key in keys:
                    self.store.delete_key(key)
                return set(held) == {digest.encode()}
        return False

    def abort(self, reason: str) -> None:
        """Ends whatever the channel waits for; it is of no use afterwards."""
        if self.broken is None:
            self.broken = reason
            with contextlib.suppress(RuntimeError):
                self.store.set("aborted", reason)
            self._server.broadcast(None)

    def close(self) -> None:
        """Releases all resources. The readers' requests fail from now on."""
        self.broken = self.broken or f"channel {self.name} was closed"
        self._server.close()

    def _until(self, done: Callable[[], bool], what: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        awaited_from = f"the {self.world_size - 1} engine ranks of channel {self.name}"

        def check() -> None:
            self._check()
            meanwhile()

        try:
            self._deadline.until(done, what, awaited_from, check, longest=SENDER_POLL_S)
        except DeadlineExceeded as error:
            raise ChannelBroken(str(error)) from error

    def _check(self) -> None:
        """Raises ChannelBroken if the channel was aborted, here or by another of the trainer's ranks in the store."""
        if self.broken is None and time.monotonic() > self._store_asked + STORE_POLL_S:
            self._store_asked = time.monotonic()
            self.broken = _abort_reason(self.store)
        self.raise_if_broken()

    def raise_if_broken(self) -> None:
        """Raises ChannelBroken if the channel was aborted, as far as this process knows."""
        if self.broken is not None:
            raise ChannelBroken(self.broken)

    def _breaking(self) -> contextlib.AbstractContextManager[None]:
        return breaking(f"channel {self.name} broke")


def abort_channel(address: WeightChannelAddress, reason: str) -> None:
    """Ends what the source of a channel in another process waits for. Does nothing if it cannot be reached."""
    where = address.address, address.port, address.secret
    with contextlib.suppress(RuntimeError), contextlib.closing(RemoteStore(*where, CONNECT_SECONDS)) as store:
        store.set("aborted", reason)


class ChannelReceiver(abc.ABC):
    """A reader's end. One thread at a time calls its methods, any thread `close`.

    Its methods raise ChannelBroken, TransferAborted, DeadlineExceeded, and BadMessage. On a GPU "the current stream" is the one on which
    buckets are loaded: what `take` gives may be read in its order, and what was issued on it before `release` may still read the bucket.

    Args:
        rank: of this process in the channel, from 1.

    Attributes:
        begun_at: when the newest push's transfer began, monotonic seconds; 0 where that is not known.
    """

    def __init__(self, address: WeightChannelAddress, rank: int, device: torch.device) -> None:
        self.name, self.address, self.rank, self.device = address.name, address, rank, device
        self.source = f"the source of channel {address.name} at {address.address}:{address.port}"
        self.awaited_from = self.source  # while joining
        self.broken: str | None = None
        self.begun_at = 0.0
        self._store: RemoteStore | None = None
        self._manifest: Manifest | None = None
        self._question: Future[tuple[str | None, None]] | None = None
        self._asked_at = 0.0

    def join(self, deadline: TransferDeadline) -> None:
        """Connects to the store and says that this rank is here. It may run beside generation, on a thread of its own."""
        what = f"a connection for channel {self.name}"
        where = self.address.address, self.address.port, self.address.secret
        connecting = run_in_thread(lambda: RemoteStore(*where, deadline.left), f"connect-{self.name}")
        try:
            deadline.until(connecting.done, what, self.source)
        except DeadlineExceeded as error:
            raise ChannelBroken(str(error)) from error
        with breaking(f"{what} did not come from {self.source}"):
            self._store = connecting.result()
            self._store.set(f"{self.name}/here/{self.rank}", "1")

    def manifest(self, push: int, deadline: TransferDeadline, known: str = "") -> Manifest:
        """Returns what push number ``push`` brings over this channel; its buckets follow.

        Args:
            known: the manifest's id, as far as the push's request names it. The store is not asked for the one that came last.
        """
        self._asked_at = time.monotonic()  # a source that has just spoken is not asked at once whether it is there
        if known and self._manifest is not None and self._manifest.id == known:
            return self._manifest
        encoded = self.read(f"manifest/{push}", f"the manifest of push {push}", deadline)
        if encoded[:1] == b"M":
            self._manifest = Manifest.decode(encoded[1:])
        elif encoded != b"=" or self._manifest is None:
            raise BadMessage(f"channel {self.name}: a manifest that begins with {encoded[:1]!r}, or repeats one that never came")
        return self._manifest

    def read(self, key: str, what: str, deadline: TransferDeadline) -> bytes:
        """Returns what the source has written into the store, as soon as it has."""
        return self._ask(lambda store: store.get(key) if store.check([key]) else None, what, deadline)

    @abc.abstractmethod
    def take(self, index: int, nbytes: int, deadline: TransferDeadline) -> Tensor:
        """Returns bucket ``index`` once it is there, in order: uint8 [nbytes], valid until its `release`."""

    @abc.abstractmethod
    def release(self, index: int) -> None:
        """Releases a bucket: all work that reads it has been issued on the current stream."""

    def finish(self, deadline: TransferDeadline) -> None:  # noqa: B027  # not every kind has something to do
        """Ends the push: every bucket was released, and all work that reads them is done."""

    def report_held(self, push: int, digest: str) -> None:
        """Sends the source the digest of what this reader holds after the push, without waiting. Raises ChannelBroken."""
        with breaking(f"{self.source} is gone"):
            self.store.post(f"held/{push}/{self.rank}", digest)

    def close(self) -> None:
        """Ends what is under way and leaves the channel, which is of no use afterwards. Returns soon."""
        self.broken = self.broken or f"channel {self.name} was left"
        if self._store is not None:
            self._store.close()

    @property
    def store(self) -> RemoteStore:
        """Returns the source's store. Raises ChannelBroken."""
        self.raise_if_broken()
        if self._store is None:
            raise ChannelBroken(f"channel {self.name} was not joined")
        return self._store

    def raise_if_broken(self) -> None:
        """Raises ChannelBroken if this end was closed, or could not join."""
        if self.broken is not None:
            raise ChannelBroken(self.broken)

    def check_source(self) -> None:
        """Raises ChannelBroken if the source is gone or has given up, as far as its store has answered; never waits for it."""
        self.raise_if_broken()
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            self._answer(question)
        elif self._question is None and time.monotonic() > self._asked_at + STORE_POLL_S:
            self._asked_at = time.monotonic()
            self._question = self._asked(lambda _: None)

    def _ask(self, question: Callable[[RemoteStore], T | None], what: str, deadline: TransferDeadline) -> T:
        """Returns the first answer that counts as true."""
        pauses = doubling(0.002, POLL_INTERVAL_S)
        while True:
            asked = self._asked(question)
            deadline.until(asked.done, what, self.awaited_from, eager=True)
            if answer := self._answer(asked):
                return answer
            deadline.check(what, self.awaited_from)
            time.sleep(next(pauses))

    def _asked(self, question: Callable[[RemoteStore], T]) -> Future[tuple[str | None, T]]:
        """Asks the store, which may not respond, on a thread: for the reason to give up, if there is one, and the question."""
        store = self.store
        return run_in_thread(lambda: (_abort_reason(store), question(store)), f"ask-{self.name}")

    def _answer(self, asked: Future[tuple[str | None, T]]) -> T:
        with self._reaching():
            reason, answer = asked.result()
        if reason is not None:
            raise ChannelBroken(f"{self.source} has given up: {reason}")
        return answer

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            with breaking(f"{self.source} is gone"):
                yield
        except ChannelBroken:
            self.raise_if_broken()  # this end was closed, and with it its connection
            raise


def _abort_reason(store: Store) -> str | None:
    return store.get("aborted").decode(errors="replace") if store.check(["aborted"]) else None
