"""Scores the groups of one environment: by a verifier of our own, by the user's function, or by an environment outside of Myxo."""

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from pydantic import ValidationError

from services.reward.environment_health import EnvironmentHealthCheck
from services.reward.scoring_pools import HooksPool, Verification, VerifierPool
from shared.config.reward_section import CUSTOM, WEIGHTED, RewardSection
from shared.config.run_config import RunConfig
from shared.environment.environment import Environment
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed, ScoreRequest, ScoreSample
from shared.hooks import reward_values
from shared.rewards.names import GIVEN, needs_label
from shared.rewards.reference import label_problem
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score, scored_text
from shared.workers.worker_process import WorkerFailed

IN_HAND = 4
"""The number of groups in progress for each verifier process: the next one's payload is read while this one is scored."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
"""Seconds between tries while an environment cannot be reached."""


class Scorer(ABC):
    """Scores whole groups.

    Args:
        name: of the environment. limit: groups in hand at once. open_: set while groups may be taken from the queue; None: always.
    """

    def __init__(self, name: str, limit: int, open_: asyncio.Event | None = None) -> None:
        self.name, self.limit = name, limit
        self.open = open_ or asyncio.Event()
        if open_ is None:
            self.open.set()

    @abstractmethod
    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        """Returns one score a sample, in order, within the run's `reward_timeout`.

        Args:
            environment: what scores these samples of the group: one of those of this scorer's queue. key: the name of the reward that
                counts, where there are several.

        Raises WorkerFailed, EnvironmentFailed, BadMessage or DeadlineExceeded: the group is given up.
        """


def shown(samples: list[Sample], environment: str, config: RewardSection) -> list[Sample]:
    """Returns samples whose text is what ``scored_text`` has scored; a function of the user's gets all of it, as slime has it."""
    if environment in (CUSTOM, WEIGHTED):  # the latter shows each of its own its samples
        return samples
    return [replace(item, text=scored_text(item.text, item.turns, config.scored_text)) for item in samples]


_UNSCORED = (
    "a sample came without a reward, and nothing is named that scores it: let the function that generates it set sample.reward, or give "
    "rm_type, custom_rm_path or the prompt's metadata.rm_type"
)


class VerifierScorer(Scorer):
    """The verifiers of `shared.rewards.verifiers` that share a queue."""

    def __init__(self, queue: str, pool: VerifierPool, config: RunConfig) -> None:
        super().__init__(queue, config.reward.reward_workers * IN_HAND)
        self._pool, self._config, self._reward = pool, config, config.reward

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        first, *others = references = [sample.reference for sample in samples]
        taught = self._config.algorithm.use_opd
        for reference in references:
            if environment == GIVEN:
                raise WorkerFailed(_UNSCORED)
            if (problem := label_problem(environment, reference, taught=taught)) is not None:
                came = "; its sample came without a reward" if self._config.may_give_rewards else ""
                raise WorkerFailed(f"verifier {environment}: the label: {problem}{came}")
        if taught and first.label is None and needs_label(environment):
            return [Score(reward=0.0) for _ in samples]
        asked = Verification(
            environment,
            [sample.text for sample in samples],
            references if any(reference != first for reference in others) else [first],
            self._reward.answer_pattern if environment == self._reward.rm_type else None,
            key,
        )
        try:
            return await self._pool.score(asked, self._reward.reward_timeout)
        except ConfigError as error:  # a prompt names a verifier whose package is missing here
            raise WorkerFailed(str(error)) from None


class CustomScorer(Scorer):
    """The user's own function, in the started processes of the run's functions. If it is async, it may have many groups waiting."""

    def __init__(self, pool: HooksPool, config: RewardSection) -> None:
        super().__init__(CUSTOM, max(config.reward_workers * IN_HAND, pool.scores_at_once or 0))
        self._pool = pool

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await self._pool.score(samples, key)


class ExternalScorer(Scorer):
    """An environment outside of Myxo. Its health check tells whether it is reachable; groups that it had when it left are tried again."""

    def __init__(self, environment: Environment, health: EnvironmentHealthCheck, config: RunConfig) -> None:
        super().__init__(environment.name, config.reward.environment_concurrency, health.reachable)
        self._environment, self._health, self._config, self._timeout = environment, health, config, config.reward.reward_timeout

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        request = _request(self._config.run.name, group, samples)
        end, pause = time.monotonic() + self._timeout, FIRST_PAUSE
        reason = ""
        while (left := end - time.monotonic()) > 0:
            try:
                return self._counted(await self._environment.score(request, left), key)
            except EnvironmentAway as error:
                reason = error.reason
                self._health.lost(reason)
                await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE)
            except DeadlineExceeded:
                reason = f"it did not answer; before that: {reason}" if reason else "it did not answer"
                break
        next_action = f"the group is given up ({reason})"
        raise DeadlineExceeded(f"{len(samples)} rewards", self._environment.label, self._timeout, next_action)

    def _counted(self, scores: list[Score], key: str | None) -> list[Score]:
        """Returns the scores by the reward that the run's `reward_key` names."""
        try:
            return [reward_values.counted(score, key) for score in scores]
        except ValueError as error:
            raise EnvironmentFailed(self._environment.label, str(error)) from None


def _request(run: str, group: Generated, samples: list[Sample]) -> ScoreRequest:
    first = samples[0]
    try:
        return ScoreRequest(
            run=run,
            group=group.group,
            attempt=group.attempt,
            prompt=first.prompt_text,
            label=first.label,
            metadata=first.metadata,
            samples=[
                ScoreSample(index=index, response=sample.text, tokens=len(sample.response), finish=sample.finish)
                for index, sample in enumerate(samples)
            ],
        )
    except ValidationError as error:
        [where, *_] = (".".join(map(str, problem["loc"])) for problem in error.errors())
        raise BadMessage(f"{group.group}: the payload's {where} does not go into a request for a score") from error
