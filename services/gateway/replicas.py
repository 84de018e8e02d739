"""Decides which replica samples a turn, and how many at once, and asks it. `choose` and `GenerationLimit` are pure; `Replicas` holds the
registry's view. `Residents` decides which sessions' keys and values a replica keeps in its prefix cache; it is pure, too.

Never a replica without verified weights: such a one has no address in the registry. A session's turns go to the same replica while it has
room, whose prefix cache holds what they begin with; a new one waits until there is room for its keys and values, too. Each
session ranks the replicas by a hash of its own (rendezvous hashing), so that one that joins or leaves moves only the sessions that are its
own.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
import structlog

from shared.bus.bus_errors import TRANSIENT
from shared.bus.registry import ASLEEP, MODEL, Registry
from shared.formats.request import TurnRefused
from shared.runtime.errors import BadMessage, MyxoError
from shared.schema.service_messages import ServiceStatus
from shared.service.engine_load_balancer import FailedReplicas, probed_connector
from shared.sessions.session import (
    CONTENT_TYPE,
    CONTEXT_GAUGE,
    EVAL_GAUGE,
    GENERATE_PATH,
    KEPT_GAUGE,
    KEY_HEADER,
    LENGTH_BYTES,
    VOCABULARY_GAUGE,
    Session,
    SessionLog,
    TurnGeneration,
    TurnRequest,
)
from shared.sessions.session_store import SessionStore

HELD_SHARE = 0.9  # The share of a replica's tokens that resident sessions may have: the rest is for what running requests add
IDLE_SECONDS = 120.0  # The time without a turn after which others have taken a session's place in the cache


@dataclass(eq=False)
class Resident:
    """A session, or one that asks to be resident. tokens: of its newest turn. shared: of them, the leading ones that the other sessions of
    its group have as well. since, used: when it was admitted, and when its newest turn ended, monotonic seconds. running: its turns now.
    asked: when the store was asked last whether it has ended."""

    session: Session
    tokens: int
    shared: int = 0
    since: float = 0.0
    used: float = 0.0
    running: int = 0
    asked: float = 0.0

    @classmethod
    def asking(cls, log: SessionLog, tokens: int) -> "Resident":
        """Returns a session whose next turn begins with so many tokens."""
        first = next(iter(log.turns.values()), None)
        return cls(log.session, tokens, min(tokens, len(first.prompt) if first is not None else tokens))


@dataclass
class Residents:
    """The sessions that are resident at one replica. ``capacity``: tokens whose keys and values it keeps; 0: it keeps none, or does not say
    how many, and every session is admitted.

    An engine that is asked for more prefixes than its memory holds drops those that were used longest ago: where all sessions take turns,
    just those that come next, and each turn computes its whole conversation again. So sessions are admitted by the tokens that there is
    room for. One that is admitted is resident until it has ended or was idle for `IDLE_SECONDS`. While others wait, those that were
    admitted first make room after a while; where sessions grow beyond the room, those that were admitted last leave.
    """

    capacity: int = 0
    sessions: dict[str, Resident] = field(default_factory=dict)
    _kept: tuple[int, dict[str, int]] | None = None  # what `_counted` returns until it changes: those that wait ask again and again

    def fits(self, asking: Resident) -> bool:
        """Returns whether a session may have a turn here: it is resident, or there is room for it, or nothing else is here."""
        if not self.capacity or not self.sessions or asking.session.id in self.sessions:
            return True
        kept, shared = self._counted()
        further = max(0, asking.shared - shared.get(asking.session.group, 0)) + max(0, asking.tokens - asking.shared)
        return kept + further <= HELD_SHARE * self.capacity

    def admit(self, asking: Resident, now: float) -> Resident:
        """Returns the session as a resident with one more turn. Where it does not fit, those that were admitted first and have no turn make
        room."""
        leaving = self._idle(key=lambda one: -one.since)
        while leaving and not self.fits(asking):
            self.leave(leaving.pop())
        found = self.sessions.setdefault(asking.session.id, asking)
        found.since = found.since or now
        found.tokens, found.running, self._kept = asking.tokens, found.running + 1, None
        return found

    def ended(self, resident: Resident, now: float) -> None:
        """Notes the end of a resident's turn. Where residents have grown beyond their room, those that were admitted last leave."""
        resident.running, resident.used, self._kept = resident.running - 1, now, None
        leaving = self._idle(key=lambda one: one.since) if self.capacity else []
        while leaving and len(self.sessions) > 1 and self._counted()[0] > HELD_SHARE * self.capacity:
            self.leave(leaving.pop())

    def leave(self, resident: Resident) -> None:
        """Gives a session's room to others."""
        if self.sessions.get(resident.session.id) is resident:
            del self.sessions[resident.session.id]
            self._kept = None

    def idle(self) -> list[Resident]:
        """Returns the sessions without a turn, the longest idle first."""
        return self._idle(key=lambda one: one.used)

    def _idle(self, key: Callable[[Resident], float]) -> list[Resident]:
        return sorted((one for one in self.sessions.values() if not one.running), key=key)

    def _counted(self) -> tuple[int, dict[str, int]]:
        """Returns the tokens that are kept for sessions, what a group shares counted once, and of them the shared ones of each group."""
        if self._kept is None:
            shared, held = dict[str, int](), self.sessions.values()
            for one in held:
                shared[one.session.group] = max(shared.get(one.session.group, 0), one.shared)
            # a turn may begin with less than the group shares
            self._kept = sum(max(0, one.tokens - one.shared) for one in held) + sum(shared.values()), shared
        return self._kept


