"""Reads the samples that a reference names, and refuses those that are not valid or not the group's: here a payload enters the run.

What is valid says `shared.schema.sample.Sample.problem`. What comes out of here may be scored, batched and trained.
"""

from dataclasses import replace

from shared.bus import runs
from shared.runtime.errors import BadMessage
from shared.schema import sample
from shared.schema.messages import Generated
from shared.schema.sample import Sample, SampleLimits
from shared.schema.versions import newest_possible
from shared.service.service_base import Service


class PayloadReader:
    """Reads groups out of the store. One for all queues of a service.

    Args:
        vocabulary: that of the run's model (`shared.bus.runs.vocabulary`).
    """

    def __init__(self, service: Service, vocabulary: int) -> None:
        self._service, self._limits = service, SampleLimits(vocabulary, log_probs_reader=service.config.log_probs_reader)
        self._newest = -1

    @classmethod
    async def open(cls, service: Service) -> "PayloadReader":
        """Returns the reader of a run's payloads."""
        return cls(service, await runs.vocabulary(service.bus, service.run))

    async def read(self, group: Generated) -> list[Sample]:
        """Returns a group's samples, all valid. Raises BadMessage, which names sample and field; PayloadChanged, PayloadMissing."""
        blobs = await self._service.store.read(group.payload)
        samples = sample.decode(blobs, self._limits)
        newest = max((version for item in samples for _, _, version in item.segments), default=0)
        if newest > self._newest:  # seldom: when a push has ended since
            live = await runs.live_version(self._service.bus, self._service.run)
            self._newest = newest_possible(live, self._service.config.rollout.max_staleness)
        if newest > self._newest:
            for item in samples:
                item.check(replace(self._limits, newest=self._newest))
        _check_reference(group, samples)
        return samples


def _check_reference(group: Generated, samples: list[Sample]) -> None:
    """Raises BadMessage where the samples are not those that the reference describes, by which batches are formed and divided."""
    if len(samples) != len(group.samples):
        raise BadMessage(f"{group.group}: the payload holds {len(samples)} samples, its reference {len(group.samples)}")
    if not samples:
        raise BadMessage(f"{group.group}: the payload holds no sample")
    lengths = tuple(item.length for item in samples)
    if lengths != group.payload.tokens:
        raise BadMessage(f"{group.group}: the payload's samples have {_few(lengths)} tokens, by its reference {_few(group.payload.tokens)}")
    if sample.rollouts(samples) != tuple(group.rollouts):
        raise BadMessage(f"{group.group}: the payload's samples come from other rollouts than its reference says")
    for position, (item, meta) in enumerate(zip(samples, group.samples, strict=True)):
        if (item.group, item.index) != (group.group, position):
            raise BadMessage(f"{group.group}: the payload holds sample {item.name[:100]} in the place of {group.group}/{position}")
        if item.meta() != meta:
            raise BadMessage(f"sample {item.name}: its reference says {meta}, the payload {item.meta()}")


def _few(lengths: tuple[int, ...]) -> str:
    return str(list(lengths[:8])) if len(lengths) <= 8 else f"{list(lengths[:8])} and {len(lengths) - 8} more"
