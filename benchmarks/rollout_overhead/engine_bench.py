"""A replica whose engine is kept busy, by requests of this process's own or by groups that its service takes from the queue."""

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agents.site import Machine, Site, site
from benchmarks.end_to_end.length_distribution import LengthDistribution
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from services.rollout.request_slots import lot
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN
from shared.bus.work_queue import WorkQueue
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from shared.runtime.errors import DeadlineExceeded
from shared.schema.ledger import group_id
from shared.schema.messages import Sampling, Task

POLL_INTERVAL_S = 0.2
DRAIN_SECONDS = 120.0

FUNCTION = "benchmarks.end_to_end.drawn_length:generate"


@dataclass(frozen=True)
class EngineLoadPlan:
    """What an engine is asked. ``at_once``: requests; ``samples``: of a group; ``prompt_tokens``; seconds before a figure, and of it."""

    lengths: LengthDistribution
    vocabulary: int
    samples: int
    prompt_tokens: int
    warm_s: float
    seconds: float

    def sampling(self) -> Sampling:
        """Returns the sampling parameters of all requests."""
        stops = self.lengths.stop_tokens(self.vocabulary, 3) if self.lengths.by_stop_tokens else []
        return Sampling(temperature=1.0, max_new_tokens=self.lengths.cap, stop_token_ids=stops)


@dataclass(frozen=True)
class EngineFigures:
    """Tokens a second that an engine has drawn, and the requests that it ran meanwhile."""

    tokens_per_s: float
    running: float
    queued: float

    def as_json(self) -> dict[str, float]:
        return {"tokens_per_s": round(self.tokens_per_s, 1), "running": round(self.running, 1), "queued": round(self.queued, 1)}


