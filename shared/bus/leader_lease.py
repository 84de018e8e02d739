"""A leader's lease: of several processes that could do a job, one does, and when it dies another takes over.

The lease of a job is one key of the run's bucket `leases`. Its revision is what counts: every change names the revision that it follows,
so of two that want to change it one is refused (`Nats-Expected-Last-Subject-Sequence`). Nothing expires in the server, so neither its
clock nor its being away can give a lease to anybody. Seconds are measured by each process for itself, on a clock that goes on while the
process, or its machine, is stopped.

Why never two act at a time, with D = `LeaseTiming.duration` and m = `LeaseTiming.margin`:

1. The holder renews every D/3. A renewal that it began to send at its time t and saw confirmed as revision r lets it act until
   t + D - m, not longer.
2. Who waits has begun to count when it first read r, and that was after r was stored, which was after t. It asks for the lease once it
   has counted D, so after t + D; and gets it only if the revision still is r, so only if no later renewal was made.
3. So a holder has stopped for m before anybody else can begin. m is for what a process has decided and not yet sent, and for clocks
   that differ by less than m in D. A lease that was released, or whose holder is certainly dead (`shared.runtime.liveness`), is taken at
   once.

A holder that cannot renew is *fenced*: it acts no more, but is not deposed. Once NATS answers again it renews with the revision that it
had. Refused: somebody else was active, and it ends with `LeaseLost`. Confirmed: nobody was, for whoever takes a lease changes its
revision; nothing has happened without it, and it goes on with what it knows. That is how a run outlives a death of NATS: the holder goes
on while its last renewal lasts, then waits. Who waits begins to count anew after each time NATS did not answer, so that a holder that
lives comes first.

What is left: a message that a stopped process had half sent. The ledger refuses it, for it expects a sequence that the new holder's
records have taken (`services.buffer.ledger_writer`). All this presumes that NATS keeps what it has confirmed.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass

import nats.errors
import structlog
from nats.js.errors import APIError, NotFoundError

from shared.bus.bus_errors import RETRY_PAUSE, TRANSIENT, WRONG_LAST_SEQUENCE
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.runtime import liveness
from shared.runtime.errors import MyxoError
from shared.schema.messages import LeaseStatus

AWAY_SECONDS = 120.0
"""How long a holder tries to renew before it gives up: as long as a record of the ledger is tried."""

_NO_MESSAGE = 10037


class LeaseLost(MyxoError):
    """Somebody else holds the lease, or may: this process must not act any more."""


@dataclass(frozen=True)
class LeaseTiming:
    """The seconds of a lease follow from its ``duration`` (``bus.lease_duration``). Whoever shares a lease must have the same."""

    duration: float

    @property
    def margin(self) -> float:
        """Returns how long before the lease runs out its holder stops acting."""
        return self.duration / 4

    @property
    def renewal(self) -> float:
        """Returns the time from one renewal to the next."""
        return self.duration / 3

    @property
    def poll(self) -> float:
        """Returns how often a process that waits for the lease reads it."""
        return self.duration / 10

    @property
    def attempt(self) -> float:
        """Returns the deadline of one attempt to read or to change the lease."""
        return self.duration / 4

    def acts_until(self, sent: float) -> float:
        """Returns until when a renewal that was sent at ``sent``, and confirmed, lets its holder act."""
        return sent + self.duration - self.margin


class LeaseObserver:
    """Decides from the revisions that a waiting process has read whether it may ask for the lease. It is pure: it is given the times.

    Args:
        duration: of the lease in seconds.
    """

    def __init__(self, duration: float) -> None:
        self._duration = duration
        self._revision: int | None = None
        self._since = 0.0

    def see(self, revision: int, now: float) -> bool:
        """Takes the revision that was read by ``now``. Returns whether the lease has had it for its whole duration."""
        if revision != self._revision:
            self._revision, self._since = revision, now
        return now - self._since >= self._duration

    def unreadable(self) -> None:
        """Begins to count anew: the lease could not be read, so its holder may have been unable to renew it."""
        self._revision = None


class LeaderLease:
    """One process's part in the lease of a job.

    `attempt` until it is held; then `keep` beside all other work, `held` before every act, and `release` at the end.

    Args:
        job: the lease's key. instance: who this is, for people.
    """

    def __init__(self, bus: Bus, run: str, job: str, instance: str, timing: LeaseTiming) -> None:
        bucket = Subjects(run).leases_bucket
        self._bus, self._stream, self._subject = bus, f"KV_{bucket}", f"$KV.{bucket}.{job}"
        self.timing = timing
        self._name, self._instance = f"the lease {job} of run {run}", instance
        self._term = secrets.token_hex(8)
        self._mark = liveness.mark()
        self._observer = LeaseObserver(self.timing.duration)
        self._revision = 0
        self._until = float("-inf")
        self._renewed = asyncio.Event()
        self._ended: LeaseLost | None = None
        self._log = structlog.get_logger()

    async def attempt(self) -> bool:
        """Looks at the lease once and takes it if it is free. Returns whether it is held; an unreachable bus is no error.

        Raises NotPermitted.
        """
        begun = time.monotonic()
        try:
            revision, status = await self._read()
            own = status.term == self._term  # taken by an attempt of before, whose confirmation was lost
            expired = self._observer.see(revision, clock())
            if status.term and not own and not expired and not liveness.certainly_dead(status.mark):
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
                await asyncio.sleep(self.timing.renewal)
                await self._renew_in_time()
        except LeaseLost as error:
            self._end(error)
            raise

    async def held(self) -> None:
        """Returns while this process may act, at once or after its next renewal. Raises LeaseLost.

        Nothing may be awaited between this and the act that it allows.
        """
        while True:
            if self._ended is not None:
                raise self._ended
            if clock() < self._until:
                return
            await self._renewed.wait()

    async def release(self) -> None:
        """Gives the lease up, if it is still held, so that the next one need not wait. Call it when nothing acts any more."""
        if self._ended is None and clock() < self._until:
            with contextlib.suppress(APIError, *TRANSIENT):
                await self._publish(LeaseStatus(holder=self._instance, term="", mark="", at=time.time()))
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
        """Renews once; returns False where the revision was not the known one and is now. Raises LeaseLost, and what TRANSIENT lists."""
        if clock() < self._until and await self._swap():
            return True
        revision, status = await self._read()
        if status.term != self._term:
            who = status.holder if status.term else "nobody"
            raise LeaseLost(f"{self._name} is lost: {who} has it now; this process was stopped or cut off for too long")
        self._revision = revision  # what was here all along, or an own change whose confirmation was lost
        return await self._swap()

    async def _swap(self) -> bool:
        """Changes the lease to this holder's if it still has the known revision, which lets it act from the sending on."""
        sent = clock()
        try:
            self._revision = await self._publish(LeaseStatus(holder=self._instance, term=self._term, mark=self._mark, at=time.time()))
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
            raise nats.errors.ConnectionReconnectingError  # the client would keep the message and send it when nobody expects it
        headers = {"Nats-Expected-Last-Subject-Sequence": str(self._revision)}
        ack = await self._bus.js.publish(self._subject, status.encode(), timeout=self.timing.attempt, headers=headers)
        return ack.seq

    async def _read(self) -> tuple[int, LeaseStatus]:
        """Returns the lease's revision (0: it was never held) and its status."""
        try:
            message = await asyncio.wait_for(self._bus.js.get_last_msg(self._stream, self._subject), self.timing.attempt)
        except NotFoundError as error:
            if error.err_code != _NO_MESSAGE:
                raise MyxoError(f"the bus has no bucket for {self._name}: does the run exist there? (`myxo up` makes it)") from error
            return 0, LeaseStatus(holder="", term="", mark="", at=0.0)
        assert message.seq is not None and message.data is not None  # a stored message has both
        return message.seq, LeaseStatus.decode(message.data)

    def _end(self, error: LeaseLost) -> None:
        self._ended = self._ended or error
        self._until = float("-inf")
        self._renewed.set()


def clock() -> float:
    """Returns seconds that also pass while this machine sleeps, where the system can tell (Linux)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
