"""Decides which scorer scores a sample: its own ``metadata.rm_type``, as in slime, else what its group was sent to."""

from services.reward.scorer import Scorer
from services.reward.worker_process import WorkerFailed
from shared.config.reward_section import RewardSection
from shared.rewards.names import queue_of
from shared.runtime.errors import nearest
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score


class RewardRouter:
    """Scores groups whose samples may name different environments: a generate function may change a sample's metadata.

    Args:
        scorers: every scorer of the run, by the name of its queue.
    """

    def __init__(self, config: RewardSection, scorers: dict[str, Scorer]) -> None:
        self._config, self._scorers = config, scorers
        self._names = config.environment_names()

    async def score(self, group: Generated, samples: list[Sample]) -> list[Score]:
        """Returns one score a sample, in order. Raises as `Scorer.score` does, WorkerFailed for an unknown environment."""
        names = [self._environment(group, sample) for sample in samples]
        scores: dict[int, Score] = {}
        for name in dict.fromkeys(names):
            positions = [position for position, other in enumerate(names) if other == name]
            found = await self._scorers[queue_of(name)].score(group, [samples[position] for position in positions], name)
            scores.update(zip(positions, found, strict=True))
        return [scores[position] for position in range(len(samples))]

    def _environment(self, group: Generated, sample: Sample) -> str:
        named = sample.metadata.get("rm_type")
        name = self._config.environment_of(named) if named else group.environment
        if name not in self._names:
            expected = nearest(name, self._names)
            raise WorkerFailed(f"sample {sample.name}: metadata.rm_type is {name[:80]!r}; the run has no such environment ({expected})")
        return name
