"""A session's log, the state that its records fold to, its trajectories, and what a gateway asks of a replica. Pure: no clock, no I/O.

`services.rollout.agent_groups` makes samples of trajectories.

A session is one rollout of an agent: a key that opens it, and the turns that were sampled under it. Its records stand in one list of the
store, in the order in which they arrived; whoever reads the list folds it to the same state (`SessionLog`). So gateways hold nothing that
would die with them, and the order of the list settles every race:

- of two ends of a session, and of two ends of a turn, the first one counts;
- what arrives after a session's end changes nothing;
- a turn belongs to the gateway that began it until its lease runs out; then another may take it over, and continues from its tokens.

Trajectories: a turn whose prompt begins with the very tokens of its parent (prompt and completion) continues the parent's trajectory. Any
other begins one of its own; and where several turns continue the same one, the first carries the trajectory on and each other one forks: it
holds the same beginning, of which nothing is trained again. So every sampled token is trained exactly once.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StringConstraints

from shared.runtime.errors import MyxoError
from shared.schema.kept_tokens import Kept
from shared.schema.message import LARGEST, MAX_SPANS, Count, GroupId, Message, Name, Parts, Reason, Reward, Timestamp, Tokens
from shared.schema.messages import Sampling
from shared.schema.sample import segments_of

KEY_PREFIX = "sk-myxo-"
SECRET_BYTES = 24
Finish = Literal["stop", "length"]
TokenSpan = tuple[int, int, int]  # Tokens ``start`` to ``end`` (exclusive), all sampled under one weight ``version``


class SessionUnknown(MyxoError):
    """No session has this key: it was never opened, its secret is another one, or its record has expired."""


class SessionOver(MyxoError):
    """The session has ended: it takes no more turns."""


class TurnHeld(MyxoError):
    """Another request is generating this turn, here or at another gateway. ``until``: seconds since the epoch, when its lease runs out."""

    def __init__(self, request: str, until: float) -> None:
        self.until = until
        super().__init__(f"turn {request} is being generated for another request")


def _log_prob_array(value: object) -> NDArray[np.float32]:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "f":
        return value.astype(np.float32, copy=False)
    raise ValueError("expected a one-dimensional array of log-probs")


LogProbs = Annotated[Any, BeforeValidator(_log_prob_array)]  # Log-probs of tokens: float32 [T]


def _none() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


KeptTokens = Tokens  # The tokens that the sampler kept for each of T, where they are asked for, as `Kept.marked` has them
# The K likeliest tokens at each of T places, where they are asked for: (log-prob, id) of each, float32 [T K 2], which has ids exactly
TopLogProbs = LogProbs
MOST_TOP = 20  # K, as OpenAI has it
MOST_SHOWN = 1024  # The most pictures that a session shows in all its turns

# The id of a request for a turn: the client's own, or made from what it asked
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^\P{C}+$")]
Spans = Annotated[tuple[tuple[Count, Count, Count], ...], Field(max_length=MAX_SPANS)]
SecretDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # The SHA-256 of a secret, in hexadecimal digits
PictureName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # The SHA-256 of a picture as its client sent it
_SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,239}$"
SessionId = Annotated[str, StringConstraints(pattern=_SESSION_ID)]


class Session(Message):
    """The first record of a session: rollout number ``rollout`` of attempt ``attempt`` at a group.

    ``key_digest``: of its key's secret. ``deadline``: the end of its last turn. ``sampling``: how its tokens are sampled, where its client
    may not say so; ``seed``: by what, in engines with deterministic inference. ``min_version``: the oldest weight version that may
    generate for it. ``evaluation``: nothing of it is trained. ``opened``: when that was; ``replica``: who looks after its rollout.
    ``kept``: the tokens that samplers keep are asked for, with this ``top_k`` where ``sampling`` has none; 0: they are not. ``variables``:
    of the chat template, over the run's. ``environment``: what scores its sample.
    """

    id: SessionId
    group: GroupId
    rollout: Count
    attempt: Count
    key_digest: SecretDigest
    deadline: Timestamp
    sampling: Sampling
    seed: int | None = Field(default=None, ge=0, le=LARGEST)
    min_version: Count = 0
    evaluation: bool = False
    kept: Count = 0
    variables: dict[str, Any] = {}
    environment: str = Field(default="", max_length=128)
    opened: Timestamp | None = None
    replica: str = Field(default="", max_length=128)

    def opened_by(self, secret: str) -> bool:
        """Returns whether this is the secret of the session's key. It takes the same time for every wrong one."""
        return hmac.compare_digest(secret_digest(secret), self.key_digest)


