"""Runs functions of the user's in a process of its own: generate functions and agents, many rollouts at a time, or an evaluation function.

``python -m services.rollout.function_worker``; it speaks as `shared.process.call_server` says. Its setup, ``{"config": JSON, "verb":
verb}``, has it import the run's functions for that verb. Requests and answers, by verb; ``{"error": text, "blocked": flag}`` answers for
a function that raised:

- ``generate``: ``{"field": name, "path": path, "sample": fields, "sampling_params": map, "evaluation": flag, "engine": [host, port],
  "token": text, "seconds": number}``; ``{"samples": [fields, …]}``, samples as `shared.hooks.sample_conversion` has them;
- ``play``: ``{"field": name, "path": path, "of": roles, "data": map, "base_url": text, "api_key": text}``; ``{"reward": number, numbers by
  name, or None}``, where there are roles a map of them;
- ``evaluate``: ``{"rollout_id": number, "engine": [host, port], "engines": count}``; ``{"results": [fields of EvalResult, …]}``, in which
  ``oldest`` and ``newest`` are None where no sample names its versions, or ``{"unfit": text}`` for what is no result.

A rollout function has a process of its own (`services.rollout.producer_process`): it continues during an evaluation, and neither ends with
the other.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from services.rollout.agent_runner import by_role
from services.rollout.producer_process import PositionlessSource
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.config.section import WITHOUT_RULES
from shared.data.pass_rates import eval_figures
from shared.hooks import Arguments, HookSample, Status, load, reward_values, sample_conversion
from shared.hooks.hook_sample import status_of
from shared.hooks.loading import EvaluationLog, agent_paths, eval_function, generate_paths, load_agent
from shared.hooks.returned_output import ReturnedSet, RolloutFnEvalOutput, eval_metrics, eval_output, returned_sets
from shared.hooks.slime.http_requests import CallContext, current_call
from shared.hooks.slime.rollout_loop import apply_rollout_sample_hooks
from shared.process.call_server import Calls, is_blocked, serve_calls
from shared.runtime.tasks import called, defined_at, error_text, print_traceback, run_in_thread, settled

BLOCKED_SHARE = 0.25  # the share of a rollout's time for which it may block its process: those beside it then still have the rest


class GenerateCalls(Calls):
    """Calls generate functions. Raises ConfigError where one of the run's cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self.waits = ["generate"]
        self.block_s = BLOCKED_SHARE * config.rollout.patience
        self._args = Arguments(config)
        for field, path in generate_paths(config).items():
            load(field, path)

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the samples of one rollout, or why there are none."""
        host, port = request["engine"]
        self._args.point_at(host, port)
        current_call.set(CallContext(request["token"], f"{host}:{port}", time.monotonic() + request["seconds"]))

        async def samples(function: Any) -> dict[str, object]:
            evaluation = {"evaluation": request["evaluation"]} if "evaluation" in inspect.signature(function).parameters else {}
            sample = sample_conversion.unpacked(request["sample"])
            given = _samples(await called(function, self._args, sample, request["sampling_params"], **evaluation))
            given = _samples(await apply_rollout_sample_hooks(self._args, given, evaluation=request["evaluation"]))
            await self._score(given)
            return {"samples": [sample_conversion.packed(one) for one in given], "defined_at": defined_at(function)}

        return await answered(lambda: load(request["field"], request["path"]), samples)

    async def _score(self, samples: list[HookSample]) -> None:
        """Scores the samples that name a reward function of their own, here, where it can be imported."""
        for sample in samples:
            named = sample.custom_rm_path if sample.reward is None and not self._args.group_rm else None
            if named is not None and status_of(sample.status) is not Status.ABORTED:
                sample.reward = await settled(load("sample.custom_rm_path", named)(self._args, sample))


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
        print_traceback()
        said = f"{error}{defined_at(function)}" if isinstance(error, UnusableResult) else error_text(error, function)
        return {"error": said, "blocked": is_blocked(error)}


def _samples(given: object) -> list[HookSample]:
    samples: list[Any] = given if isinstance(given, list) else [given]
    for sample in samples:
        if not isinstance(sample, HookSample):
            raise UnusableResult(f"gave a {type(sample).__name__}; expected a slime.utils.types.Sample or a list of them")
    if not samples:
        raise UnusableResult("gave an empty list; expected at least one sample")
    return samples


class AgentCalls(Calls):
    """Calls agents. Raises ConfigError where one of the run's cannot be imported, or takes something else than agents do."""

    def __init__(self, config: RunConfig) -> None:
        self.waits = ["play"]
        self.block_s = BLOCKED_SHARE * config.rollout.agent_timeout
        share_certificates()
        for field, path in agent_paths(config).items():
            load_agent(field, path)

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the reward of one rollout, or why there is none."""

        async def reward(agent: Any) -> dict[str, object]:
            result = await called(agent, request["data"], request["base_url"], request["api_key"])
            given = {role: None if one is None else reward_values.plain(one) for role, one in by_role(result, request["of"]).items()}
            return {"reward": given.get("") if "" in given else given}

        return await answered(lambda: load_agent(request["field"], request["path"]), reward)


def share_certificates() -> None:
    """Has the clients of this process read the machine's certificates once. The libraries on which OpenAI's and Anthropic's clients stand
    read them for each client, also where it never speaks TLS: 17 ms of CPU, more than all else that a short agent does."""
    for library in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError, AttributeError):  # where it is not, or has them elsewhere, agents are slower
            transports: Any = importlib.import_module(f"{library}._transports.default")
            transports.create_ssl_context = _shared_contexts(transports.create_ssl_context)


def _shared_contexts(made: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """Returns a function that makes contexts as ``made`` does, but the default one once for each setting of the environment."""

    @functools.cache
    def shared(trust_env: bool, *_named_by_environment: str | None) -> ssl.SSLContext:
        return made(trust_env=trust_env)

    def create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None:
            return shared(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return made(verify=verify, cert=cert, trust_env=trust_env)

    return create_ssl_context


LONGEST_REASON = 500


class HeldOutSource(PositionlessSource):
    """``data_source`` in an evaluation: held-out prompts are in ``args.eval_datasets``, and those of training are not for it."""

    def get_samples(self, num_samples: int) -> NoReturn:
        """Raises ValueError: what an evaluation took would be missing in training."""
        raise ValueError("get_samples in an evaluation: it takes no training prompts; args.eval_datasets has the held-out sets")

    def add_samples(self, samples: list[list[HookSample]]) -> NoReturn:
        """Raises ValueError, as `get_samples`."""
        raise ValueError("add_samples in an evaluation: there are no training prompts to give back")


class EvaluationCalls(Calls):
    """Calls the evaluation function. Raises ConfigError where it, or the log function, cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        named = eval_function(config)
        assert named is not None  # the service starts this process for runs that have one
        self._function, self._log, self._args = load(*named), EvaluationLog(config), Arguments(config)
        self._source = HeldOutSource(config.rollout.rollout_batch_size * config.rollout.num_rollout)
        self._passes = config.monitoring.passrate_threshold
        self._samples = {view.name: view.config.rollout.n_samples_per_prompt for view in eval_views(config)}
        self._most = config.eval.n_samples_per_eval_prompt

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the results of one evaluation, or why there are none."""
        self._args.point_at(*request["engine"])
        self._args.rollout_num_engines = request["engines"]
        # a thread of its own: functions in slime's manner start event loops, which none may in one that runs
        return await asyncio.wrap_future(run_in_thread(functools.partial(self._evaluated, request["rollout_id"]), "evaluation"))

    def _evaluated(self, rollout_id: int) -> dict[str, object]:
        try:
            returned = self._function(self._args, rollout_id, self._source, evaluation=True)
            returned = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # it is the user's code
            print_traceback()
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


VERBS: dict[str, Callable[[RunConfig], Calls]] = {"generate": GenerateCalls, "play": AgentCalls, "evaluate": EvaluationCalls}

if __name__ == "__main__":
    # the service's own view of the run, as that of a lent engine, need not keep a run's rules
    serve_calls(lambda setup: VERBS[setup["verb"]](RunConfig.model_validate_json(setup["config"], context=WITHOUT_RULES)))
