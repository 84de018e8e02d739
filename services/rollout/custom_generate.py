"""Generates with the user's own function, ``rollout.custom_generate_function_path``, called once for each rollout of a group.

The function runs on an event loop in a thread of its own: a call that blocks there delays other calls, but neither heartbeats nor pushes.
A call's result is discarded if the replica's weights became untrusted meanwhile (a push failed, or the engine died).
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from services.rollout.generate import ENGINE_TRIES, RETRY_PAUSE
from services.rollout.replica import Replica
from services.rollout.sample_seeds import SampleSeeds
from shared import hooks
from shared.hooks import Arguments, HookFailed, Status
from shared.hooks.sample_conversion import Served, group_index, to_stored
from shared.rewards.reference import Reference
from shared.runtime.cancellation import cancelled
from shared.runtime.daemon_thread import run_in_thread
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.failures import SupervisedThread
from shared.runtime.service_base import Service
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Sample

FIELD = "rollout.custom_generate_function_path"


class CustomGenerate:
    """Generates groups by the function of the run's config.

    Raises ConfigError where the function cannot be imported.
    """

    def __init__(self, service: Service, replica: Replica) -> None:
        self._path = hooks.paths(service.config, "rollout")[FIELD]
        self._function = hooks.load(FIELD, self._path)
        parameters = inspect.signature(self._function).parameters
        self._takes_evaluation = "evaluation" in parameters
        self._plain = not inspect.iscoroutinefunction(self._function)
        self._service, self._replica, self._config = service, replica, service.config
        self._seeds = SampleSeeds.of(service.config)
        self._vocabulary = 0
        self._loop = asyncio.new_event_loop()
        SupervisedThread(self._loop.run_forever, "custom-generate").start()

    async def group(self, task: Task) -> list[Sample]:
        """Returns all samples of the task's n rollouts, in the rollouts' order.

        Raises DeadlineExceeded (no weights, or no end within `generate_timeout` of having them), HookFailed where the function failed
        `ENGINE_TRIES` times in a row, BadMessage where it returned something other than samples, or no token to train.
        """
        deadline = self._config.rollout.generate_timeout
        await self._replica.wait_serving(task.min_version, deadline)
        rollouts = [asyncio.create_task(self._rollout(task, index)) for index in range(task.n)]
        try:
            async with asyncio.timeout(deadline):
                finished = await asyncio.gather(*rollouts)
        except TimeoutError:
            next_action = "the group goes back to the queue"
            raise DeadlineExceeded(f"{task.n} rollouts of {task.group}", f"{FIELD} = {self._path}", deadline, next_action) from None
        finally:
            await cancelled(rollouts)
        given = [(sample, rollout, served) for rollout, (samples, served) in enumerate(finished) for sample in samples]
        samples = [
            to_stored(sample, task.group, index, rollout, served, self._vocabulary) for index, (sample, rollout, served) in enumerate(given)
        ]
        if not any(sample.mask.any() for sample in samples) and not is_evaluation(task.group):
            raise BadMessage(f"{FIELD} = {self._path}: no token of group {task.group} is trained: the loss mask is 0 on all of them")
        return samples

    async def _rollout(self, task: Task, rollout: int) -> tuple[list[hooks.HookSample], Served]:
        """Returns the samples that the function made for one rollout, and the versions that were served meanwhile."""
        failures, replica = 0, self._replica
        while True:
            client = await replica.wait_serving(task.min_version, self._config.rollout.generate_timeout)
            begun, life = replica.version, replica.incarnation
            self._vocabulary = client.capabilities.vocab_size
            try:
                given = self._checked(await self._call(task, rollout))
            except Exception as error:  # an exception of the user's function fails its group, not this service
                failures += replica.incarnation == life  # the function did not cause the engine's death
                self._service.log.warning("custom_generate_failed", group=task.group, rollout=rollout, error=str(error), exc_info=error)
                if failures >= ENGINE_TRIES:
                    reason = str(error) if isinstance(error, HookFailed) else f"{type(error).__name__}: {error}"
                    raise HookFailed(FIELD, self._path, f"{reason}; it failed {failures} times in a row") from error
                await asyncio.sleep(RETRY_PAUSE * failures)
                continue
            if replica.incarnation == life and not any(sample.status is Status.ABORTED for sample in given):
                return given, Served(begun, replica.version, client.late_versions)
            await asyncio.sleep(RETRY_PAUSE)  # the push that ended the engine's requests is still in progress

    def _checked(self, given: object) -> list[hooks.HookSample]:
        samples: list[Any] = given if isinstance(given, list) else [given]
        for sample in samples:
            if not isinstance(sample, hooks.HookSample):
                raise self._refusal(f"gave a {type(sample).__name__}; expected a shared.hooks.Sample or a list of them")
            if sample.status is Status.FAILED:
                raise self._refusal("gave a sample of status FAILED")
        if not samples:
            raise self._refusal("gave an empty list; expected at least one sample")
        return samples

    async def _call(self, task: Task, rollout: int) -> object:
        sample = hooks.HookSample(
            group_index=group_index(task.group),
            index=rollout,
            rollout_id=rollout,
            session_id=f"{task.group}.{task.attempt}.{rollout}",
            prompt=copy.deepcopy(task.prompt),
            tokens=task.prompt_tokens.tolist(),
            label=Reference(task.label, task.label_json).value,
            metadata=copy.deepcopy(task.metadata),
        )
        assert self._replica.proxy.address is not None  # it is open from the engine's start on
        host, port = self._replica.proxy.address
        args = Arguments(self._config, sglang_router_ip=host, sglang_router_port=port)
        evaluation = {"evaluation": is_evaluation(task.group)} if self._takes_evaluation else {}
        parameters = _parameters(task.sampling) | self._seeds.parameters(rollout)
        call = functools.partial(self._function, args, sample, parameters, **evaluation)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._guarded(call), self._loop))

    async def _guarded(self, call: Callable[[], Any]) -> object:
        """Makes the call on the thread's loop; no exception of it may end the loop, or be mistaken for a cancellation by the service."""
        this = asyncio.current_task()
        assert this is not None
        try:
            result = await asyncio.wrap_future(run_in_thread(call, "custom-generate-call")) if self._plain else call()
            return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            if this.cancelling():
                raise
            raise self._refusal("cancelled itself") from None
        except (SystemExit, KeyboardInterrupt) as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error

    def _refusal(self, reason: str) -> HookFailed:
        return HookFailed(FIELD, self._path, reason)


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """Returns ``sampling_params`` as slime passes them, in SGLang's names. Stop strings stay in the text, as do their tokens."""
    text = {
        "skip_special_tokens": sampling.skip_special_tokens is True,
        "no_stop_trim": sampling.no_stop_trim is not False,
        "spaces_between_special_tokens": False,
    }
    drawn = sampling.model_dump(exclude={"skip_special_tokens", "no_stop_trim", "min_new_tokens", "repetition_penalty"})
    if sampling.min_new_tokens:  # slime leaves out what nobody has set
        drawn["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1:
        drawn["repetition_penalty"] = sampling.repetition_penalty
    return {**drawn, **text}
