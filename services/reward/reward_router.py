"""Decides what scores a sample: the reward that it came with, else its own ``metadata.rm_type``, else what its group was sent to."""

from services.reward.scorer import Scorer, shown
from shared.config.eval_views import reward_key, reward_section
from shared.config.run_config import RunConfig
from shared.hooks import reward_values
from shared.process.worker_pool import WorkerFailed
from shared.rewards.names import queue_of
from shared.runtime.errors import BadMessage, nearest
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score


class RewardRouter:
    """Scores groups whose samples may name different environments: a generate function may change a sample's metadata.

    Args:
        scorers: every scorer of the run, by the name of its queue.
    """

    def __init__(self, config: RunConfig, scorers: dict[str, Scorer]) -> None:
        self._config, self._scorers = config, scorers

    async def score(self, group: Generated, samples: list[Sample]) -> list[Score]:
        """Returns one score a sample, in order. Raises as `Scorer.score` does, WorkerFailed for an unknown environment."""
        scores, key = dict[int, Score](), reward_key(self._config, group.group)
        if not self._config.reward.group_rm:  # a function that scores whole groups gets all of their samples, as with slime
            scores = {position: _given(sample, key) for position, sample in enumerate(samples) if sample.given_reward is not None}
        names = [None if position in scores else self._environment(group, sample) for position, sample in enumerate(samples)]
        for name in filter(None, dict.fromkeys(names)):
            positions = [position for position, other in enumerate(names) if other == name]
            asked = shown([samples[position] for position in positions], name, self._config.reward)
            found = await self._scorers[queue_of(name)].score(group, asked, name, key)
            scores.update(zip(positions, found, strict=True))
        return [scores[position] for position in range(len(samples))]

    def _environment(self, group: Generated, sample: Sample) -> str:
        named, reward = sample.metadata.get("rm_type"), reward_section(self._config, group.group)
        name, names = reward.environment_of(named) if named else group.environment, reward.environment_names()
        if name not in names:
            expected = nearest(name, names)
            raise WorkerFailed(f"sample {sample.name}: metadata.rm_type is {name[:80]!r}; the run has no such environment ({expected})")
        return name


def _given(sample: Sample, key: str | None) -> Score:
    """Returns the score that a generate function gave. Raises BadMessage."""
    try:
        return reward_values.read(sample.given_reward, key)
    except ValueError as error:
        raise BadMessage(f"sample {sample.name}: the reward that it was generated with: {error}") from None
