"""A leader's lease: of several processes that could do a job, one is active, and when it dies another takes over.

The lease of a job is one key of the run's bucket `leases`. Every change names the revision that it follows, so of two concurrent changes
one is refused (`Nats-Expected-Last-Subject-Sequence`). Nothing expires in the server, so neither its clock nor its absence can give a
lease to anybody. Each process measures seconds for itself, on a clock that continues while the process, or its machine, is
stopped.

Two processes never act at the same time. The proof, with D = `LeaseTiming.duration` and m = `LeaseTiming.margin`:

1. The holder renews every D/3. A renewal that it began to send at time t, and that was confirmed as revision r, lets it act until
   t + D - m.
2. A waiting process begins to count when it first reads r, which is after r was stored and so after t. It asks for the lease once it
   has counted D, so after t + D; and gets it only if the revision is still r, so only if no later renewal was made.
3. So a holder has stopped for m before anybody else can begin. m covers decisions that a process has made and not yet sent, and clocks
   that differ by less than m in D. A lease that was released, or whose holder is certainly dead (`certainly_dead`), is taken
   at once.

A holder that cannot renew is *fenced*: it stops acting, but keeps the lease. Once NATS answers again it renews with the revision that it
had. If that is refused, another process was active, and the holder ends with `LeaseLost`. If it is confirmed, no other was, because taking
a lease changes its revision; the holder's state is still current, and it continues. That is how a run survives an outage of NATS: the
holder continues while its last renewal lasts, then waits. A waiting process restarts its count each time NATS does not answer, so that a
live holder renews first.

One case remains: a message that a stopped process had half sent. The ledger refuses it, because it expects a sequence that the new holder's
records have taken (`services.buffer.ledger_writer`). The proof assumes that NATS keeps everything that it has confirmed.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

import nats.errors
import structlog
from nats.js.errors import APIError, NotFoundError

from shared.bus.bus_errors import RETRY_PAUSE, TRANSIENT, WRONG_LAST_SEQUENCE, warn_unreadable
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.host import certainly_dead, clock, process_mark
from shared.schema.service_messages import LeaseStatus, NodeState

AWAY_SECONDS = 120.0  # The seconds that a holder tries to renew before it gives up: the same as for publishing a record of the ledger
_NO_MESSAGE = 10037


class LeaseLost(MyxoError):
    """Another process holds the lease, or may hold it: this process must not act any more."""


class LeaseTiming:
    """The times of a lease in seconds, derived from its ``duration`` (``bus.lease_duration``), which all its processes must share.

    margin: its holder stops acting so long before it runs out. renewal: from one renewal to the next. poll: between two reads by a
    process that waits for it. attempt: the deadline of one attempt to read or to change it.
    """

    def __init__(self, duration: float) -> None:
        self.duration, self.renewal, self.poll = duration, duration / 3, duration / 10
        self.margin = self.attempt = duration / 4

    def acts_until(self, sent: float) -> float:
        """Returns the time until which a renewal that was sent at ``sent``, and confirmed, lets its holder act."""
        return sent + self.duration - self.margin


class LeaseObserver:
    """Decides from the revisions that a waiting process has read whether it may ask for the lease. It is pure: times are arguments.

    Args:
        duration: of the lease in seconds.
    """

    def __init__(self, duration: float) -> None:
        self._duration = duration
        self._revision: int | None = None
        self._since = 0.0

    def see(self, revision: int, now: float) -> bool:
        """Takes the revision that was read by ``now``. Returns whether it has stayed the same for the lease's whole duration."""
        if revision != self._revision:
            self._revision, self._since = revision, now
        return now - self._since >= self._duration

    def unreadable(self) -> None:
        """Restarts the count: the lease could not be read, so its holder may have been unable to renew it."""
        self._revision = None


