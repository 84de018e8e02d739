"""Reports evaluations that have ended: in the log, as gauges, to the trainer that asks for those that it does not know, and to the user's
log function.

The function (``custom_eval_rollout_log_function_path``) runs in a process of its own, once a version, when all sets of it have ended; until
then their payloads stay in the store, their figures with the buffer, and the run does not finish. It has `LOG_SECONDS`; one that fails, or
is late, or of an evaluation that another buffer began, is as none: Myxo logs. Where the user's own function evaluates, that function's
process calls it. The function's process, ``python -m services.buffer.evaluation_logger``, speaks as `shared.process.call_server` says. Its
setup: ``{"config": JSON}``. Requests: ``{"verb": "take", "group", "dataset", "rewards", "parts", "truncated", "blobs"}`` for each held-out
prompt that has rewards, answered with ``{}``; then ``{"verb": "log", "rollout_id": number}``, answered with ``{"logged": whether the
function has logged it in Myxo's place}``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any

from redis.exceptions import RedisError

from shared.config.eval_views import reward_key
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, HookSample
from shared.hooks.loading import EVAL_LOG, EvaluationLog, last_rollout, paths
from shared.hooks.sample_conversion import from_stored
from shared.process.call_server import Calls, serve_calls
from shared.process.worker_pool import WorkerPool
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import run_in_thread
from shared.runtime.telemetry import declare_metrics
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.ledger import EvalEnded, EvalScored, EvalStarted, LedgerRecord, eval_group_parts
from shared.schema.messages import EvalFigures, EvaluationsEnded, EvaluationsRequest
from shared.schema.sample import Score
from shared.service.service_base import Service

LOG_SECONDS = 600.0  # The deadline for reading an evaluation's samples and for the function, together


@dataclass
class _Version:
    """What is known of a version's evaluation. ``sets``: those that have not ended."""

    sets: set[str] = field(default_factory=set)
    scored: list[EvalScored] = field(default_factory=list)


class EvaluationLogger:
    """Follows the ledger's records of evaluations.

    Args:
        free: has payload keys removed from the store. done: awaited when a version has been logged.

    Attributes:
        logged: version → whether the function has logged it in Myxo's place.
    """

    def __init__(self, service: Service, free: Callable[[Iterable[str]], None], done: Callable[[], Awaitable[None]]) -> None:
        self._service, self._free, self._done = service, free, done
        path = paths(service.config, "buffer").get(EVAL_LOG)
        self._named = None if path is None else f"{EVAL_LOG} = {path}"
        setup = {"config": service.config.model_dump_json()}
        # without a function the buffer needs none of the variables, which may be set where reward services start alone
        variables = service.config.reward.worker_environment if path is not None else []
        self._pool = WorkerPool("the log function", 1, setup, "services.buffer.evaluation_logger", variables)
        self._open: dict[int, _Version] = {}
        self._held: set[str] = set()
        self._ended: asyncio.Queue[int] = asyncio.Queue()
        self.logged: dict[int, bool] = {}

    @property
    def open(self) -> frozenset[int]:
        """Returns the versions whose evaluation has begun and is not logged yet."""
        return frozenset(self._open)

    def see(self, record: LedgerRecord) -> None:
        """Takes a record that was just made."""
        match record:
            case EvalStarted(version=version, dataset=name) if self._named is not None:
                self._open.setdefault(version, _Version()).sets.add(name)
            case EvalScored(version=version, payload=payload) if version in self._open and payload is not None:
                self._open[version].scored.append(record)
                self._held.update(payload.keys)
            case EvalEnded(version=version, dataset=name) if version in self._open:
                self._open[version].sets.discard(name)
                if not self._open[version].sets:
                    self._ended.put_nowait(version)

    def release(self, keys: Iterable[str]) -> None:
        """Has payload keys freed, but for those that are still to be logged."""
        self._free(key for key in keys if key not in self._held)

    def after(self, request: EvaluationsRequest, ended: Mapping[Any, EvalEnded]) -> EvaluationsEnded:
        """Returns the next ones of the evaluations that have ended, in order, up to those that the function is still to see: as many as one
        message holds."""
        reported, names, size = list[EvalFigures](), EvalFigures.model_fields, 0
        for record in takewhile(lambda record: record.version not in self._open, islice(ended.values(), request.known, None)):
            figures = EvalFigures(**{name: getattr(record, name) for name in names})
            if (size := size + len(codec.pack(figures.model_dump()))) > self._service.bus.message_limit:
                break
            reported.append(figures.model_copy(update={"logged": figures.logged or self.logged.get(record.version, False)}))
        return EvaluationsEnded(evaluations=reported)

    async def run(self) -> None:
        """Logs versions that have ended until cancelled."""
        try:
            while True:
                version = await self._ended.get()
                scored = self._open[version].scored
                self.logged[version] = await self._logs(version, scored)
                del self._open[version]
                keys = [key for record in scored if record.payload is not None for key in record.payload.keys]
                self._held.difference_update(keys)
                self._free(keys)
                await self._done()
        finally:
            await self._pool.close()

    async def _logs(self, version: int, scored: list[EvalScored]) -> bool:
        assert self._named is not None  # no version is open without it
        try:
            async with asyncio.timeout(LOG_SECONDS):
                for record in scored:
                    if record.rewards:
                        await self._ask({"verb": "take", **await self._fields(record)})
                rollout_id = last_rollout(self._service.config, version)
                return bool((await self._ask({"verb": "log", "rollout_id": rollout_id}))["logged"])
        except TimeoutError:
            error = f"it was not done within {LOG_SECONDS:g} s, and its process was killed"
        except (MyxoError, RedisError) as failed:
            error = str(failed)
        await self._pool.close()
        self._service.log.error("evaluation_not_logged", version=version, function=self._named, error=error, next_action="Myxo logs it")
        return False

    async def _fields(self, record: EvalScored) -> dict[str, Any]:
        assert record.payload is not None  # of what has rewards
        blobs = await self._service.store.read(record.payload)
        fields = {"group": record.group, "dataset": record.dataset, "rewards": record.rewards, "parts": record.parts}
        return {**fields, "blobs": list(blobs), "truncated": record.truncated}

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._named is not None
        return await self._pool.ask(request, "an evaluation's log", self._named, LOG_SECONDS)


