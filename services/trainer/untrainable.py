"""Samples that a batch cannot be trained with. The buffer hears of them, and in the end puts other groups in their place."""

from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from shared.runtime.errors import MyxoError
from shared.schema.message import Reason


@dataclass(frozen=True, order=True)
class RefusedSample:
    """A sample that cannot be trained: the first such one of its group, ``position`` in it.

    ``reason``: cut, for it may quote what the sample holds.
    """

    group: str
    position: int
    reason: Reason


class Untrainable(MyxoError):
    """The batch of ``step`` cannot be trained as it is.

    Args:
        samples: why; at least one, of each group one at most.
    """

    def __init__(self, step: int, samples: Sequence[RefusedSample]) -> None:
        self.step, self.samples = step, list(samples)
        first, others = self.samples[0], len(self.samples) - 1
        also = f", and {others} more groups" if others else ""
        super().__init__(f"step {step} cannot be trained with sample {first.group}/{first.position}: {first.reason}{also}")