REFRESH_SECONDS = 0.5  # The interval at which the registry is read
BACKED_OFF = 0.75  # The share of its requests that a replica keeps when its engine had to take requests back
FEWEST = 4  # The least number of requests at once that a replica is given, where the config allows so many
RETRY_AFTER_S = 2.0
CROWDED_SECONDS = 0.25  # The interval at which a session that waits for room tries again
ASKED_AT_ONCE = 32  # The idle sessions of which one reading of the store says whether they have ended: their newest turns come along


@dataclass(frozen=True, slots=True)
class GenerationTarget:
    """A replica that may sample. ``url``: of its endpoint. ``context``: tokens of a sequence; ``vocabulary``: of token ids. ``kept``:
    tokens whose keys and values it keeps for later turns; 0: none. ``evaluates``: nothing but evaluations."""

    instance: str
    url: str
    version: int
    context: int
    vocabulary: int
    kept: int = 0
    evaluates: bool = False


@dataclass
class GenerationLimit:
    """A replica's requests at once: one more for each that ended well while all places were taken, fewer where memory lacks."""

    most: int
    limit: float = 0.0
    running: int = 0
    changed: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.limit = self.limit or float(self.most)

    @property
    def has_room(self) -> bool:
        return self.running < int(self.limit)

    def ended(self, retractions: int, now: float) -> None:
        """Notes a request's end. ``retractions``: how often its engine took it back; ``now``: monotonic seconds."""
        if retractions:
            if now - self.changed >= 1.0:  # the requests of one shortage report it together
                self.limit, self.changed = max(min(FEWEST, self.most), self.limit * BACKED_OFF), now
        elif self.running >= int(self.limit) - 1:
            self.limit = min(self.most, self.limit + 1.0 / self.limit)


def targets(statuses: Sequence[ServiceStatus], model: str = "") -> list[GenerationTarget]:
    """Returns the replicas that may sample: those with verified weights, whose endpoints are open to gateways. ``model``: a frozen one;
    empty: the policy."""
    kind = MODEL if model else "rollout"
    return [
        GenerationTarget(
            one.instance,
            one.engine,
            one.version,
            context=int(one.gauges[CONTEXT_GAUGE]),
            vocabulary=int(one.gauges[VOCABULARY_GAUGE]),
            kept=int(one.gauges.get(KEPT_GAUGE, 0)),
            evaluates=bool(one.gauges.get(EVAL_GAUGE, 0)),
        )
        for one in statuses
        if (one.service, one.model) == (kind, model) and one.engine and one.version >= 0
        if {CONTEXT_GAUGE, VOCABULARY_GAUGE} <= one.gauges.keys()
    ]


