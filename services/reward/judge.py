"""A model as judge of each response: what it says of one holds the reward."""

import asyncio
import re
from collections.abc import Mapping

from services.reward.judge_calls import JudgeCalls, task_of
from services.reward.scorer import Scorer
from shared.config.reward_section import JUDGE, RewardSection
from shared.environment.protocol import shown, words
from shared.hooks import reward_values
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score

_FIELD = re.compile(r"\{(\w+)\}")


class Judge(Scorer):
    """Asks the judge for each sample."""

    def __init__(self, config: RewardSection, calls: JudgeCalls) -> None:
        super().__init__(JUDGE, config.environment_concurrency)
        self._config, self._calls = config, calls

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await asyncio.gather(*(self._score(sample) for sample in samples))

    async def _score(self, sample: Sample) -> Score:
        verdict = await self._calls.said(filled(self._config.judge_prompt, {**task_of(sample), "response": sample.text}))
        try:
            return reward_values.read(score_in(self._config, verdict), None)
        except ValueError as error:
            return Score(reward=0.0, unread=words(f"{JUDGE}: {error}"))


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Returns a template with each ``{name}`` of ``parts`` replaced, once: what a part holds stays as it is."""
    return _FIELD.sub(lambda field: parts.get(field[1], field[0]), template)


def last_match(field: str, pattern: str, verdict: str) -> str:
    """Returns the last match of a pattern in the judge's words. Raises ValueError where there is none. ``field``: the pattern's."""
    found = re.findall(pattern, verdict)
    if not found:
        raise ValueError(f"no match of {field} in {shown(verdict[-80:])}")
    return str(found[-1]).strip()


def worth(field: str, scores: Mapping[str, float], word: str) -> float:
    """Returns what a word of the judge is worth. Raises ValueError for another. ``field``: of the config, which holds ``scores``."""
    known = {name.casefold(): score for name, score in scores.items()}
    if word.casefold() not in known:
        raise ValueError(f"{shown(word)} is not one of {field}: {', '.join(scores)}")
    return known[word.casefold()]


def score_in(config: RewardSection, verdict: str) -> float:
    """Returns the score in a judge's words. Raises ValueError where there is none."""
    found = last_match("judge_pattern", config.judge_pattern, verdict)
    if config.judge_scores:
        return worth("judge_scores", config.judge_scores, found)
    try:
        return float(found)
    except ValueError:
        raise ValueError(f"{shown(found)} is no number; judge_scores says what words are worth") from None
