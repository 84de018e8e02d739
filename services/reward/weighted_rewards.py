"""Several rewards of one sample, each with its weight: their sum counts, and each stands beside it by its name."""

import asyncio
from collections.abc import Mapping

from services.reward.scorer import Scorer, shown
from shared.config.reward_section import WEIGHTED, RewardSection
from shared.environment.protocol import EnvironmentFailed
from shared.hooks import reward_values
from shared.rewards.names import queue_of
from shared.schema.message import MAX_PARTS
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score


class WeightedScorer(Scorer):
    """Scores by all of ``reward_weights``.

    Args:
        scorers: those of the run, by queue.
    """

    def __init__(self, config: RewardSection, scorers: Mapping[str, Scorer]) -> None:
        super().__init__(WEIGHTED, config.environment_concurrency)
        self._config, self._weights, self._scorers = config, config.reward_weights, scorers

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        calls = (self._scorers[queue_of(name)].score(group, shown(samples, name, self._config), name, None) for name in self._weights)
        of_names = dict(zip(self._weights, await asyncio.gather(*calls), strict=True))
        try:
            return [self._sum({name: scores[index] for name, scores in of_names.items()}, key) for index in range(len(samples))]
        except ValueError as error:
            raise EnvironmentFailed(WEIGHTED, str(error)) from None

    def _sum(self, scores: Mapping[str, Score], key: str | None) -> Score:
        total = sum(weight * scores[name].reward for name, weight in self._weights.items())
        parts = {name: score.reward for name, score in scores.items()}
        inner = {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
        named = dict(list({**parts, **inner}.items())[:MAX_PARTS])
        unread = "; ".join(score.unread for score in scores.values() if score.unread)
        counted = reward_values.counted(Score(reward=total, parts=named), key)
        return Score(reward=counted.reward, parts=counted.parts, unread=unread[:200])