def choose(
    session: str,
    known: Sequence[GenerationTarget],
    min_version: int,
    room: Mapping[str, bool],
    avoided: Container[str],
    resident: Collection[str] = (),
) -> GenerationTarget | None:
    """Returns the replica that samples for a session: the first in the session's own order that is new enough and has room. ``room``: by
    instance. ``avoided``: instances that come last, since they have just failed. ``resident``: those that come first, since they keep the
    session's keys and values."""
    fitting = [one for one in known if one.version >= min_version and room.get(one.instance, True)]
    return min(fitting, key=lambda one: (one.instance in avoided, one.instance not in resident, _rank(session, one.instance)), default=None)


def _rank(session: str, instance: str) -> bytes:
    return hashlib.blake2b(f"{session}|{instance}".encode(), digest_size=8).digest()


class Replicas:
    """The replicas of a run, by the registry. ``most``: requests that a replica gets at once, at most. ``asleep``: whether replicas sleep
    while a trainer computes on their GPUs. ``apart``: evaluations have replicas of their own (`rollout.eval_replicas`). ``model``: the
    frozen one that they serve; empty: the policy. ``context``: the most tokens of a sequence that each takes, or took where there is none
    now; ``vocabulary``: of token ids; 0 before the first."""

    def __init__(self, registry: Registry, sessions: SessionStore, most: int, apart: bool = False, model: str = "") -> None:
        self._apart, self._model = apart, model
        self._registry, self._sessions, self._most = registry, sessions, most
        self.known: list[GenerationTarget] = []
        self.context = self.vocabulary = 0
        self.asleep = False
        self._limits: dict[str, GenerationLimit] = {}
        self._residents: dict[str, Residents] = {}
        self.waiting = 0
        self.failed = FailedReplicas()
        self._changed = asyncio.Event()

    async def keep(self) -> None:
        """Reads the registry again and again. Runs until cancelled."""
        log = structlog.get_logger()
        while True:
            try:
                statuses = await self._registry.alive()
                self.note(targets(statuses, self._model))
                self.asleep = any(one.state == ASLEEP for one in statuses if one.service == "rollout" and not self._model)
                self._share_residents(sum(one.service == "gateway" for one in statuses))
                await self._make_room(time.monotonic())
                self._wake()
            except (MyxoError, *TRANSIENT) as error:  # the view of before is the best there is
                log.warning("registry_not_read", error=str(error) or type(error).__name__)
            await asyncio.sleep(REFRESH_SECONDS)

    def note(self, known: list[GenerationTarget]) -> None:
        """Notes the replicas that there are now. What a sequence may be does not end with the last one's address."""
        self.known = known
        self.context = min((one.context for one in known), default=self.context)
        self.vocabulary = min((one.vocabulary for one in known), default=self.vocabulary)

    @property
    def running(self) -> int:
        return sum(limit.running for limit in self._limits.values())

    @property
    def most_generations(self) -> int:
        """Returns how many requests the replicas may have at once, as memory was there."""
        return sum(int(self._limit(one.instance).limit) for one in self.known)

    @staticmethod
    def check_version(wanted: int, fleet: Sequence[GenerationTarget]) -> None:
        """Raises TurnRefused where all replicas of a fleet are behind the version that a client asks for."""
        newest = max((one.version for one in fleet), default=None)
        if newest is not None and newest < wanted:
            message = f"the replicas serve version {newest}, older than the {wanted} that was asked for"
            raise TurnRefused(409, message, field="min_version", code="version_behind", retry_after_s=RETRY_AFTER_S)

    async def present(self, seconds: float) -> None:
        """Waits until there is a replica. Raises TurnRefused after so many seconds."""
        end = time.monotonic() + seconds
        while not self.known:
            end = await self._change(end, 0, evaluation=False)

    @asynccontextmanager
    async def place(
        self, log: SessionLog, tokens: int, min_version: int, seconds: float
    ) -> AsyncIterator[tuple[GenerationTarget, GenerationLimit, Resident]]:
        """Takes a place at a replica for a request of so many tokens; its session is resident there then, and the caller says how many
        tokens it has come to. Waits for so many seconds, for half of them until the session has room. Raises TurnRefused."""
        asking, end = Resident.asking(log, tokens), time.monotonic() + seconds
        while (found := self._choice(asking, min_version, end - seconds / 2)) is None:
            self.waiting += 1
            try:
                end = await self._change(end, min_version, log.session.evaluation)
            finally:
                self.waiting -= 1
        limit, residents = self._limit(found.instance), self._residents.setdefault(found.instance, Residents())
        resident = residents.admit(asking, time.monotonic())
        limit.running += 1
        try:
            yield found, limit, resident
        finally:
            limit.running -= 1
            residents.ended(resident, time.monotonic())
            self._wake()

    @property
    def residents(self) -> int:
        """Returns how many sessions' keys and values replicas are to keep."""
        return sum(len(residents.sessions) for residents in self._residents.values())

    async def _make_room(self, now: float) -> None:
        """Gives the room of sessions that were idle for long, and while turns wait that of sessions that have ended, to others."""
        idle = [(residents, one) for residents in self._residents.values() for one in residents.idle()]
        asked = sorted((one for _, one in idle), key=lambda one: (one.asked, one.used))[:ASKED_AT_ONCE] if self.waiting else []
        ended = await self._sessions.ended([one.session.id for one in asked])
        for one in asked:
            one.asked = now  # others come next
        for residents, one in idle:
            if one.session.id in ended or (now - one.used > IDLE_SECONDS and not one.running):
                residents.leave(one)

    def _share_residents(self, gateways: int) -> None:
        self._residents = {one.instance: self._residents.get(one.instance, Residents()) for one in self.known}
        for one in self.known:
            self._residents[one.instance].capacity = one.kept // max(1, gateways)

    def _choice(self, asking: Resident, min_version: int, patient_until: float) -> GenerationTarget | None:
        now, session = time.monotonic(), asking.session.id
        room = {one.instance: self._limit(one.instance).has_room and not self.failed.pausing(one.instance) for one in self.known}
        if now < patient_until:
            room = {name: free and (name not in self._residents or self._residents[name].fits(asking)) for name, free in room.items()}
        resident = [name for name, residents in self._residents.items() if session in residents.sessions]
        return choose(session, self.fleet(asking.session.evaluation), min_version, room, self.failed, resident)

    def fleet(self, evaluation: bool) -> list[GenerationTarget]:
        """Returns the replicas that sample for sessions of evaluations, or for those that are trained."""
        return [one for one in self.known if not self._apart or one.evaluates == evaluation]

    def _limit(self, instance: str) -> GenerationLimit:
        return self._limits.setdefault(instance, GenerationLimit(self._most))

    async def _change(self, end: float, min_version: int, evaluation: bool) -> float:
        """Waits for a change of the replicas. Returns ``end``, monotonic, later by the time for which replicas slept for a trainer. Raises
        TurnRefused at ``end``."""
        began, asleep, fleet = time.monotonic(), self.asleep, self.fleet(evaluation)
        left = REFRESH_SECONDS if asleep else end - began
        if left <= 0:
            self.check_version(min_version, fleet)
            if not fleet:
                purpose = f"is there for {'evaluations' if evaluation else 'training'} (rollout.eval_replicas)"
                lacks = f"no replica {purpose if self.known else 'serves verified weights'}"
                raise TurnRefused(503, lacks, code="no_replica", retry_after_s=RETRY_AFTER_S)
            raise TurnRefused(429, "all replicas have as many requests as they can take", code="no_room", retry_after_s=RETRY_AFTER_S)
        if any(self._limit(one.instance).has_room for one in fleet):  # weights lack, or the session's room:
            await asyncio.sleep(min(left, CROWDED_SECONDS))  # no request's end gives those
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return end + (time.monotonic() - began) * asleep

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


