"""Which scored groups are kept, and which of their samples are trained: the run's filters, on training groups alone."""

from __future__ import annotations

from services.reward.functions import SCORE, Verdict
from services.reward.hooks_pool import HooksPool
from shared import hooks
from shared.config import RunConfig
from shared.hooks.filters import BUILT_IN
from shared.ledger import is_evaluation
from shared.messages import Score
from shared.sample import Sample


class Selection:
    """The filters of a run.

    Args:
        pool: runs the user's own; None where the run has none.
    """

    def __init__(self, config: RunConfig, pool: HooksPool | None) -> None:
        self._pool = pool if any(field != SCORE for field in hooks.paths(config, "reward")) else None
        self._built_in = BUILT_IN.get(config.rollout.dynamic_sampling_filter_path or "")
        self._args = hooks.Arguments(config)

    async def verdict(self, group: str, samples: list[Sample], scores: list[Score]) -> Verdict:
        """What becomes of a scored group. Raises DeadlineExceeded, WorkerFailed or BadMessage: the group is given up."""
        if is_evaluation(group):
            return Verdict(None, scores)
        if self._pool is not None:
            return await self._pool.select(samples, scores)
        if self._built_in is None:
            return Verdict(None, scores)
        # one that comes with Myxo looks at rewards alone and cannot hang: no process, no copy of the samples
        output = self._built_in(self._args, [hooks.Sample(reward=score.reward) for score in scores])
        return Verdict(None if output.keep else output.reason, scores)
