"""The wire schema: every message that crosses the control plane, in one file.

Each message is a pydantic model, MessagePack on the wire, in an envelope ``{"schema": 1, "kind": <class name>, ...fields}``.
A receiver refuses an unknown schema version, an unknown kind and a field that does not fit, with a `BadMessage` that names it.
The catalogue in ``docs/messages.md`` is generated from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from shared import codec
from shared.errors import BadMessage

SCHEMA = 1
"""Version of the wire schema. It grows when a field changes its meaning."""


_LARGEST_TOKEN = np.iinfo(np.int32).max


def _token_array(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, list) and all(isinstance(token, int) and abs(token) <= _LARGEST_TOKEN for token in value):
        value = np.asarray(value, dtype=np.int64)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if len(value) and (value.min() < 0 or value.max() > _LARGEST_TOKEN):
            raise ValueError(f"token ids lie between 0 and {_LARGEST_TOKEN}")
        return value.astype(np.int32, copy=False)
    raise ValueError("expected a one-dimensional array of token ids")


Tokens = Annotated[Any, BeforeValidator(_token_array)]
"""Token ids: int32 [T]."""


class Message(BaseModel):
    """Base of all messages: strict fields, MessagePack both ways."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Message.kinds[cls.__name__] = cls

    def encode(self) -> bytes:
        """MessagePack bytes of the envelope."""
        return codec.pack({"schema": SCHEMA, "kind": type(self).__name__, **self.model_dump(mode="python")})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads a message of this class (or, on a base class, any of its subclasses).

        Raises BadMessage, naming the field, for anything else.
        """
        fields = codec.unpack(data)
        if not isinstance(fields, dict):
            raise BadMessage(f"expected a {cls.__name__} message, got a {type(fields).__name__}")
        schema, kind = fields.pop("schema", None), fields.pop("kind", None)
        if schema != SCHEMA:
            raise BadMessage(f"{kind or cls.__name__}: schema version {schema!r} is unknown here; this side speaks {SCHEMA}")
        model = Message.kinds.get(str(kind))
        if model is None or not issubclass(model, cls):
            raise BadMessage(f"message kind {kind!r} where {cls.__name__} was expected")
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadMessage(f"{kind}.{where}: {first['msg']}") from error


# --- parts that messages are made of


class Part(BaseModel):
    """Base of the records inside messages."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class Sampling(Part):
    """How the engine samples. ``max_new_tokens``: tokens. ``stop`` holds strings, ``stop_token_ids`` ids."""

    temperature: float = Field(ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(gt=0)
    stop: list[str] = []
    stop_token_ids: list[int] = []


class Payload(Part):
    """Where a group's samples lie in the store: one or more blobs, ``bytes`` is their total size."""

    keys: list[str] = Field(min_length=1)
    bytes: int = Field(ge=0)


# not a `Part`: the buffer holds one for every sample in flight, in slots it takes a tenth of the memory
@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SampleMeta:
    """What decisions need of one sample without reading its payload.

    ``tokens``: length of the response. ``oldest``/``newest``: weight versions of its oldest and newest trained token.
    """

    tokens: int = Field(ge=0)
    oldest: int = Field(ge=0)
    newest: int = Field(ge=0)
    finish: Literal["stop", "length", "abort"]


class Score(Part):
    """The reward of one sample, finite; ``parts`` holds named rewards where the environment gives several."""

    reward: float = Field(allow_inf_nan=False)
    parts: dict[str, float] = {}


# --- the flow of a group


class Task(Message):
    """A group to generate: ``n`` samples of one prompt. Subject ``<run>.task.<class>``.

    ``min_version``: a replica on an older version hands the task back. ``attempt`` grows when a group is generated anew.
    """

    group: str
    attempt: int = Field(default=0, ge=0)
    n: int = Field(gt=0)
    prompt: str | list[dict[str, Any]]
    prompt_tokens: Tokens
    label: str | None = None
    metadata: dict[str, Any] = {}
    environment: str
    sampling: Sampling
    min_version: int = Field(ge=0)


class Generated(Message):
    """Samples of a group, finished and in the store, to be scored. Subject ``<run>.generated.<environment>``.

    ``started``/``ended``: seconds since the epoch, of the generation.
    """

    group: str
    attempt: int
    payload: Payload
    samples: list[SampleMeta]
    replica: str
    started: float
    ended: float


class Outcome(Message):
    """Base of what comes back to the buffer about one attempt at a group. Subject ``<run>.scored``."""

    group: str
    attempt: int


class Scored(Outcome):
    """Rewards of a group. ``scores`` has one entry a sample, in order."""

    payload: Payload
    samples: list[SampleMeta]
    scores: list[Score]
    replica: str
    environment: str
    started: float
    ended: float


class Failed(Outcome):
    """Generation or scoring (``by``) gave the group up; the buffer makes it ``dead`` and frees its payload, where it has one."""

    reason: str
    by: str
    payload: Payload | None = None


# --- the trainer's side, request and reply


class BatchRequest(Message):
    """Trainer asks for the batch of ``step``, to be trained on weights of ``version``. Subject ``<run>.buffer.batch``.

    Idempotent: a step that was batched before is answered with the very same groups.
    """

    step: int = Field(ge=0)
    version: int = Field(ge=0)


class BatchGroup(Part):
    """One group of a batch, with the rewards of its samples in payload order."""

    group: str
    payload: Payload
    samples: list[SampleMeta]
    rewards: list[float]


class BatchAnswer(Message):
    """Base of what a `BatchRequest` may be answered with."""


class Batch(BatchAnswer):
    """The groups of one training step. ``version``: the weight version that staleness was bounded against."""

    step: int
    version: int
    groups: list[BatchGroup]


class BatchPending(BatchAnswer):
    """No batch yet: ``have`` of ``need`` groups are ready; ``waiting_for`` says in words who has the rest."""

    step: int
    have: int
    need: int
    waiting_for: str


class RunDone(BatchAnswer):
    """Every step is trained and durable and the last evaluation is in: the trainer may leave."""


class Trained(Message):
    """Trainer reports ``step`` as trained into weights of ``version``. Subject ``<run>.buffer.trained``. Idempotent.

    ``started``/``ended``: seconds since the epoch. ``metrics``: what the step measured.
    """

    step: int = Field(ge=0)
    version: int = Field(ge=0)
    started: float
    ended: float
    metrics: dict[str, float] = {}


class Durable(Message):
    """A checkpoint holding every step below ``steps`` is on disk: their payloads may go. Subject ``<run>.buffer.durable``."""

    steps: int = Field(ge=0)


class Accepted(Message):
    """The receiver has done it, or recorded it durably."""


class Refused(Message):
    """The receiver will not do it; ``reason`` says why in one line."""

    reason: str


# --- weights


class WeightsOffer(Message):
    """Trainer asks whether a replica can take ``version`` now, before it builds a group.

    Subject ``<run>.rollout.<replica>.weights.offer``.
    """

    version: int


class WeightsPrepare(Message):
    """Trainer names the process group that will carry ``version`` to one replica, and its place there.

    ``rank``: of the replica's first engine rank in the group of ``world_size``. Subject ``<run>.rollout.<replica>.weights.prepare``.
    """

    version: int
    group: str
    backend: str
    master_address: str
    master_port: int
    rank: int
    world_size: int
    deadline: float = Field(gt=0)


class WeightsReady(Message):
    """Replica's answer: it holds ``version`` now (-1: none yet) and can take part; to a `WeightsPrepare`: its engine is in the group."""

    replica: str
    version: int


class WeightsBucket(Message):
    """One flattened bucket is about to be broadcast: tensors in order. Subject ``<run>.rollout.<replica>.weights.receive``."""

    version: int
    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    deadline: float = Field(gt=0)


class WeightsPause(Message):
    """Replica stops generating until commit or abort. Subject ``<run>.rollout.<replica>.weights.pause``."""

    version: int
    deadline: float = Field(gt=0)


class WeightsCommit(Message):
    """Every bucket of ``version`` is loaded: serve it. Subject ``<run>.rollout.<replica>.weights.commit``."""

    version: int
    deadline: float = Field(gt=0)


class WeightsAbort(Message):
    """The push of ``version`` failed for ``reason``: the replica is fenced until one succeeds."""

    version: int
    reason: str


class WeightsLive(Message):
    """Event and KV value ``weights/live``: ``version`` is served by ``replicas``; ``seconds``, ``bytes`` of its push."""

    version: int
    replicas: list[str]
    seconds: float
    bytes: int
    at: float


# --- events and registry


class TrainerStep(Message):
    """Event ``<run>.trainer.step``: what one step measured, for progress, charts and the summary."""

    step: int
    version: int
    started: float
    ended: float
    metrics: dict[str, float]


class ServiceEvent(Message):
    """Event ``<run>.service.<what>``: a service joined, left, was fenced, failed."""

    service: str
    instance: str
    what: str
    detail: str = ""
    at: float


class ServiceCard(Message):
    """KV ``services/<service>.<instance>``: who is alive and what it serves. Renewed by heartbeat, gone after its TTL.

    ``version``: weights served (-1: none). ``state``: starting, ready, updating, fenced, stopping, … ``gauges``: small live figures.
    ``ranks``: of its engine in a process group. ``incarnation`` changes whenever what the service holds in memory (an engine's
    weights) is lost. ``detail``: the reason of the state, in words. Service `environment` is none of ours: the reward services
    keep its card, with its URL as ``http``.
    """

    service: str
    instance: str
    host: str
    pid: int
    http: str
    engine: str = ""
    state: str
    version: int = -1
    incarnation: str = ""
    ranks: int = 1
    gauges: dict[str, float] = {}
    detail: str = ""
    at: float


class LeaseCard(Message):
    """KV ``leases/<job>``: who holds a leader's lease. ``term``: of one holder's one life; empty: free. ``mark``: `shared.liveness`."""

    holder: str
    term: str
    mark: str
    at: float
