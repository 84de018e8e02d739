"""Decides which scored groups are kept, and which of their samples are trained, by the run's filters, for training groups alone."""

from services.reward.custom_functions import FilterResult, is_scoring
from services.reward.scoring_pools import HooksPool
from shared import hooks
from shared.config.run_config import RunConfig
from shared.hooks.filters import BUILT_IN
from shared.schema.ledger import is_evaluation
from shared.schema.sample import Sample, Score


class GroupFilter:
    """Applies the filters of a run.

    Args:
        pool: runs the user's own functions; None where the run has none.
    """

    def __init__(self, config: RunConfig, pool: HooksPool | None) -> None:
        # a rollout function of the user's calls the run's filters itself, or does not
        self._functions_own = config.rollout.rollout_function_path is not None
        self._pool = pool if any(not is_scoring(field) for field in hooks.paths(config, "reward")) else None
        self._built_in = BUILT_IN.get(config.rollout.dynamic_sampling_filter_path or "")
        self._args = hooks.Arguments(config)

    async def decide(self, group: str, samples: list[Sample], scores: list[Score]) -> FilterResult:
        """Returns the filters' outcome for a scored group. Raises DeadlineExceeded, WorkerFailed or BadMessage: the group is given up."""
        if is_evaluation(group) or self._functions_own:
            return FilterResult(scores)
        if self._pool is not None:
            return await self._pool.select(samples, scores)
        if self._built_in is None:
            return FilterResult(scores)
        # one that comes with Myxo looks at rewards alone and cannot hang: no process, no copy of the samples
        output = self._built_in(self._args, [hooks.HookSample(reward=score.reward) for score in scores])
        return FilterResult(scores, None if output.keep else output.reason)
