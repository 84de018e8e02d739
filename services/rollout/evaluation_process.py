"""The process of a user's evaluation function: ``python -m services.rollout.evaluation_process``, one evaluation at a time.

It speaks as `shared.process.call_server` says. Its setup: ``{"config": JSON}``. A request: ``{"rollout_id": number, "engine": [host, port],
"engines": count}``; an answer: ``{"results": [fields of EvalResult, …]}``, ``{"unfit": text}`` for what is no result, or ``{"error":
text}`` where the function raised. Where no sample names its versions, ``oldest`` and ``newest`` are None.

It is a process apart from that of a rollout function: that one continues meanwhile, and neither ends with the other.
"""

import asyncio
import inspect
import traceback
from functools import partial
from typing import Any, NoReturn

from services.rollout.producer_process import PositionlessSource
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data.eval_figures import eval_figures
from shared.hooks import Arguments, load
from shared.hooks.hook_sample import HookSample
from shared.hooks.loading import EvaluationLog, eval_function
from shared.hooks.returned_output import ReturnedSet, RolloutFnEvalOutput, eval_metrics, eval_output, returned_sets
from shared.process.call_server import serve_calls
from shared.runtime.tasks import error_text, run_in_thread

LONGEST_REASON = 500


class HeldOutSource(PositionlessSource):
    """``data_source`` in an evaluation: held-out prompts are in ``args.eval_datasets``, and those of training are not for it."""

    def get_samples(self, num_samples: int) -> NoReturn:
        """Raises ValueError: what an evaluation took would be missing in training."""
        raise ValueError("get_samples in an evaluation: training prompts are not drawn for it; args.eval_datasets has the held-out sets")

    def add_samples(self, samples: list[list[HookSample]]) -> NoReturn:
        """Raises ValueError, as `get_samples`."""
        raise ValueError("add_samples in an evaluation: there are no training prompts to give back")


class EvaluationCalls:
    """Calls the function. Raises ConfigError where it, or the log function, cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self.waits: list[str] = []
        self.block_s: float | None = None
        named = eval_function(config)
        assert named is not None  # the service starts this process for runs that have one
        self._function, self._log, self._args = load(*named), EvaluationLog(config), Arguments(config)
        self._source = HeldOutSource(config.rollout.rollout_batch_size * config.rollout.num_rollout)
        self._passes = config.monitoring.passrate_threshold
        self._samples = {view.name: view.config.rollout.n_samples_per_prompt for view in eval_views(config)}
        self._most = config.eval.n_samples_per_eval_prompt

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the results of one evaluation, or why there are none."""
        self._args.sglang_router_ip, self._args.sglang_router_port = request["engine"]
        self._args.rollout_num_engines = request["engines"]
        # a thread of its own: functions in slime's manner start event loops, which none may in one that runs
        return await asyncio.wrap_future(run_in_thread(partial(self._evaluated, request["rollout_id"]), "evaluation"))

    def _evaluated(self, rollout_id: int) -> dict[str, object]:
        try:
            returned = self._function(self._args, rollout_id, self._source, evaluation=True)
            returned = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # it is the user's code
            traceback.print_exc()
            return {"error": error_text(error, self._function)}
        try:
            output = eval_output(returned)
            sets = returned_sets(output.data)
        except ValueError as error:
            return {"unfit": str(error)[:LONGEST_REASON]}
        return {"results": self._results(rollout_id, output, sets)}

    def _results(self, rollout_id: int, output: RolloutFnEvalOutput, sets: dict[str, ReturnedSet]) -> list[dict[str, Any]]:
        logged = self._log.wrote(rollout_id, self._args, output.data, output.metrics)
        results = [{**self._result(name, one), "logged": logged} for name, one in sets.items()]
        results[0]["metrics"] = eval_metrics(output.metrics)
        return results

    def _result(self, name: str, one: ReturnedSet) -> dict[str, Any]:
        groups = one.groups(self._samples.get(name, self._most))
        oldest, newest = one.versions or (None, None)
        figures = eval_figures(groups, one.lengths, one.truncated, self._passes)
        return {"dataset": name, "oldest": oldest, "newest": newest, "prompts": len(groups), "failed": 0, **figures}


def main() -> None:
    """Answers requests until the service is gone."""
    serve_calls(lambda setup: EvaluationCalls(RunConfig.model_validate_json(setup["config"])))


if __name__ == "__main__":
    main()
