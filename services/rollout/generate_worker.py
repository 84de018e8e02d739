"""Runs generate functions of the user's in a process of its own, many rollouts at a time.

``python -m services.rollout.generate_worker``; it speaks as `shared.process.call_server` says. Its setup: ``{"config": JSON}``; where the
run has a function of its own it is imported then. A request: ``{"verb": "generate", "field": name, "path": path, "sample": fields,
"sampling_params": map, "evaluation": flag, "engine": [host, port], "token": text, "seconds": number}``; an answer: ``{"samples": [fields,
…]}``, or ``{"error": text, "blocked": flag}``. Samples travel as `shared.hooks.sample_conversion` has them.
"""

import asyncio
import functools
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookSample, Status, load, sample_conversion
from shared.hooks.hook_sample import status_of
from shared.hooks.loading import generate_paths
from shared.hooks.slime.http_requests import CallContext, current_call
from shared.process.call_server import serve_calls
from shared.process.running_call import is_blocked
from shared.runtime.tasks import defined_at, error_text

BLOCKED_SHARE = 0.25  # the share of a rollout's time for which it may block its process: those beside it then still have the rest


class GenerateCalls:
    """Answers calls. Raises ConfigError where a function of the run's cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self.waits = ["generate"]
        self.block_s: float | None = BLOCKED_SHARE * config.rollout.generate_timeout
        self._args = Arguments(config)
        for field, path in generate_paths(config).items():
            load(field, path)

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the samples of one rollout, or why there are none."""
        host, port = request["engine"]
        self._args.sglang_router_ip, self._args.sglang_router_port = host, port
        current_call.set(CallContext(request["token"], f"{host}:{port}", time.monotonic() + request["seconds"]))

        async def samples(function: Any) -> dict[str, object]:
            evaluation = {"evaluation": request["evaluation"]} if "evaluation" in inspect.signature(function).parameters else {}
            sample = sample_conversion.unpacked(request["sample"])
            given = _samples(await called(functools.partial(function, self._args, sample, request["sampling_params"], **evaluation)))
            await self._score(given)
            return {"samples": [sample_conversion.packed(one) for one in given]}

        return await answered(lambda: load(request["field"], request["path"]), samples)

    async def _score(self, samples: list[HookSample]) -> None:
        """Scores the samples that name a reward function of their own, here, where it can be imported."""
        for sample in samples:
            named = sample.custom_rm_path if sample.reward is None and not self._args.group_rm else None
            if named is not None and status_of(sample.status) is not Status.ABORTED:
                result = load("sample.custom_rm_path", named)(self._args, sample)
                sample.reward = await result if inspect.isawaitable(result) else result


class UnusableResult(Exception):
    """A function returned something other than samples."""


async def answered(loading: Callable[[], Any], answer: Callable[[Any], Awaitable[dict[str, object]]]) -> dict[str, object]:
    """Returns the answer that is made of a function of the user's once it is loaded, or why there is none."""
    this, function = asyncio.current_task(), None
    assert this is not None
    try:
        function = loading()
        return await answer(function)
    except asyncio.CancelledError:
        if this.cancelling():
            raise
        return {"error": "cancelled itself"}
    except BaseException as error:  # it fails its rollout, not this process
        traceback.print_exc()
        said = f"{error}{defined_at(function)}" if isinstance(error, UnusableResult) else error_text(error, function)
        return {"error": said, "blocked": is_blocked(error)}


async def called(call: Callable[[], Any]) -> Any:
    """Returns the result of a function, async or plain; a plain one has a thread of its own."""
    function: Any = call.func if isinstance(call, functools.partial) else call
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await call()
    result = await asyncio.to_thread(call)
    return await result if inspect.isawaitable(result) else result


def _samples(given: object) -> list[HookSample]:
    samples: list[Any] = given if isinstance(given, list) else [given]
    for sample in samples:
        if not isinstance(sample, HookSample):
            raise UnusableResult(f"gave a {type(sample).__name__}; expected a slime.utils.types.Sample or a list of them")
    if not samples:
        raise UnusableResult("gave an empty list; expected at least one sample")
    return samples


def main() -> None:
    """Answers requests until the service is gone."""
    serve_calls(lambda setup: GenerateCalls(RunConfig.model_validate_json(setup["config"])))


if __name__ == "__main__":
    main()
