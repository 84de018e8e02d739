"""Runs a user's rollout function as a producer, in one replica of the run: takes tasks for it, holds their leases, and reports what it
makes of them.

Invariant: every task that the function has is leased here, and its lease ends in exactly one of: handed in (stored, published, acked),
given back to the buffer with its tokens, dropped or dead with a reason, or returned to the queue, as when the function or its process dies.

The active replica holds the lease ``producer`` (`shared.bus.leader_lease`), and does nothing for its function without it. When it ends, or
cannot renew its lease, what it had in hand goes back to the queue, and another calls the function from there; a group that it had handed in
stays handed in.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine_proxy import SampleCheck
from services.rollout.in_flight import Stopped, continued
from services.rollout.played_group import GroupPlayer
from services.rollout.producer_process import FIELD
from services.rollout.replica import Replica
from services.rollout.task_outcomes import TaskOutcomes
from shared import hooks
from shared.bus.leader_lease import LeaderLease, LeaseLost, LeaseTiming
from shared.bus.streams import task_consumer
from shared.bus.subjects import PRODUCER, TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.data.tokenizer import Tokenizer
from shared.hooks import HookFailed
from shared.model.families import replayed_choices
from shared.process import call_server
from shared.process.child_process import ChildProcess, cause
from shared.process.worker_pool import process_streams, worker_environment
from shared.rewards.reference import Reference
from shared.runtime.errors import INFRASTRUCTURE, TASK, BadMessage, ConfigError, DeadlineExceeded
from shared.runtime.tasks import cancelled
from shared.runtime.telemetry import declare_metrics
from shared.schema import sample as sample_codec
from shared.schema.ledger import group_number
from shared.schema.messages import Discarded, Generated, Outcome, Task, Wanted
from shared.schema.sample import Sample, SampleLimits
from shared.schema.versions import is_too_stale
from shared.service.engine_load_balancer import EngineSpread
from shared.service.service_base import Service


@dataclass
class HeldTask:
    """A task that the function has. ``begun``: seconds since the epoch. ``holding``: extends its lease until it is closed."""

    lease: MessageLease[Task]
    begun: float
    holding: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def task(self) -> Task:
        return self.lease.message

    def check(self, samples: list[Sample]) -> None:
        """Raises BadMessage for samples that are not of this task, or that train nothing."""
        group = self.task.group
        if [sample.name for sample in samples] != [f"{group}/{index}" for index in range(len(samples))]:
            raise BadMessage(f"its samples are not those of group {group}")
        if not any(sample.mask.any() for sample in samples):
            raise BadMessage(f"no token of group {group} is trained: the loss mask is 0 on all of them")


declare_metrics("""
    rollout_function{metric} | | the metrics that a rollout function of your own returned last, the first 64 names | once it has
