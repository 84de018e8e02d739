"""slime's log function of the user's for an evaluation, ``custom_eval_rollout_log_function_path``."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from shared.config.run_config import RunConfig
from shared.hooks.loading import EVAL_LOG, load, paths
from shared.runtime.tasks import error_text


class EvaluationLog:
    """Calls the function that the run names, if it names one. Raises ConfigError where it cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        path = paths(config).get(EVAL_LOG)
        self._function: Callable[..., Any] | None = None if path is None else load(EVAL_LOG, path)

    def wrote(self, rollout_id: int, args: Any, data: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> bool:
        """Returns whether the function has logged an evaluation in the place of Myxo. One that fails has not; its words are printed.

        Args:
            data: set → ``rewards``, ``truncated``, ``samples``. metrics: the evaluation function's.
        """
        if self._function is None:
            return False
        try:
            return bool(self._function(rollout_id, args, data, metrics))
        except Exception as error:  # it is the user's code
            traceback.print_exc()
            reason = error_text(error, self._function)
            print(f"{EVAL_LOG} failed, and Myxo logs the evaluation of rollout {rollout_id}: {reason}", flush=True)
            return False


def last_rollout(version: int, interval: int) -> int:
    """Returns the number of the last rollout in weights of ``version``, which slime calls functions with: 0 also before the first.

    Args:
        interval: training steps a version.
    """
    return max(0, version * interval - 1)
