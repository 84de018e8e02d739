"""A model as judge of a whole group: it compares two responses at a time, in the pairs of a tournament."""

import asyncio
import random
from collections.abc import Sequence

from services.reward.judge import filled, last_match, worth
from services.reward.judge_calls import JudgeCalls, task_of
from services.reward.scorer import Scorer
from services.reward.tournament import FORMS
from shared.config.reward_section import TOURNAMENT, RewardSection
from shared.environment.protocol import EnvironmentFailed, words
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score


class GroupJudge(Scorer):
    """Plays the tournament ``judge_tournament`` among the samples of a group; each gets the share of the others that it is placed before.

    A comparison of which the judge's words say no winner is a tie, and counted as ``unread`` for both.
    """

    def __init__(self, config: RewardSection, calls: JudgeCalls) -> None:
        super().__init__(TOURNAMENT, config.environment_concurrency)
        self._config, self._calls = config, calls

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        if len(samples) < 2:
            raise EnvironmentFailed(TOURNAMENT, f"group {group.group} has one sample to be scored: a tournament takes two at least")
        unread: dict[int, str] = {}
        form = FORMS[self._config.judge_tournament](len(samples), random.Random(group.group))
        pairs = next(form)
        while True:
            points = await asyncio.gather(*(self._compared(samples, pair, unread) for pair in pairs))
            try:
                pairs = form.send(points)
            except StopIteration as end:
                return [Score(reward=reward, unread=unread.get(index, "")) for index, reward in enumerate(end.value)]

    async def _compared(self, samples: Sequence[Sample], pair: tuple[int, int], unread: dict[int, str]) -> float:
        """Returns the points of the first of a pair, 0 to 1: where both orders are asked, their mean."""
        first, second = pair
        try:
            there = await self._points(samples[first], samples[second])
            back = await self._points(samples[second], samples[first]) if self._config.judge_both_orders else 1 - there
        except ValueError as error:
            unread[first] = unread[second] = words(f"{TOURNAMENT}: {error}")
            return 0.5
        return (there + 1 - back) / 2

    async def _points(self, first: Sample, second: Sample) -> float:
        """Returns the points of the first where the judge reads it first. Raises ValueError where its words say no winner."""
        parts = {**task_of(first), "first": first.text, "second": second.text}
        said = await self._calls.said(filled(self._config.judge_pair_prompt, parts))
        found = last_match("judge_pair_pattern", self._config.judge_pair_pattern, said)
        return worth("judge_pair_points", self._config.judge_pair_points, found)