declare_metrics("""
    eval_reward{dataset} | reward | mean reward of the set's newest evaluation | once one of the set has ended
    eval_version{dataset} | version | that it is of | once one of the set has ended
    eval_newest{dataset} | version | the newest that drew some of its tokens | once one of the set has ended
    eval_lag{dataset} | versions | by how many it was behind the live version when it was known | once one of the set has ended
    eval_missing{dataset} | prompts | that failed or were late | once one of the set has ended
    eval_prompts{dataset} | prompts | of the whole set | once one of the set has ended
""")


def log_evaluation(service: Service, record: EvalEnded) -> None:
    """Logs and shows an evaluation that has just ended; one that was late as a warning."""
    log = service.log.warning if record.late or record.reason else service.log.info
    counted = {"samples": record.samples, "failed": record.failed, "late": record.late, "prompts": record.prompts}
    versions = {"version": record.version, "newest": record.newest, "lag": record.lag}
    figures = {"mean_reward": record.mean_reward, **record.rates, "truncated": record.truncated, "response_len": record.lengths}
    more = ({"metrics": record.metrics} if record.metrics else {}) | ({"error": record.reason} if record.reason else {})
    log("evaluated", dataset=record.dataset, **figures, **versions, **counted, **more)
    show_evaluations(service, [record])


def show_evaluations(service: Service, records: Iterable[EvalEnded]) -> None:
    """Sets the gauges of evaluations, in their order; one without samples leaves those of the set's last one."""
    for record in records:
        shown = {"reward": record.mean_reward, "version": record.version, "newest": record.newest, "lag": record.lag}
        shown |= {"missing": record.failed + record.late, "prompts": record.prompts}
        for name, value in shown.items() if record.samples else ():
            service.metrics.set(f"eval_{name}", value, dataset=record.dataset)


# --- in the process of the function

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


if __name__ == "__main__":
    serve_calls(lambda setup: LogCalls(RunConfig.model_validate_json(setup["config"])))
