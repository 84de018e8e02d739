"""What every rank needs to know of every sample of a batch, also of those that others read: a row of numbers a sample.

Each rank fills the rows of its own samples and leaves the others 0; their sum over the data-parallel ranks is the whole table. From it all
ranks get the same loss weights and the same figures, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from services.trainer.batch_metrics import loops
from shared.schema import sample
from shared.schema.messages import Batch

Table = NDArray[np.float64]
Sum = Callable[[Table], Table]
"""The sum of a table over all data-parallel ranks."""


class StatColumn(IntEnum):
    """trained: tokens with mask 1. masked: tokens that left the loss for their age. response: tokens. rollout: the sample's, in its group.
    oldest: version of the oldest trained token, 0 where there is none. truncated: 1 where generation ran into its limit.
    looping: 1 where the response ends in a loop."""

    TRAINED = 0
    MASKED = 1
    RESPONSE = 2
    ROLLOUT = 3
    OLDEST = 4
    TRUNCATED = 5
    LOOPING = 6


@dataclass(frozen=True)
class SampleStats:
    """float64 [N, columns], exact for integers below 2^53."""

    table: Table

    def column(self, column: StatColumn) -> NDArray[np.float64]:
        """[N]."""
        return self.table[:, column]

    def integers(self, column: StatColumn) -> list[int]:
        """The column as integers."""
        return [int(value) for value in self.table[:, column]]


def table(size: int, samples: Mapping[int, sample.Sample], masks: Mapping[int, NDArray[np.uint8]], removed: set[int]) -> Table:
    """A rank's rows.

    Args:
        size: samples of the whole batch. samples, masks: this rank's, with the masks that training goes by. removed: samples that a filter
            took out of the loss; their tokens do not count as masked.
    """
    rows = np.zeros((size, len(StatColumn)))
    for number, one in samples.items():
        mask = masks[number]
        trained = int(np.count_nonzero(mask))
        rows[number] = (
            trained,
            0 if number in removed else int(np.count_nonzero(one.mask)) - trained,
            len(one.response),
            one.rollout,
            int(one.versions()[mask != 0].min()) if trained else 0,
            one.finish == "length",
            loops(one.response),
        )
    return rows


@dataclass(frozen=True)
class BatchMetrics:
    """What is known of a batch before training: means over samples, ages of trained samples in weight versions.

    masked_tokens: that leave the loss for their age, of samples that no filter removed.
    """

    reward: float
    response_tokens: int
    tokens: int
    truncated: float
    staleness_mean: float
    staleness_max: int
    zero_std_groups: float
    masked_tokens: int
    removed_samples: int


def figures(batch: Batch, facts: SampleStats) -> BatchMetrics:
    """The figures of a whole batch."""
    trained = facts.column(StatColumn.TRAINED) > 0
    ages = batch.version - facts.column(StatColumn.OLDEST)[trained] if trained.any() else np.zeros(1)
    return BatchMetrics(
        reward=float(np.mean([reward for group in batch.groups for reward in group.rewards])),
        response_tokens=int(facts.column(StatColumn.RESPONSE).sum()),
        tokens=sum(sum(group.payload.tokens) for group in batch.groups),
        truncated=float(facts.column(StatColumn.TRUNCATED).mean()),
        staleness_mean=float(ages.mean()),
        staleness_max=int(ages.max()),
        zero_std_groups=float(np.mean([len(set(group.rewards)) == 1 for group in batch.groups])),
        masked_tokens=int(facts.column(StatColumn.MASKED).sum()),
        removed_samples=sum(len(group.removed) for group in batch.groups),
    )