class SampledTokens(Message):
    """Base of what says which tokens were sampled. ``spans`` tile them."""

    completion: Tokens
    log_probs: LogProbs
    spans: Spans
    top_log_probs: TopLogProbs = Field(default_factory=_none)
    kept: KeptTokens = Field(default_factory=_no_tokens)


class TurnRecord(Message):
    """Base of the records about one turn. ``holder``: the request at a gateway that writes it: GATEWAY.INCARNATION.REQUEST."""

    request: RequestId
    holder: Name


class TurnBegun(TurnRecord):
    """A gateway generates a turn, alone until its lease runs out at ``until``; ``at`` is its own time.

    The prompt is the first ``shared`` tokens of the turn ``parent`` (its prompt and completion together), and then ``rest``.
    ``pictures``: the names of all that it shows, in order; they lie beside the session.
    """

    at: Timestamp
    until: Timestamp
    parent: RequestId | None = None
    shared: Count = 0
    rest: Tokens
    pictures: Annotated[tuple[PictureName, ...], Field(max_length=MOST_SHOWN)] = ()


class TurnExtended(TurnRecord, SampledTokens):
    """More tokens of a turn, from its token number ``start`` on, which ``replica`` generated. ``spans`` count from there. It renews the
    turn's lease.
    """

    start: Count
    until: Timestamp
    replica: str = Field(default="", max_length=128)


class TurnEnded(TurnRecord, SampledTokens):
    """The whole completion of a turn. ``conversation``: the digest of the messages up to it, its answer among them; ``thought``: of the
    answer's reasoning. ``messages``: JSON of what the conversation has behind the turn ``after`` (empty: from its beginning), where it is
    stored; ``thread``: under which name. ``replica``: the one that generated its last tokens.
    """

    finish: Finish
    conversation: str = Field(default="", max_length=64)
    thought: str = Field(default="", max_length=64)
    messages: str = ""
    after: str = ""
    thread: str = Field(default="", max_length=64)
    cached: Count = 0
    replica: str = Field(default="", max_length=128)


RECORDED = tuple(TurnEnded.model_fields.keys() - {"holder"})  # The fields of a turn that its end has


class TurnRewarded(Message):
    """The reward of a turn that has ended, beside that of its session. Of several for a turn the first one counts."""

    request: RequestId
    reward: Reward


class ThreadExtended(Message):
    """Messages behind a stored conversation's last turn, as JSON, and the name by which requests continue it: its first record, or further
    ones. ``id``: of the record, which may be written twice."""

    id: str = Field(default_factory=lambda: secrets.token_hex(16), max_length=64)
    name: str = Field(min_length=1, max_length=64)
    messages: str


class SessionProlonged(Message):
    """A later deadline of a session: engines slept for a trainer on their GPUs, and that is not its rollout's time."""

    deadline: Timestamp


class SessionEnded(Message):
    """The end of a session. ``reward``: what the agent gave, a number or several by name; None: none, the environment scores."""

    at: Timestamp
    reward: Reward | Parts | None = None
    reason: Reason = ""


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn that has ended.

    prompt: int32 [P], all that the model read; completion: int32 [T]; log_probs: float32 [T], the engine's for exactly those tokens; spans
    tile [0, T). parent: the request id of the turn whose very tokens the prompt begins with. cached: prompt tokens that were not computed
    anew. replica: which generated its last tokens; empty: not known. conversation, thought, messages, after, thread: as in `TurnEnded`.
    top_log_probs, kept: as in `TopLogProbs` and `KeptTokens`; empty: not asked for. pictures: as in `TurnBegun`.
    """

    request: str
    parent: str | None
    prompt: NDArray[np.int32]
    completion: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    spans: tuple[TokenSpan, ...]
    finish: Finish
    conversation: str = ""
    thought: str = ""
    messages: str = ""
    after: str = ""
    thread: str = ""
    cached: int = 0
    replica: str = ""
    top_log_probs: NDArray[np.float32] = field(default_factory=_none)
    kept: NDArray[np.int32] = field(default_factory=_no_tokens)
    pictures: tuple[str, ...] = ()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Returns prompt and completion: int32 [P + T]."""
        return np.concatenate([self.prompt, self.completion])