class EngineBench:
    """A replica with its engine."""

    def __init__(self, made: Site, client: EngineClient, plan: EngineLoadPlan) -> None:
        self._site, self._client, self._plan = made, client, plan
        self._rng = np.random.default_rng(0)
        self._groups = itertools.count()

    async def direct(self, at_once: int, together: int | None = None) -> EngineFigures:
        """Returns the figures while this process keeps ``at_once`` requests in the engine.

        Args:
            together: of those that have ended, so many are replaced at once; None: as many as the service replaces.
        """
        filling = _Filling(lot(at_once) if together is None else together)
        workers = [asyncio.create_task(self._draw(filling)) for _ in range(at_once)]
        try:
            return await self._figures(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._client.abort_all()
            await self._idle()

    async def one_batch(self, requests: int) -> tuple[list[int], list[float]]:
        """Returns the tokens of so many requests that begin together, and when each ended, in seconds from then on."""
        loop, sampling = asyncio.get_running_loop(), self._plan.sampling()
        began = loop.time()

        async def drawn(request: GenerationRequest) -> tuple[int, float]:
            [generation] = await self._client.generate_group([request], sampling)
            return len(generation.tokens), loop.time() - began

        found = await asyncio.gather(*(drawn(self._request()) for _ in range(requests)))
        return [tokens for tokens, _ in found], [end for _, end in found]

    async def through_service(self, at_once: int) -> EngineFigures:
        """Returns the figures while the service takes groups from a queue that never runs dry; it has ``at_once`` slots."""
        feeding = asyncio.create_task(self._feed(2 * -(-at_once // self._plan.samples)))
        try:
            return await self._figures([feeding])
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            stream = self._site.subjects.task_stream
            await self._site.bus.js.purge_stream(stream)
            await self._idle()

    async def _figures(self, work: list[asyncio.Task[None]]) -> EngineFigures:
        await asyncio.wait(work, timeout=self._plan.warm_s, return_when=asyncio.FIRST_COMPLETED)
        loop, running, queued = asyncio.get_running_loop(), list[int](), list[int]()
        began, first = loop.time(), await self._drawn()
        now, drawn = began, first
        while now - began < self._plan.seconds:
            for task in work:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_INTERVAL_S)
            drawn, now = await self._drawn(), loop.time()
            if (load := self._client.load) is not None:
                running.append(load.running)
                queued.append(load.queued)
        rate = (drawn - first) / (now - began)
        return EngineFigures(rate, statistics.fmean(running or [0]), statistics.fmean(queued or [0]))

    async def _drawn(self) -> int:
        drawn = await self._client.generated_tokens()
        assert drawn is not None  # the engine was launched with its metrics
        return drawn

    async def _draw(self, filling: "_Filling") -> None:
        sampling = self._plan.sampling()
        while True:
            await self._client.generate_group([self._request()], sampling)
            await filling.turn()

    def _request(self) -> GenerationRequest:
        lengths = self._plan.lengths
        longest = lengths.cap if lengths.by_stop_tokens else int(lengths.draw(self._rng, 1)[0])
        return GenerationRequest(self._prompt(), longest, ignore_eos=not lengths.by_stop_tokens)

    async def _feed(self, ahead: int) -> None:
        """Keeps ``ahead`` groups in the queue."""
        names, bus, plan = self._site.subjects, self._site.bus, self._plan
        consumer = task_consumer(self._site.run, self._site.config.bus, TRAIN)
        queue = WorkQueue(bus, consumer, Task)
        while True:
            waiting, _ = await queue.depth()
            for _ in range(ahead - waiting):
                await bus.publish(names.task(TRAIN), self._task(plan), deadline=30)
            await asyncio.sleep(POLL_INTERVAL_S / 4)

    def _task(self, plan: EngineLoadPlan) -> Task:
        exact = not plan.lengths.by_stop_tokens
        return Task(
            group=group_id(next(self._groups)),
            n=plan.samples,
            prompt="",
            prompt_tokens=self._prompt(),
            environment="random",
            metadata={"lengths": plan.lengths.draw(self._rng, plan.samples).tolist()} if exact else {},
            generate_function=FUNCTION if exact else None,
            sampling=plan.sampling(),
            min_version=0,
        )

    def _prompt(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._rng.integers(3, self._plan.vocabulary, self._plan.prompt_tokens).astype(np.int32)

    async def _idle(self) -> None:
        """Waits until the engine has nothing left to do. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        end, calm = loop.time() + DRAIN_SECONDS, 0
        while calm < 3:
            before = await self._drawn()
            await asyncio.sleep(3 * POLL_INTERVAL_S)
            calm = calm + 1 if await self._drawn() == before else 0
            if loop.time() > end:
                raise DeadlineExceeded("an idle engine", "its requests", DRAIN_SECONDS, "the measurement ends")


class _Filling:
    """Lets those that wait continue once ``together`` of them do."""

    def __init__(self, together: int) -> None:
        self._together, self._waiting = together, list[asyncio.Event]()

    async def turn(self) -> None:
        """Returns once there are enough to continue with."""
        self._waiting.append(going := asyncio.Event())
        if len(self._waiting) >= self._together:
            for each in self._waiting:
                each.set()
            self._waiting = []
        await going.wait()


@asynccontextmanager
async def engine_bench(directory: Path, model: Path, machine: Machine, plan: EngineLoadPlan, slots: int) -> AsyncIterator[EngineBench]:
    """Starts a replica of ``slots`` slots, and ends it after the body."""
    config = _config(directory, model, machine, plan, slots)
    async with site(directory, config, machine) as made:
        await made.start_replica()
        async with await made.engine(0) as client:
            yield EngineBench(made, client, plan)


def _config(directory: Path, model: Path, machine: Machine, plan: EngineLoadPlan, slots: int) -> RunConfig:
    prompts = directory / "prompts.jsonl"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(parents=True)
    prompts.write_text('{"prompt": "w5", "label": ""}\n')
    return parse(
        {
            "run": {"name": "engine-e", "dir": str(directory / "runs")},
            "model": {"hf_checkpoint": str(model)},
            "data": {"prompt_data": str(prompts)},
            "rollout": {
                "num_rollout": 1000,
                "rollout_batch_size": plan.samples,
                "n_samples_per_prompt": plan.samples,
                "rollout_max_response_len": plan.lengths.cap,
                "rollout_concurrency": slots,
                "rollout_device": machine.device,
                "sglang": machine.flags(1, prefixes=True),
                **({} if plan.lengths.by_stop_tokens else {"custom_generate_function_path": FUNCTION}),
            },
            "reward": {"rm_type": "random"},
            "debug": {"debug_rollout_only": True},
        }
    )
