"""A push of weights, request and reply, and the event that says what is live."""

from __future__ import annotations

from pydantic import Field

from shared.messages.base import Message


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