@dataclass(eq=False)
class PendingTurn:
    """A turn that is being generated: by ``holder``, until its lease runs out, or is taken over from there. Arrays as in `Turn`."""

    request: str
    holder: str
    until: float
    parent: str | None
    prompt: NDArray[np.int32]
    completion: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: NDArray[np.float32] = field(default_factory=_none)
    spans: tuple[TokenSpan, ...] = ()
    replica: str = ""
    top_log_probs: NDArray[np.float32] = field(default_factory=_none)
    kept: NDArray[np.int32] = field(default_factory=_no_tokens)
    pictures: tuple[str, ...] = ()


@dataclass(eq=False)
class SessionLog:
    """The state of a session: the fold of its log.

    turns: by request id, in the order of their ends. pending: those that have begun and not ended. length: records that were read.
    deadline: of its last turn, seconds since the epoch. rewards: those of turns, by request id. threads: by the name of a stored
    conversation its last turn, if there is one, and the JSON of the messages behind that, by their records' ids.
    """

    session: Session
    turns: dict[str, Turn] = field(default_factory=dict)
    pending: dict[str, PendingTurn] = field(default_factory=dict)
    ended: SessionEnded | None = None
    length: int = 1
    deadline: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    threads: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deadline = max(self.deadline, self.session.deadline)

    def apply(self, records: Iterable[Message]) -> None:
        """Folds further records, in the order of the log."""
        for record in records:
            self.length += 1
            if self.ended is not None:
                continue
            if isinstance(record, SessionEnded):
                self.ended = record
            elif isinstance(record, SessionProlonged):
                self.deadline = max(self.deadline, record.deadline)
            elif isinstance(record, TurnRewarded):
                self.rewards.setdefault(record.request, record.reward)
            elif isinstance(record, ThreadExtended):
                turn, further = self.threads.get(record.name, ("", {}))
                self.threads[record.name] = turn, {**further, record.id: record.messages}
            elif isinstance(record, TurnRecord) and record.request not in self.turns:
                self._apply_turn(record)

    def _apply_turn(self, record: TurnRecord) -> None:
        pending = self.pending.get(record.request)
        if isinstance(record, TurnBegun):
            self._begin(record, pending)
        elif pending is None or pending.holder != record.holder:
            return  # by a gateway that had lost the turn to another
        elif isinstance(record, TurnExtended):
            if record.start == len(pending.completion):  # else it was written twice
                vars(pending).update(appended(pending, record))
                pending.until, pending.replica = max(pending.until, record.until), record.replica
        elif isinstance(record, TurnEnded):
            del self.pending[record.request]
            own = {name: getattr(record, name) for name in RECORDED}
            self.turns[record.request] = Turn(parent=pending.parent, prompt=pending.prompt, pictures=pending.pictures, **own)
            if record.thread:
                self.threads[record.thread] = record.request, {}

    def _begin(self, record: TurnBegun, pending: PendingTurn | None) -> None:
        if pending is None:
            prompt = self.prompt_of(record.parent, record.shared, record.rest)
            head = (record.request, record.holder, record.until, record.parent)
            self.pending[record.request] = PendingTurn(*head, prompt, pictures=record.pictures)
        else:
            take_over(pending, record)

    def prompt_of(self, parent: str | None, shared: int, rest: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the prompt that a `TurnBegun` describes: int32 [P]."""
        if parent is None or parent not in self.turns:
            return np.asarray(rest, np.int32)
        return np.concatenate([self.turns[parent].tokens[:shared], rest])

    def extended(self, prompt: NDArray[np.int32], pictures: tuple[str, ...] | None = None) -> Turn | None:
        """Returns the turn with the most tokens that the prompt begins with, of several the newest; None where there is none. ``pictures``:
        the names of those that the prompt shows; None: those of the turn."""
        longest = sorted(reversed(self.turns.values()), key=lambda turn: -len(turn.prompt) - len(turn.completion))
        return next((turn for turn in longest if extends(prompt, turn, pictures)), None)


def appended(before: Any, further: Any) -> dict[str, Any]:
    """Returns the sampled tokens of a turn, and what is known of each, with those that continue them."""
    names = ("completion", "log_probs", "top_log_probs", "kept")
    arrays = {name: np.concatenate([getattr(before, name), getattr(further, name)]) for name in names}
    return arrays | {"spans": joined(before.spans, further.spans, len(before.completion))}


def joined(spans: Iterable[TokenSpan], further: Iterable[TokenSpan], offset: int) -> tuple[TokenSpan, ...]:
    """Returns spans that are followed by ``further`` ones, which count from ``offset``; neighbours of one version become one."""
    found = list(spans)
    for start, end, version in further:
        if found and found[-1][2] == version:
            found[-1] = (found[-1][0], offset + end, version)
        else:
            found.append((offset + start, offset + end, version))
    return tuple(found)


def extends(prompt: NDArray[np.int32], turn: Turn, pictures: tuple[str, ...] | None = None) -> bool:
    """Returns whether a prompt begins with the turn's very tokens, and, where they are given, the same ``pictures``."""
    if pictures is not None and pictures[: len(turn.pictures)] != turn.pictures:
        return False
    cut, end = len(turn.prompt), len(turn.prompt) + len(turn.completion)
    return end <= len(prompt) and np.array_equal(prompt[:cut], turn.prompt) and np.array_equal(prompt[cut:end], turn.completion)


def new_key(session: str) -> tuple[str, str]:
    """Returns a new key of a session, and the digest of its secret, which is all that is stored of it."""
    secret = secrets.token_hex(SECRET_BYTES)
    return f"{KEY_PREFIX}{session}-{secret}", secret_digest(secret)


def parts_of_key(key: str) -> tuple[str, str]:
    """Returns the session's id and the secret that a key holds. Raises SessionUnknown for what is no key."""
    session, dash, secret = key.removeprefix(KEY_PREFIX).rpartition("-")
    if not (key.startswith(KEY_PREFIX) and dash and secret and re.fullmatch(_SESSION_ID, session)):
        raise SessionUnknown("this is no key of a session: they begin with " + KEY_PREFIX)
    return session, secret


def secret_digest(secret: str) -> str:
    """Returns the SHA-256 of a secret in hexadecimal digits."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


@dataclass
class TurnLease:
    """Who generates a turn, until when (seconds since the epoch); ``tokens``: recorded of it."""

    holder: str
    until: float
    tokens: int = 0


def take_over(pending: PendingTurn | TurnLease, record: TurnBegun) -> bool:
    """Has a pending turn held by whoever begins it again: its holder, or another once the lease is over. Returns whether it is."""
    if takes := pending.holder == record.holder or pending.until <= record.at:
        pending.holder, pending.until = record.holder, record.until
    return takes


@dataclass
class SessionProgress:
    """``length``: records that were read. ``turns``: that have ended. ``tokens``: generated in them, and recorded of the pending ones.

    ``asked``: when the newest turn began, seconds since the epoch; ``context``: tokens of its prompt and completion. ``gateway``: who
    generates or generated it; ``engine``: the replica of the newest tokens. ``oldest``, ``newest``: weight versions of the tokens.
    """

    session: Session
    length: int = 1
    turns: int = 0
    tokens: int = 0
    asked: float | None = None
    context: int = 0
    gateway: str = ""
    engine: str = ""
    oldest: int | None = None
    newest: int | None = None
    ended: bool = False
    _pending: dict[str, TurnLease] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    @property
    def pending(self) -> int:
        """Returns how many turns have begun and not ended."""
        return len(self._pending)

    def apply(self, records: Iterable[Message]) -> None:
        """Takes further records, in the order of the log."""
        for record in records:
            self.length += 1
            if self.ended:
                continue
            match record:
                case SessionEnded():
                    self.ended = True
                case SessionProlonged(deadline=deadline):
                    self.session = self.session.model_copy(update={"deadline": max(deadline, self.session.deadline)})
                case TurnBegun(request=request) if request not in self._done:
                    self._begin(record)
                case TurnExtended(start=start) if (lease := self._held(record)) is not None and lease.tokens == start:
                    lease.tokens, lease.until = start + len(record.completion), max(lease.until, record.until)
                    self._generation_of(len(record.completion), record)
                case TurnEnded(request=request) if (lease := self._held(record)) is not None:
                    self._generation_of(len(record.completion) - lease.tokens, record)
                    del self._pending[request]
                    self._done.add(request)
                    self.turns += 1

    def _held(self, record: TurnRecord) -> TurnLease | None:
        lease = self._pending.get(record.request)
        return lease if lease is not None and lease.holder == record.holder else None

    def _begin(self, record: TurnBegun) -> None:
        lease = self._pending.get(record.request)
        if lease is None:
            self._pending[record.request] = TurnLease(record.holder, record.until)
            self.asked = record.at
            self.context = record.shared + len(record.rest)
        elif not take_over(lease, record):
            return
        self.gateway = record.holder

    def _generation_of(self, tokens: int, record: TurnExtended | TurnEnded) -> None:
        self.tokens += tokens
        self.context += tokens
        self.engine, self.gateway = record.replica or self.engine, record.holder
        known = [one for one in (self.oldest, self.newest, *(version for _, _, version in record.spans)) if one is not None]
        self.oldest, self.newest = min(known, default=None), max(known, default=None)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A conversation's tokens as a model read and wrote them, in the arrays of a `shared.schema.sample.Sample`.

    prompt: int32 [P], that of its first turn; response: int32 [R], all that follows; mask: uint8 [R], 1 where the token was sampled and no
    earlier trajectory trains it; sampled: bool [R]; log_probs: float32 [R], 0 where a token was not sampled; segments tile [0, R):
    what was not sampled has the version of what was sampled before it. finish: of the last turn. turns: the request ids of its turns;
    spans: (start, end) of the response's tokens that each of them sampled. kept: the tokens that samplers kept, if they were asked for.
    pictures: the names of what its tokens show, in order.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    mask: NDArray[np.uint8]
    sampled: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    segments: list[tuple[int, int, int]]
    finish: Finish
    turns: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    kept: Kept | None = None
    pictures: tuple[str, ...] = ()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Returns prompt and response: int32 [P + R]."""
        return np.concatenate([self.prompt, self.response])


@dataclass
class _Path:
    """The turns from a conversation's beginning to its end; ``forked``: how many of the first are trained elsewhere."""

    turns: list[Turn] = field(default_factory=list)
    forked: int = 0


def trajectories(turns: Iterable[Turn]) -> list[Trajectory]:
    """Returns the trajectories of a session's turns, in the order of their first own turn. Turns without a token are left out."""
    return [_trajectory(path) for path in _paths([turn for turn in turns if len(turn.completion)])]


def _paths(turns: Sequence[Turn]) -> list[_Path]:
    ends: dict[str, _Path] = {}  # the path on which a turn lies, by its request id: the one that trains it
    paths: list[_Path] = []
    for turn in turns:
        before = ends.get(turn.parent) if turn.parent is not None else None
        position = -1 if before is None else [one.request for one in before.turns].index(str(turn.parent))
        if before is None or not extends(turn.prompt, before.turns[position], turn.pictures):
            path = _Path([turn])
            paths.append(path)
        elif position == len(before.turns) - 1:
            path = before
            path.turns.append(turn)
        else:
            path = _Path([*before.turns[: position + 1], turn], forked=position + 1)
            paths.append(path)
        ends[turn.request] = path
    return paths


def _trajectory(path: _Path) -> Trajectory:
    first, last = path.turns[0], path.turns[-1]
    tokens, start = last.tokens, len(first.prompt)
    length = len(tokens) - start
    mask, log_probs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    versions, sampled = np.full(length, -1, np.int32), np.zeros(length, np.bool_)
    counts, ids = np.zeros(length, np.int32), [_no_tokens()]
    for index, turn in enumerate(path.turns):
        begin = len(turn.prompt) - start
        end = begin + len(turn.completion)
        mask[begin:end] = index >= path.forked
        sampled[begin:end] = True
        log_probs[begin:end] = turn.log_probs
        for span_start, span_end, version in turn.spans:
            versions[begin + span_start : begin + span_end] = version
        if len(turn.kept):
            own = Kept.unmarked(turn.kept)
            counts[begin : begin + len(own.counts)] = own.counts
            ids.append(own.ids)
    return Trajectory(
        prompt=first.prompt,
        response=tokens[start:],
        mask=mask,
        sampled=sampled,
        log_probs=log_probs,
        segments=segments_of(_filled(versions)),
        finish=last.finish,
        turns=tuple(turn.request for turn in path.turns),
        spans=tuple((len(turn.prompt) - start, len(turn.prompt) - start + len(turn.completion)) for turn in path.turns),
        kept=Kept.counted(counts, np.concatenate(ids)) if len(ids) > 1 else None,
        pictures=last.pictures,
    )


def _filled(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns versions in which each entry of -1 has that of the entry before it. The first is never -1: a completion begins there."""
    known = np.maximum.accumulate(np.where(versions >= 0, np.arange(len(versions)), 0))
    return versions[known]


GENERATE_PATH = "/internal/generate"
KEY_HEADER = "X-Myxo-Gateway-Key"
CONTENT_TYPE = "application/msgpack"
LENGTH_BYTES = 4  # Before each piece of an answer that is streamed: its length, in network order

# Gauges of a replica's status: the most tokens of one sequence, and the number of token ids
CONTEXT_GAUGE, VOCABULARY_GAUGE, KEPT_GAUGE = "engine_context", "engine_vocabulary", "engine_kept_tokens"
EVAL_GAUGE = "eval_replica"  # Of a replica's status, too: 1 where it takes held-out prompts alone (`rollout.eval_replicas`)


class TurnRequest(Message):
    """Generate the tokens that follow ``input_ids``.

    ``seed``: by it and the token's position, in an engine with deterministic inference. ``min_version``: by weights of this version at
    least. ``structural_tag``: the grammar that holds the tokens, of xgrammar; empty: none. ``top_count``: so many of the likeliest
    tokens are reported at each place. ``kept``: as in `Session`. ``weights``: the directory of a client's (`myxo serve`); empty: the
    base; None: what the replica serves. ``pictures``: PNGs of what the input shows, in order. ``scores_prompt``: log-probs of the input,
    too. ``seconds``: the most it may take. ``stream``:
    answered by pieces as they are generated: each is a `TurnGeneration`, and continues where the one before ended; all but the last have
    ``finish`` ``abort``, as which they count where nothing follows.
    """

    request: RequestId
    input_ids: Tokens
    sampling: Sampling
    seed: int | None = Field(default=None, ge=0, le=LARGEST)
    min_version: Count = 0
    seconds: float = Field(gt=0)
    stream: bool = False
    structural_tag: str = ""
    top_count: int = Field(default=0, ge=0, le=MOST_TOP)
    kept: Count = 0
    weights: str | None = Field(default=None, max_length=4096)
    scores_prompt: bool = False
    pictures: Annotated[tuple[bytes, ...], Field(max_length=MOST_SHOWN)] = ()


class TurnGeneration(SampledTokens):
    """What was generated. ``spans`` tile the completion.

    ``cached``: input tokens whose keys and values were there already. ``retractions``: how often the engine took the request back for want
    of memory. ``prompt_log_probs``: of the input's tokens, where they were asked for; NaN for the first.
    """

    finish: Finish | Literal["abort"]
    cached: Count = 0
    retractions: Count = 0
    prompt_log_probs: LogProbs = Field(default_factory=_none)

    def then(self, piece: "TurnGeneration") -> "TurnGeneration":
        """Returns this with the piece that goes on where it ends."""
        return TurnGeneration(finish=piece.finish, cached=self.cached, retractions=piece.retractions, **appended(self, piece))

    def stopped_at(self, count: int) -> "TurnGeneration":
        """Returns its first ``count`` tokens, as a turn that stops there."""
        spans = tuple((start, min(end, count), version) for start, end, version in self.spans if start < count)
        top = self.top_log_probs[: count * len(self.top_log_probs) // max(1, len(self.completion))]
        cut = {"completion": self.completion[:count], "log_probs": self.log_probs[:count], "spans": spans, "top_log_probs": top}
        return self.model_copy(update={**cut, "kept": Kept.unmarked(self.kept).part(0, count).marked(), "finish": "stop"})

    def framed(self) -> bytes:
        """Returns it as a piece of an answer that is streamed."""
        encoded = self.encode()
        return len(encoded).to_bytes(LENGTH_BYTES) + encoded
