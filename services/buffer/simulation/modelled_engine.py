"""The rollout GPUs as one engine: responses run side by side, all at the same speed, which falls when there are more than saturate it.

Speed-ups are over the synchronous run, in which all N GPUs generate a batch and then all of them train it. Symbols as in
`services.buffer.simulation.workload_model`; M, seconds that all N GPUs take to generate a batch, its longest responses last. A synchronous
step takes T_sync = M + h/N. However the work is spread, a step takes at least (g + h)/N + w, so nothing is faster than the synchronous run
by more than the limit T_sync/((g + h)/N + w). U_sync = (g + h)/(N · T_sync) is the part of its GPUs' time that the synchronous run uses;
where w = 0, the limit is 1/U_sync.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy
from numpy.random import Generator

from services.buffer.simulation.workload_model import WorkloadModel

MAKESPANS = 10_000
"""Batches that M is the mean of; of those played event by event, a fiftieth."""


@dataclass(eq=False, slots=True)
class Response:
    """One sample's generation of ``length`` tokens. ``task``: what it belongs to.

    ``began``: the engine's ``work`` when its first token was drawn. ``oldest``/``newest``: versions of its first and last token.
    """

    length: float
    task: Any
    began: float = 0.0
    oldest: int = -1
    newest: int = -1
    status: Literal["waiting", "running", "ended"] = "waiting"


class ModelledEngine:
    """Runs responses in simulated time. ``work``: tokens that a response would have which had run from the beginning on.

    All that run have the same speed, so a response that begins at work w ends at work w + its length, whatever happens until then. Where
    beginning takes time (`WorkloadModel.prefill`), all stand still meanwhile, and tokens are drawn step by step: what ends in one step
    ends, and is followed, together.

    Args:
        begins: called with each response when its first token is drawn.
    """

    def __init__(self, model: WorkloadModel, gpus: int, begins: Callable[[Response], None]) -> None:
        self._model, self._gpus, self._begins = model, gpus, begins
        self._room, self._lot = model.concurrency * gpus, min(model.lot, model.concurrency) * gpus
        self._filling, self._stall = True, 0.0
        self._waiting: deque[Response] = deque()
        self._ends: list[tuple[float, int, Response]] = []
        self._serial = count()
        self._now = 0.0
        self.running = 0
        self.work = 0.0

    @classmethod
    def makespan(cls, model: WorkloadModel, gpus: int, lengths: Sequence[float]) -> float:
        """Returns the seconds until all responses of a batch have ended."""
        engine = cls(model, gpus, lambda _: None)
        engine.add([Response(length, None) for length in lengths])
        while engine.running:
            engine.pass_until(engine.next_end())
            engine.take_ended()
        return engine._now

    def add(self, responses: Iterable[Response]) -> None:
        """Queues responses; they begin now where there is room."""
        self._waiting.extend(responses)
        self._fill()

    def next_end(self) -> float:
        """Returns when the next response ends; infinity while none runs."""
        while self._ends and self._ends[0][2].status != "running":
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        left = self._ends[0][0] - self.work
        return self._now if left <= 0 else self._now + self._stall + left / self._model.rate(self.running, self._gpus)

    def pass_until(self, now: float) -> None:
        """Generates until ``now``, which is not after `next_end`."""
        still = min(self._stall, now - self._now)
        self._stall -= still
        if self.running:
            self.work += (now - self._now - still) * self._model.rate(self.running, self._gpus)
        self._now = now

    def stand_still_until(self, now: float) -> None:
        """Lets time pass without generating."""
        self._now = now

    def take_ended(self) -> Response:
        """Returns the response that ends now; a waiting one takes its place."""
        end, _, response = heapq.heappop(self._ends)
        self.work = max(self.work, end)  # what rounding left over
        response.status = "ended"
        self.running -= 1
        self._fill()
        return response

    def stop(self, responses: Iterable[Response]) -> None:
        """Ends responses before their last token."""
        for response in responses:
            self.running -= response.status == "running"
            response.status = "ended"
        self._fill()

    def drawn(self, response: Response) -> float:
        """Returns the tokens that a response has by now, if it was not stopped."""
        if response.status == "running":
            return min(response.length, self.work - response.began)
        return response.length if response.status == "ended" else 0.0

    def _fill(self) -> None:
        free = self._room - self.running
        self._filling = free > 0 and (self._filling or free >= self._lot)  # as `services.rollout.request_slots` gives slots
        began = math.ceil(self.work) if self._model.prefill else self.work
        while self._filling and self._waiting:
            response = self._waiting.popleft()
            if response.status == "waiting":
                response.status, response.began = "running", began
                heapq.heappush(self._ends, (began + response.length, next(self._serial), response))
                self.running += 1
                self._filling, self._stall = self.running < self._room, self._model.prefill
                self._begins(response)


@dataclass(frozen=True)
class Baseline:
    """The synchronous run. ``makespan``: M, ``step``: T_sync, in seconds. ``utilisation``: U_sync."""

    makespan: float
    step: float
    utilisation: float
    limit: float

    @classmethod
    def of(cls, model: WorkloadModel, rng: Generator) -> "Baseline":
        makespan, ideal = mean_makespan(model, rng), (model.generation + model.train) / model.gpus
        step = makespan + model.train / model.gpus
        return cls(makespan, step, ideal / step, step / (ideal + model.push))


def mean_makespan(model: WorkloadModel, rng: Generator) -> float:
    """Returns M, in seconds."""
    if model.batch > model.concurrency * model.gpus:
        batches = model.batches(rng, MAKESPANS // 50).tolist()
        return sum(ModelledEngine.makespan(model, model.gpus, lengths) for lengths in batches) / len(batches)
    # all responses run at once, so the k-th shortest ends a known time after the one before it
    rates = numpy.array([model.rate(running, model.gpus) for running in range(model.batch, 0, -1)])
    rows, seconds = max(1, 1_000_000 // model.batch), 0.0
    for first in range(0, MAKESPANS, rows):
        lengths = numpy.sort(model.batches(rng, min(rows, MAKESPANS - first)), axis=1)
        seconds += float((numpy.diff(lengths, axis=1, prepend=0.0) / rates).sum())
    return seconds / MAKESPANS + model.prefill
