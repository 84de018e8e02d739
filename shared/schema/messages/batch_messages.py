"""The trainer's side of the buffer, request and reply: batches, and what became of them."""

from __future__ import annotations

from pydantic import Field

from shared.schema.messages.group_messages import Payload
from shared.schema.messages.message import Message, Part


class BatchRequest(Message):
    """Trainer asks for the batch of ``step``, to be trained on weights of ``version``. Subject ``<run>.buffer.batch``.

    Idempotent: a step that was batched before is answered with the very same groups. ``hold``: wait a moment for a batch that is not there
    yet; without it the answer comes at once.
    """

    step: int = Field(ge=0)
    version: int = Field(ge=0)
    hold: bool = True


class BatchGroup(Part):
    """One group of a batch, with the rewards of its samples in payload order.

    ``removed``: positions of samples that a filter took out of the loss. ``stale``: of samples that leave it because all their tokens are
    older than the batch's ``mask_below``.
    """

    group: str
    payload: Payload
    rewards: list[float]
    removed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()


class RewardPart(Part):
    """One named reward over the ``samples`` of a batch that have it. ``std``: the population's."""

    samples: int
    mean: float
    std: float
    min: float
    max: float


class BatchAnswer(Message):
    """Base of what a `BatchRequest` may be answered with."""


class Batch(BatchAnswer):
    """The groups of one training step. ``version``: the weight version that staleness was bounded against.

    ``mask_below``: tokens of older versions leave the loss. ``parts``: named rewards of its samples.
    """

    step: int
    version: int
    mask_below: int = 0
    groups: list[BatchGroup]
    parts: dict[str, RewardPart] = {}


class BatchPending(BatchAnswer):
    """No batch yet: ``have`` of ``need`` groups are ready; ``waiting_for`` says in words who has the rest."""

    step: int
    have: int
    need: int
    waiting_for: str


class RunDone(BatchAnswer):
    """Every step is trained and durable and the last evaluation is in, or the run has failed for ``reason``: the trainer may leave.

    ``rewards``: mean reward of each held-out dataset under ``version``, the newest that was evaluated; empty where none was.
    """

    version: int = -1
    rewards: dict[str, float] = {}
    reason: str = ""


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