class LeaderLease:
    """One process's side of the lease of a job.

    Call `attempt` until it is held; then run `keep` beside all other work, await `held` before every act, and call `release` at the end.

    Args:
        job: the lease's key. instance: the name of this process, for people. node: makes what a node of the trainer says of itself.

    Attributes:
        term: unique to this holder.
    """

    def __init__(
        self, bus: Bus, run: str, job: str, instance: str, timing: LeaseTiming, node: Callable[[], NodeState | None] = lambda: None
    ) -> None:
        bucket = Subjects(run).leases_bucket
        self._bus, self._run, self._job, self._subject = bus, run, job, f"$KV.{bucket}.{job}"
        self._stream = f"KV_{bucket}"
        self.timing = timing
        self._name, self._instance, self._node = f"the lease {job} of run {run}", instance, node
        self.term = secrets.token_hex(8)
        self._changed = asyncio.Event()
        self._mark = process_mark()
        self._observer = LeaseObserver(self.timing.duration)
        self._revision = 0
        self._until = float("-inf")
        self._renewed = asyncio.Event()
        self._ended: LeaseLost | None = None
        self._log = structlog.get_logger()

    async def attempt(self) -> bool:
        """Reads the lease once and takes it if it is free. Returns whether this process holds it; an unreachable bus is no error.

        Raises NotPermitted.
        """
        begun = time.monotonic()
        try:
            revision, status = await read_lease(self._bus, self._run, self._job, self.timing.attempt)
            expired = self._observer.see(revision, clock())
            # its own where an earlier attempt took it, and the confirmation was lost; what cannot be read is somebody's
            free = status is not None and (status.term in ("", self.term) or certainly_dead(status.mark))
            if not (free or expired):
                return False
            self._revision = revision
            return await self._swap()
        except TRANSIENT:
            self._bus.raise_if_refused(begun, self._subject, f"$JS.API.STREAM.MSG.GET.{self._stream}")
            self._observer.unreadable()
            return False

    async def keep(self) -> None:
        """Renews the lease until cancelled. Raises LeaseLost."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.timing.renewal):
                        await self._changed.wait()
                self._changed.clear()
                await self._renew_in_time()
        except LeaseLost as error:
            self._end(error)
            raise

    def renew_soon(self) -> None:
        """Has `keep` renew at once: the node has something new to say."""
        self._changed.set()

    async def held(self) -> None:
        """Returns once this process may act: at once, or after its next renewal. Raises LeaseLost.

        Await nothing between this call and the act that it allows.
        """
        while True:
            if self._ended is not None:
                raise self._ended
            if clock() < self._until:
                return
            await self._renewed.wait()

    async def release(self) -> None:
        """Releases the lease, if it is still held, so that the next process need not wait. Call it when nothing acts any more."""
        if self._ended is None and clock() < self._until:
            with contextlib.suppress(APIError, *TRANSIENT):
                await self._publish(self._status(""))
        self._end(LeaseLost(f"{self._name} was released"))

    # --- renewing

    async def _renew_in_time(self) -> None:
        begun, reported = time.monotonic(), False
        while True:
            try:
                if await self._renew():
                    if reported:
                        self._log.info("lease_renewed", after=round(time.monotonic() - begun, 1))
                    return
            except TRANSIENT as error:
                self._bus.raise_if_refused(begun, self._subject)
                if not reported and clock() >= self._until:
                    reported = True
                    self._log.warning("lease_not_renewed", error=type(error).__name__, next_action="nothing is done until it is")
                if time.monotonic() - begun > AWAY_SECONDS:
                    lost = f"{self._name} is lost: the bus confirmed no renewal within {AWAY_SECONDS:g} s, and another may have it now"
                    raise LeaseLost(lost) from error
            await asyncio.sleep(RETRY_PAUSE)

    async def _renew(self) -> bool:
        """Renews once; returns False if the known revision was outdated; it is then updated. Raises LeaseLost and what TRANSIENT lists."""
        if clock() < self._until and await self._swap():
            return True
        revision, status = await read_lease(self._bus, self._run, self._job, self.timing.attempt)
        # what is no lease was written by no process that may act: as long as this one may, none has the lease (point 3 of the proof)
        mine = status.term == self.term if status is not None else clock() < self._until
        if not mine:
            who = "no process" if status is None or not status.term else status.holder
            raise LeaseLost(f"{self._name} is lost: {who} has it now; this process was stopped or cut off for too long")
        self._revision = revision  # the initial state, or this process's own change whose confirmation was lost
        return await self._swap()

    async def _swap(self) -> bool:
        """Writes this holder into the lease if it still has the known revision; the holder may act from the time of sending."""
        sent = clock()
        try:
            self._revision = await self._publish(self._status(self.term))
        except APIError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return False
            raise
        self._until = self.timing.acts_until(sent)
        self._renewed.set()
        self._renewed = asyncio.Event()
        return True

    async def _publish(self, status: LeaseStatus) -> int:
        if not self._bus.connection.is_connected:
            raise nats.errors.ConnectionReconnectingError  # the client would keep the message and send it at an unexpected time
        headers = {"Nats-Expected-Last-Subject-Sequence": str(self._revision)}
        ack = await self._bus.js.publish(self._subject, status.encode(), timeout=self.timing.attempt, headers=headers)
        return ack.seq

    def _status(self, term: str) -> LeaseStatus:
        return LeaseStatus(holder=self._instance, term=term, mark=self._mark if term else "", at=time.time(), node=self._node())

    def _end(self, error: LeaseLost) -> None:
        self._ended = self._ended or error
        self._until = float("-inf")
        self._renewed.set()


async def read_lease(bus: Bus, run: str, job: str, timeout_s: float) -> tuple[int, LeaseStatus | None]:
    """Returns a lease's revision (0 if it was never held) and its status, None for what is no lease. Raises what TRANSIENT lists."""
    bucket = Subjects(run).leases_bucket
    try:
        message = await asyncio.wait_for(bus.js.get_last_msg(f"KV_{bucket}", f"$KV.{bucket}.{job}"), timeout_s)
    except NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise MyxoError(
                f"the bus has no bucket for the lease {job} of run {run}: does the run exist there? (`myxo up` makes it)"
            ) from error
        return 0, LeaseStatus(holder="", term="", mark="", at=0.0)
    assert message.seq is not None  # a stored message has one
    try:
        return message.seq, LeaseStatus.decode(message.data or b"")
    except BadMessage as error:
        warn_unreadable(f"{bucket}/{job}", message.seq, str(error), "its holder writes it anew")
        return message.seq, None