""")

MODULE = "services.rollout.producer_process"
START_SECONDS = 120.0  # the deadline for the process to import the function
EXIT_SECONDS = 1.0
TRIES = 5  # the failures of the function in a row after which the service gives up, and says why
RETRY_PAUSE = 0.5
POLL_INTERVAL_S = 0.05
MOST_METRICS = 64  # the most names of the function's own metrics that are shown: each is a time series that is never removed
REPEAT_SECONDS = 20.0  # the time after which the buffer is told again that more groups are wanted


class FunctionFailed(Exception):
    """The function raised, or its process ended or was late; the text says which."""


class Producer:
    """The rollout function of one replica.

    ``spread``: the address that the function sends its generations to. ``count``: is told the response tokens of each group that was handed
    in. Attributes: ``allowed``: awaited before each act for the function; raises where another replica may run it."""

    def __init__(self, service: Service, replica: Replica, spread: EngineSpread, outcomes: TaskOutcomes, tokenizer: Tokenizer) -> None:
        self._service, self._config, self._replica, self._outcomes = service, service.config, replica, outcomes
        self._choices = replayed_choices(service.config)
        self._spread = spread
        self.allowed: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
        self._path = hooks.paths(service.config, "rollout")[FIELD]
        self._queue = WorkQueue(service.bus, task_consumer(service.run, service.config.bus, TRAIN), Task, service.report, service.instance)
        self._rendered, self.tokens = GroupPlayer(service, replica, tokenizer).prompt, 0
        self._check = SampleCheck(service, tokenizer)
        replica.proxy.answers = self._check.answers
        self._waiting: list[HeldTask] = []  # fetched, and not yet taken by the function
        self._drawn: dict[str, HeldTask] = {}
        self._next_rollout: int | None = None
        self._failures = 0
        self._shown: set[str] = set()  # the function's metrics that are gauges
        self._moved = 0.0  # when the function last got prompts, handed something in, or was found waiting
        self._wanted_at = float("-inf")
        self._drawing = asyncio.Lock()
        self._calling, self._last_words = False, ""
        self._broken: BaseException | None = None  # what ended the service's side

    @property
    def held(self) -> int:
        """Returns the number of groups in hand."""
        return len(self._drawn) + len(self._waiting)

    async def run(self) -> None:
        """Keeps the function's process running until cancelled. Raises ConfigError; HookFailed where it fails time and again."""
        try:
            while True:
                try:
                    await self._live()
                except FunctionFailed as error:
                    self._failures += 1
                    self._service.log.error("rollout_function_failed", error=str(error), groups=len(self._drawn), in_a_row=self._failures)
                    if self._failures >= TRIES:
                        raise HookFailed(FIELD, self._path, f"{error}; it failed {self._failures} times in a row") from None
                finally:
                    await self._return_all(len(self._drawn) > 0)
                await asyncio.sleep(RETRY_PAUSE * self._failures)
        finally:
            await self._return_all()

    # --- one life of the process

    async def _live(self) -> None:
        environment = worker_environment(self._config.reward.worker_environment)
        process = ChildProcess("rollout function", [sys.executable, "-m", MODULE], None, environment, watchdog=True)
        answering: set[asyncio.Task[None]] = set()
        watching: asyncio.Task[None] | None = None
        try:
            requests, answers = await process_streams(process)
            await self._set_up(requests, answers)
            watching = asyncio.create_task(self._watch(process, answering))
            while True:
                call_id, request = await call_server.read_frame(requests)
                answer = asyncio.create_task(self._answered(call_id, request, answers), name=str(request["verb"]))
                answering.add(answer)
                answer.add_done_callback(partial(self._answer_ended, process, answering))
        except (EOFError, ConnectionError, BadMessage) as error:
            if self._broken is not None:
                raise self._broken from None
            if watching is not None and watching.done() and not watching.cancelled() and (late := watching.exception()) is not None:
                raise late from None
            await asyncio.to_thread(process.stop, EXIT_SECONDS)  # it closes its pipe before it has ended
            code = process.exit_code()
            words = str(error) if isinstance(error, BadMessage) else cause(code)
            raise FunctionFailed(self._last_words or f"its process ended ({words})") from None
        finally:
            await cancelled([*answering, *([watching] if watching is not None else [])])
            await asyncio.to_thread(process.stop, 0)

    def _answer_ended(self, process: ChildProcess, answering: set[asyncio.Task[None]], answer: asyncio.Task[None]) -> None:
        answering.discard(answer)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            self._broken = error
            process.kill()

    async def _set_up(self, requests: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        self._last_words, self._calling = "", False
        rollout = self._config.rollout
        setup = {"config": self._config.model_dump_json(), "prompts": rollout.rollout_batch_size * rollout.num_rollout}
        answers.write(call_server.frame([0, setup]))
        try:
            async with asyncio.timeout(START_SECONDS):
                _, ready = await call_server.read_frame(requests)
        except TimeoutError:
            raise DeadlineExceeded("its first answer", f"{FIELD} = {self._path}", START_SECONDS, "its process is killed") from None
        if isinstance(refused := ready.get("refused"), list):
            raise ConfigError(*refused)

    async def _watch(self, process: ChildProcess, answering: set[asyncio.Task[None]]) -> None:
        """Kills the process where the function neither ends, nor generates, nor hands anything in for `generate_timeout`. No time runs
        while the replica does not serve, the store or a stream is full, or the service is at work for the function."""
        limit = self._config.rollout.generate_timeout
        self._moved = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            at_work = any(answer.get_name() != "draw" for answer in answering)  # a draw waits for prompts
            if not self._calling or not self._drawn or at_work or not self._replica.serving or self._service.held_back:
                self._moved = time.monotonic()
            if time.monotonic() - self._moved > limit:
                process.kill()
                raise FunctionFailed(f"it had {len(self._drawn)} groups and did nothing with them for {limit:g} s; its process was killed")

    async def _answered(self, call_id: int, request: dict[str, Any], answers: asyncio.StreamWriter) -> None:
        verb = str(request.pop("verb"))
        try:
            await self.allowed()
            answer = await getattr(self, f"_on_{verb}")(**request)
        except (BadMessage, DeadlineExceeded, HookFailed) as error:
            answer = {"refused": str(error)}
        answers.write(call_server.frame([call_id, answer or {}]))
        with contextlib.suppress(ConnectionError):  # its end is seen where it is read
            await answers.drain()

    # --- what the process asks

    async def _on_next(self) -> dict[str, Any]:
        """Returns the number of the next call once there is a task for it, or the function still has some, and the engine's address."""
        self._calling = False
        async with self._drawing:
            while not self._waiting and not self._drawn:
                await self._fetch(1)
        rollout_id = self._next_rollout
        if rollout_id is None:  # of a run that continues, as far as its groups tell
            first = min(group_number(drawn.task.group) for drawn in (*self._waiting, *self._drawn.values()))
            rollout_id = first // self._config.rollout.rollout_batch_size
        self._next_rollout, self._calling, self._moved = rollout_id + 1, True, time.monotonic()
        await self._spread.open()
        assert self._spread.address is not None
        (host, port), engines = self._spread.address, self._spread.engines
        args = {"sglang_router_ip": host, "sglang_router_port": port, "rollout_num_engines": engines}
        return {"rollout_id": rollout_id, "args": args}

    async def _on_draw(self, n: int, seconds: float, starving: bool) -> dict[str, Any]:
        end = time.monotonic() + seconds
        taken: list[HeldTask] = []
        async with self._drawing:
            while not taken:
                while len(self._waiting) < n and await self._fetch(n - len(self._waiting), max(0.0, min(end - time.monotonic(), seconds))):
                    pass
                while self._waiting and len(taken) < n:
                    if await self._usable(drawn := self._waiting[0]):  # it stays in hand until then
                        taken.append(drawn)
                        self._drawn[drawn.task.group] = drawn
                    self._waiting.remove(drawn)
                if time.monotonic() >= end:
                    break
        if taken:
            self._moved = time.monotonic()
            asyncio.current_task().set_name("taken")  # type: ignore[union-attr]  # nothing is waited for but what is at work
        elif starving:
            await self._want(n)
        entries = [await self._entry(drawn) for drawn in taken]
        return {"groups": entries, "version": self._spread.versions()[0]}

    async def _on_served(self, begun: int) -> dict[str, Any]:
        """Returns what bounds the versions of a group that was begun under ``begun``. Of other replicas no one knows here which versions'
        first token the one before still generated: it is assumed of all."""
        client = await self._client()
        late, newest = sorted(client.late_versions), self._replica.version
        if self._spread.engines > 1:
            await self._spread.look()
            newest = self._spread.versions()[1]
            late = list(range(begun + 1, newest + 1))
        return {"newest": newest, "late": late, "vocabulary": client.capabilities.vocab_size}

    async def _on_hand_in(self, group: str, attempt: int, samples: list[bytes]) -> None:
        drawn = self._of(group, attempt)
        client = await self._client()
        try:
            replays = self._choices, self._config.kept_top_k > 0
            newest = max(self._replica.version, self._spread.versions()[1])
            limits = SampleLimits(client.capabilities.vocab_size, newest, self._config.log_probs_reader, *replays)
            stored = sample_codec.decode(samples, limits)
            drawn.check(stored)
            called, prompt = f"{FIELD} = {self._path}", self._rendered(drawn.task)
            stored = [self._check.checked(sample, drawn.task, prompt, called) for sample in stored]
            message: Generated | Outcome = await self._outcomes.generated(drawn.task, stored, drawn.begun, time.time())
            self.tokens += sum(len(sample.response) for sample in stored)
        except (BadMessage, DeadlineExceeded) as error:  # the latter: a teacher is away
            message = self._outcomes.failed(drawn.task, f"{FIELD} = {self._path}: {error}", error.fault)
        await self._end(drawn, message)
        self._failures = 0

    async def _on_give_back(self, group: str, attempt: int, samples: list[bytes]) -> None:
        drawn = self._of(group, attempt)
        await self._end(drawn, await self._outcomes.interrupted(drawn.task, sample_codec.decode(samples), stale=False))

    async def _on_fail(self, group: str, attempt: int, reason: str) -> None:
        drawn = self._of(group, attempt)
        await self._end(drawn, self._outcomes.failed(drawn.task, f"{FIELD} = {self._path}: {reason}", TASK))

    async def _on_discard(self, group: str, attempt: int, reason: str) -> None:
        await self._end(self._of(group, attempt), Discarded(group=group, attempt=attempt, reason=reason, by=self._service.instance))

    async def _on_finished(self, rollout_id: int, refused: list[str], metrics: dict[str, float]) -> None:
        self._failures = 0
        for problem in refused:
            self._service.log.error("rollout_group_refused", rollout_id=rollout_id, error=problem)
        self._service.log.info("rollout_function_ended", rollout_id=rollout_id, still_out=len(self._drawn), metrics=metrics)
        for name, value in metrics.items():
            if name in self._shown or len(self._shown) < MOST_METRICS:
                self._shown.add(name)
                self._service.metrics.set("rollout_function", value, in_status=False, metric=name)

    async def _on_failed(self, error: str) -> None:
        self._last_words = error

    # --- tasks

    async def _client(self) -> EngineClient:
        """Returns the replica's engine once it serves: what is finished waits for it as long as it takes, and needs no newer version."""
        while not self._replica.serving or self._replica.client is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        return self._replica.client

    async def _fetch(self, most: int, seconds: float = 1.0) -> bool:
        if not self._replica.serving or self._replica.lags(TRAIN) or self._service.held_back:
            await asyncio.sleep(min(POLL_INTERVAL_S, seconds))
            return False
        leases = await self._queue.fetch(most, seconds)
        for lease in leases:
            drawn = HeldTask(lease, time.time())
            await drawn.holding.enter_async_context(lease.held())
            self._waiting.append(drawn)
        return bool(leases)

    async def _usable(self, drawn: HeldTask) -> bool:
        """Returns whether the function may have a task; one that was delivered too often ends, one for newer weights goes back."""
        task = drawn.task
        if drawn.lease.exhausted:
            reason = f"given up after {drawn.lease.deliveries - 1} deliveries"
            await self._end(drawn, self._outcomes.failed(task, reason, INFRASTRUCTURE))
            return False
        try:
            await self._replica.wait_serving(task.min_version)
        except (DeadlineExceeded, Stopped) as error:  # no weights, or no engine
            self._service.log.warning("group_handed_back", group=task.group, error=str(error))
            self._replica.miss(TRAIN, task.min_version)
            await drawn.holding.aclose()
            await drawn.lease.hand_back(delay=1.0)
            return False
        return True

    async def _entry(self, drawn: HeldTask) -> dict[str, Any]:
        task = drawn.task
        earlier = await self._outcomes.earlier(task)
        rollout = self._config.rollout
        oldest = min((version for sample in earlier for _, _, version in sample.segments), default=self._replica.version)
        lost = is_too_stale(oldest, self._replica.version, rollout.max_staleness, rollout.staleness_policy)
        kept = [] if lost else [sample for sample in continued(earlier, task)[: rollout.n_samples_per_prompt] if sample is not None]
        return {
            "group": task.group,
            "number": group_number(task.group),
            "attempt": task.attempt,
            "prompt": self._rendered(task),
            "tokens": task.prompt_tokens.tolist(),
            "label": Reference(task.label, task.label_json).value,
            "metadata": task.metadata,
            "partial": sample_codec.encode(kept, self._config.store.blob_bytes),
        }

    async def _want(self, count: int) -> None:
        if time.monotonic() - self._wanted_at < REPEAT_SECONDS or not self._drawn:
            return
        self._wanted_at = time.monotonic()
        task = list(self._drawn.values())[-1].task
        self._service.log.info("more_groups_wanted", count=count, drawn=len(self._drawn))
        wanted = Wanted(group=task.group, attempt=task.attempt, count=count, by=self._service.instance)
        await self._outcomes.publish(task, wanted, time.time())

    def _of(self, group: str, attempt: int) -> HeldTask:
        drawn = self._drawn.get(group)
        if drawn is None or drawn.task.attempt != attempt:
            raise BadMessage(f"the rollout function does not hold group {group}, attempt {attempt}")
        return drawn

    async def _end(self, drawn: HeldTask, message: Generated | Outcome) -> None:
        await self._outcomes.publish(drawn.task, message, drawn.begun)
        self._moved = time.monotonic()
        self._drawn.pop(drawn.task.group, None)
        await drawn.holding.aclose()
        await drawn.lease.ack()

    async def _return_all(self, drawn_only: bool = False) -> None:
        tasks = [*self._drawn.values(), *([] if drawn_only else self._waiting)]
        self._drawn.clear()
        if not drawn_only:
            self._waiting.clear()
        for drawn in tasks:
            await drawn.holding.aclose()
        await asyncio.gather(*(drawn.lease.hand_back() for drawn in tasks))


async def run_where_active(service: Service, producer: Producer, spread: EngineSpread) -> None:
    """Stands by, or runs the producer while it is the run's only one, until cancelled. Raises as `Producer.run`."""
    while True:
        timing = LeaseTiming(service.config.bus.lease_duration)
        lease = LeaderLease(service.bus, service.run, PRODUCER, service.instance, timing)
        if not await lease.attempt():
            service.log.info("rollout_function_stands_by", reason="another replica runs it")
            await asyncio.sleep(timing.poll)
            while not await lease.attempt():
                await asyncio.sleep(timing.poll)
        service.log.info("rollout_function_runs_here")
        producer.allowed = lease.held
        work = {asyncio.create_task(one) for one in (producer.run(), lease.keep(), spread.keep())}
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LeaseLost as error:
            service.log.warning("producer_lease_lost", error=str(error), next_action="its groups go back; it stands by")
        finally:
            await cancelled(work)
            await lease.release()
