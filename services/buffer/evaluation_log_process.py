"""The process of the user's log function for evaluations: ``python -m services.buffer.evaluation_log_process``.

It speaks as `shared.process.call_server` says. Its setup: ``{"config": JSON}``. Requests: ``{"verb": "take", "group", "dataset", "rewards",
"parts", "truncated", "blobs"}`` for each held-out prompt that has rewards, answered with ``{}``; then ``{"verb": "log", "rollout_id":
number}``, answered with ``{"logged": whether the function has logged it in Myxo's place}``.
"""

import asyncio
from functools import partial
from typing import Any

from shared.config.eval_views import reward_key
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookSample
from shared.hooks.loading import EvaluationLog
from shared.hooks.sample_conversion import from_stored
from shared.process.call_server import Calls, serve_calls
from shared.runtime.tasks import run_in_thread
from shared.schema import sample as sample_codec
from shared.schema.ledger import eval_group_parts
from shared.schema.sample import Score

Row = list[tuple[float, bool, HookSample]]  # Of each sample of a prompt: reward, whether it is truncated, the sample


class LogCalls(Calls):
    """Collects an evaluation and calls the function. Raises ConfigError where that cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._log, self._args = config, EvaluationLog(config), Arguments(config)
        self._rows: dict[str, dict[int, Row]] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Answers one request."""
        if request["verb"] == "take":
            self._take(**{name: value for name, value in request.items() if name != "verb"})
            return {}
        data, self._rows = {name: _as_returned(rows) for name, rows in sorted(self._rows.items())}, {}
        call = partial(self._log.wrote, request["rollout_id"], self._args, data, None)
        return {"logged": await asyncio.wrap_future(run_in_thread(call, "evaluation-log"))}

    def _take(
        self, group: str, dataset: str, rewards: list[float], parts: list[dict[str, float]], truncated: list[int], blobs: list[bytes]
    ) -> None:
        named = eval_group_parts(group)
        assert named is not None  # the buffer sends held-out prompts
        scores = [Score(reward=reward, parts=part) for reward, part in zip(rewards, parts or [{}] * len(rewards), strict=True)]
        stored = zip(sample_codec.decode(blobs), scores, strict=True)
        samples = [from_stored(one, score, reward_key(self._config, group)) for one, score in stored]
        row = [(reward, index in truncated, sample) for index, (reward, sample) in enumerate(zip(rewards, samples, strict=True))]
        self._rows.setdefault(dataset, {})[named[2]] = row


def _as_returned(rows: dict[int, Row]) -> dict[str, list[Any]]:
    """Returns a set in the form in which slime's evaluation returns it, its samples in the order of its prompts and counted through."""
    found = [entry for number in sorted(rows) for entry in rows[number]]
    for index, (_, _, sample) in enumerate(found):
        sample.index = index
    rewards, truncated, samples = zip(*found, strict=True)
    return {"rewards": list(rewards), "truncated": list(truncated), "samples": list(samples)}


def main() -> None:
    """Answers requests until the service is gone."""
    serve_calls(lambda setup: LogCalls(RunConfig.model_validate_json(setup["config"])))


if __name__ == "__main__":
    main()