Hear = Callable[[TurnGeneration], None]  # gets each piece of a turn as it is sampled
SPARE_SECONDS = 5.0  # What an answer may take beyond the time that its request has


class ReplicaFailed(MyxoError):
    """A replica did not generate: it is gone, fenced or behind by now. Another may. ``busy``: it has no room."""

    def __init__(self, url: str, reason: str, *, busy: bool = False) -> None:
        self.busy = busy
        super().__init__(f"{url}: {reason}")


class GenerationClient:
    """Samples at replicas' endpoints, with the key that they and gateways share."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions, self._key = sessions, ""
        self._http = aiohttp.ClientSession(connector=probed_connector(), auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()

    async def generate(self, url: str, request: TurnRequest, hear: Hear | None = None) -> TurnGeneration:
        """Returns what a replica generates; of a streamed request ``hear`` gets each piece first, and what was heard is returned as aborted
        where the replica fails then. Raises ReplicaFailed; TurnRefused where the engine refuses the request for what it is."""
        status, body = await self._post(url, request, hear)
        if status == HTTPStatus.UNAUTHORIZED:  # the store was emptied, and the key made anew
            self._key = ""
            status, body = await self._post(url, request, hear)
        if isinstance(body, TurnGeneration):
            return body
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise TurnRefused(400, f"the engine refuses it: {_text(body)}")
        if status != HTTPStatus.OK:
            raise ReplicaFailed(url, f"answered {status}: {_text(body)}", busy=status == HTTPStatus.TOO_MANY_REQUESTS)
        try:
            return TurnGeneration.decode(body)
        except BadMessage as error:
            raise ReplicaFailed(url, f"gave an answer that cannot be read: {error}") from error

    async def _post(self, url: str, request: TurnRequest, hear: Hear | None) -> tuple[int, bytes | TurnGeneration]:
        self._key = self._key or await self._sessions.gateway_key() or ""
        timeout = aiohttp.ClientTimeout(total=request.seconds + SPARE_SECONDS)
        headers = {KEY_HEADER: self._key, "Content-Type": CONTENT_TYPE}
        try:
            async with self._http.post(url + GENERATE_PATH, data=request.encode(), headers=headers, timeout=timeout) as answer:
                if hear is not None and answer.status == HTTPStatus.OK:
                    return answer.status, await _heard(url, answer.content, hear)
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailed(url, f"gave no answer ({str(error) or type(error).__name__})") from error


async def _heard(url: str, content: aiohttp.StreamReader, hear: Hear) -> TurnGeneration:
    """Returns all pieces of an answer as one. Raises ReplicaFailed, and aiohttp's errors, where there is none."""
    whole: TurnGeneration | None = None
    try:
        while length := await content.read(LENGTH_BYTES):
            length += await content.readexactly(LENGTH_BYTES - len(length))
            piece = TurnGeneration.decode(await content.readexactly(int.from_bytes(length)))
            whole = piece if whole is None else whole.then(piece)
            hear(piece)
    except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, OSError, BadMessage) as error:
        if whole is None:  # what was heard is good, and is not sent again
            raise ReplicaFailed(url, f"broke its answer off ({str(error) or type(error).__name__})") from error
    if whole is None:
        raise ReplicaFailed(url, "gave an answer without a piece")
    return whole


def _text(body: bytes) -> str:
    return body[:500].decode(errors="replace")
