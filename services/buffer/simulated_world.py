"""The buffer in a simulated world: response lengths, an engine, a trainer and weight pushes, event by event.

Every decision is `services.buffer.policy`'s, every record is folded by `services.buffer.state` and replayed by
`shared.schema.ledger_audit`, as in a run on a bus. The time that messages, verifiers and checkpoints take is left out; docs/simulation.md
lists what else.

Symbols: N GPUs; g and h, GPU-seconds of generation and of training a step; w, seconds that a weight push stops everything; M, seconds that
all N GPUs take to generate a batch, its longest responses last. Speed-ups are over the synchronous run, in which all N GPUs generate a
batch and then all of them train it: its step takes T_sync = M + h/N. However the work is spread, a step takes at least (g + h)/N + w, so
nothing is faster by more than the limit T_sync/((g + h)/N + w). U_sync = (g + h)/(N · T_sync) is the part of its GPUs' time that the
synchronous run uses; where w = 0, the limit is 1/U_sync.
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from statistics import NormalDist
from typing import Any, Literal

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, GroupState
from shared.runtime.errors import ConfigError, MyxoError
from shared.schema.digests import attest_scored
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsAdmitted, GroupsDropped, LedgerRecord, group_id, group_number
from shared.schema.ledger_audit import Audit, AuditReport
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Interrupted, Payload, SampleMeta, Scored
from shared.schema.versions import is_too_stale

Floats = NDArray[numpy.float64]
DECILES = 10
_NORMAL = NormalDist()


def _option(default: float | None, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class WorkloadModel:
    """The lengths of responses and the speed of GPUs; each field is an option of ``myxo simulate``. Raises ConfigError."""

    gpus: int = _option(16, "GPUs of rollout and trainer together")
    rollout_gpus: int | None = _option(None, "of them, those that generate (default: in the proportion of the work)")
    batch: int = _option(512, "samples a step")
    samples: int = _option(1, "samples a group")
    sigma: float = _option(0.5, "of the lognormal response lengths")
    cap: float = _option(6.0, "longest response, in means")
    correlation: float = _option(0.0, "of the logarithms of two lengths of one prompt")
    mean_tokens: float = _option(2000.0, "mean response")
    token_rate: float = _option(50.0, "tokens per second of a response on a GPU that is not saturated")
    saturation: float = _option(36.0, "responses that saturate a GPU; more of them share its throughput")
    concurrency: int = _option(80, "responses that a GPU takes at once; more of them wait")
    lot: int = _option(1, "places on a GPU that are filled together once all were taken, not one by one")
    prefill: float = _option(0.0, "seconds for which all responses stand still for those that begin together")
    training: float = _option(1.0, "GPU time of training over that of generation, h/g")
    push: float = _option(0.0, "seconds that a weight push stops everything")
    lend: float = _option(0.0, "share of the trainer's GPUs that generate while it waits for a batch")
    handover: float = _option(0.15, "seconds for which the trainer waits for GPUs that it has lent")

    def __post_init__(self) -> None:
        for name in ("mean_tokens", "token_rate", "saturation", "training", "cap", "batch", "samples", "concurrency", "lot"):
            self._require(name, 0 < getattr(self, name) < math.inf, "more than 0")
        for name in ("sigma", "push", "prefill", "handover"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        for name in ("correlation", "lend"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name, most in (("samples", MAX_SAMPLES), ("batch", self.samples << 16)):  # as of a run
            self._require(name, getattr(self, name) <= most, f"at most {most:,}")
        self._require("gpus", self.gpus >= 2, "at least 2, one that generates and one that trains")
        split = f"between 1 and {self.gpus - 1}, for the trainer needs some too"
        self._require("rollout_gpus", self.rollout_gpus is None or 0 < self.rollout_gpus < self.gpus, split)
        self._require("batch", self.batch % self.samples == 0, f"whole groups: a multiple of --samples {self.samples}")

    def _require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ConfigError("--" + name.replace("_", "-"), getattr(self, name), expected)

    @property
    def groups(self) -> int:
        """Returns the number of groups of a batch."""
        return self.batch // self.samples

    @property
    def generation(self) -> float:
        """Returns g: GPU-seconds of generation a step, at the throughput of busy GPUs."""
        return self.batch * self.capped_mean / (self.saturation * self.token_rate)

    @property
    def train(self) -> float:
        """Returns h: GPU-seconds of training a step."""
        return self.training * self.generation

    @property
    def split(self) -> int:
        """Returns the number of GPUs that generate: unless given, the part g/(g + h) of all, rounded."""
        if self.rollout_gpus is not None:
            return self.rollout_gpus
        return min(max(1, round(self.gpus / (1 + self.training))), self.gpus - 1)

    @property
    def train_seconds(self) -> float:
        """Returns the seconds that the trainer's GPUs take for a step."""
        return self.train / (self.gpus - self.split)

    @property
    def capped_mean(self) -> float:
        """Returns the tokens of the mean response, the cap applied."""
        if self.sigma == 0:
            return min(self.mean_tokens, self.longest)
        above = (math.log(self.cap) + self.sigma**2 / 2) / self.sigma  # the cap, in standard deviations of the length's logarithm
        return self.mean_tokens * _NORMAL.cdf(above - self.sigma) + self.longest * (1 - _NORMAL.cdf(above))

    @property
    def longest(self) -> float:
        """Returns the tokens of the longest response."""
        return self.cap * self.mean_tokens

    def prompts(self, rng: Generator, count: int) -> Floats:
        """Draws each prompt's share in the lengths of its responses, standard normal: float64 [count]."""
        return rng.normal(size=count)

    def lengths(self, rng: Generator, prompts: Floats, samples: int) -> Floats:
        """Draws response lengths in tokens: float64 [len(prompts), samples]."""
        own = rng.normal(size=(len(prompts), samples))
        logarithm = math.sqrt(self.correlation) * prompts[:, None] + math.sqrt(1 - self.correlation) * own
        drawn: Floats = numpy.minimum(self.mean_tokens * numpy.exp(self.sigma * logarithm - self.sigma**2 / 2), self.longest)
        return drawn

    def batches(self, rng: Generator, count: int) -> Floats:
        """Draws response lengths of whole batches in tokens: float64 [count, batch]."""
        return self.lengths(rng, self.prompts(rng, count * self.groups), self.samples).reshape(count, self.batch)

    @cached_property
    def edges(self) -> Floats:
        """Returns the lengths in tokens that divide the responses into `DECILES` parts of equal number: float64 [9]."""
        quantiles = [_NORMAL.inv_cdf(part / DECILES) for part in range(1, DECILES)]
        return self.mean_tokens * numpy.exp(self.sigma * numpy.array(quantiles) - self.sigma**2 / 2)

    @property
    def lent(self) -> float:
        """Returns how many of the trainer's GPUs generate while it waits."""
        return self.lend * (self.gpus - self.split)

    def rate(self, running: int, gpus: float) -> float:
        """Returns the tokens per second of each of ``running`` responses on ``gpus``."""
        return self.token_rate * min(1.0, self.saturation * gpus / running) if running else self.token_rate


MAKESPANS = 10_000  # Batches that M is the mean of; of those played event by event, a fiftieth


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

    def __init__(self, model: WorkloadModel, gpus: float, begins: Callable[[Response], None]) -> None:
        self._model, self._begins = model, begins
        self._set_gpus(gpus)
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

    def resize(self, gpus: float) -> None:
        """Generates on so many GPUs from now on; what has no room on them any more shares them until it has."""
        self._set_gpus(gpus)
        self._fill()

    def _set_gpus(self, gpus: float) -> None:
        self._gpus, self._room = gpus, int(self._model.concurrency * gpus)
        self._lot = int(min(self._model.lot, self._model.concurrency) * gpus)

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


@dataclass(frozen=True)
class LengthShare:
    """A part of the samples or tokens, from 0 to 1: overall, and by decile of length, shortest first (0 where there is nothing)."""

    overall: float
    by_decile: list[float]


class LengthTally:
    """Counts from the batch of step ``first`` on, by decile of length.

    Discarded is what dropped groups hold, and what was generated anew; masked, what is in a batch but too old to be trained.

    Args:
        model: whose `WorkloadModel.edges` divide the lengths.
    """

    def __init__(self, model: WorkloadModel, first: int) -> None:
        self._edges, self._first = model.edges.tolist(), first
        self._formed_at: list[float] = []
        self._counts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * DECILES)
        self.ages: Counter[int] = Counter()  # of trained samples, in versions

    def formed(self, now: float) -> None:
        """Counts a batch as formed; its samples follow."""
        self._formed_at.append(now)

    def trained(self, length: float, masked: float, age: int | None) -> None:
        """Counts a sample of ``length`` tokens in a batch, ``masked`` of them not trained. age: of its oldest trained token, if any."""
        if self._count(length, trained=1, batched_tokens=length, masked_tokens=masked) and age is not None:
            self.ages[age] += 1

    def discarded(self, length: float, drawn: float) -> None:
        """Counts a sample that would have had ``length`` tokens as thrown away with the ``drawn`` ones that it has."""
        self._count(length, discarded=1, discarded_tokens=drawn)

    def _count(self, length: float, **amounts: float) -> bool:
        """Adds amounts to those of the length's decile; returns whether the warm-up is over, and they count."""
        if len(self._formed_at) <= self._first:
            return False
        decile = bisect_left(self._edges, length)
        for name, amount in amounts.items():
            self._counts[name][decile] += amount
        return True

    @property
    def step_seconds(self) -> float:
        """Returns the mean seconds between two batches."""
        times = self._formed_at[self._first :]
        return (times[-1] - times[0]) / (len(times) - 1)

    @property
    def tokens_per_step(self) -> float:
        """Returns the tokens that a step trains, the masked ones left out, as the mean over steps."""
        return (sum(self._counts["batched_tokens"]) - sum(self._counts["masked_tokens"])) / (len(self._formed_at) - self._first)

    def share(self, name: str, *of: str) -> LengthShare:
        """Returns what was counted as ``name`` as a part of all that was counted as one of ``of``."""
        part, whole = numpy.array(self._counts[name]), numpy.sum([self._counts[other] for other in of], axis=0)
        deciles = numpy.divide(part, whole, out=numpy.zeros(DECILES), where=whole > 0)
        return LengthShare(float(part.sum() / whole.sum()), deciles.tolist())


# The number of steps of a simulated run. The simulation stops before they are done, so that it has no idle time of a run's end.
ENDLESS = 1 << 40
NO_BOUND = 1 << 20  # A bound in versions that nothing exceeds
_PAYLOAD = Payload(keys=["simulated"], bytes=1)


class SimulationBroken(MyxoError):
    """The audit of a simulated run found a violation."""


@dataclass(eq=False, slots=True)
class SimulatedTask:
    """One group's present attempt.

    prompt: as drawn by `WorkloadModel.prompts`. left: how many of its responses have not ended. oldest: version of its first token.
    """

    group: str
    attempt: int
    prompt: float
    responses: list[Response] = field(default_factory=list)
    left: int = 0
    oldest: int = -1


def _changed(config: BufferConfig, **fields: int) -> BufferConfig:
    return replace(config, rollout=config.rollout.model_copy(update=fields))


class World:
    """A run in simulated time.

    Args:
        config: of the batches and of admission; ``num_rollout`` is not looked at. tally: counts what becomes of the samples.
        enforced: whether batches keep to the bound; otherwise only admission does. interrupting: whether the engine stops what has fallen
        behind it. see: called with every ledger record.
    """

    def __init__(
        self,
        model: WorkloadModel,
        config: BufferConfig,
        rng: Generator,
        tally: LengthTally,
        *,
        enforced: bool = True,
        interrupting: bool = True,
        see: Callable[[LedgerRecord], None] = lambda _: None,
    ) -> None:
        self._model, self._rng, self._tally, self._see = model, rng, tally, see
        self._admission = _changed(config, num_rollout=ENDLESS)
        self._config = self._admission if enforced else _changed(self._admission, max_staleness=NO_BOUND)
        rollout = config.rollout
        self._size, self._samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt
        self._bound = self._config.rollout.max_staleness
        self._interrupting = interrupting and enforced
        self._state = BufferState()
        self._rewards = [0.0] * self._samples
        self._audit = Audit(self._bound, self._size)
        self._engine = ModelledEngine(model, model.split, self._began)
        self._tasks: dict[str, SimulatedTask] = {}
        self._begun: dict[int, list[SimulatedTask]] = {}  # unfinished ones by the version of their first token
        self._work_at: list[float] = []  # the engine's work when each version went live
        self._now = 0.0
        self._trained_at = math.inf
        self._lending = False  # the trainer waits, and its GPUs generate
        # At least so many groups, of those up to this number, have to come back before asking for a batch is of use; asking at every return
        # would take most of the time
        self.missing, self._horizon = 0, math.inf

    def run(self, steps: int) -> AuditReport:
        """Trains ``steps`` steps from the beginning, and stops there with groups in flight. Raises SimulationBroken."""
        self._live(0)
        while self._state.trained_steps < steps:
            end = self._engine.next_end()
            if self._trained_at <= end:
                self._step()
            else:
                self._pass_until(end)
                self._end()
        report = self._audit.report()
        if not report.ok:
            raise SimulationBroken(f"{len(report.violations)} violations in a simulated run, the first: {report.violations[0]}")
        return report

    # --- the buffer

    def _decide(self, records: Sequence[LedgerRecord]) -> None:
        while records:
            for record in records:
                self._see(record)
                self._audit.see(record)
                self._state.apply(record)
                self._act(record)
            records = policy.admit(self._state, self._admission, self._now)

    def _act(self, record: LedgerRecord) -> None:
        match record:
            case GroupsAdmitted(first=first, count=count):
                prompts = self._model.prompts(self._rng, count)
                lengths = self._model.lengths(self._rng, prompts, self._samples).tolist()
                for index in range(count):
                    self._send(SimulatedTask(group_id(first + index), 0, float(prompts[index])), [], lengths[index])
            case GroupRequeued(group=name, attempt=attempt, partial=partial, renew_below=renew_below):
                before = self._tasks[name]
                kept = [response for response in before.responses if partial is not None and response.newest >= renew_below]
                self._stop([response for response in before.responses if response not in kept])
                again = len(before.responses) - len(kept)
                lengths = self._model.lengths(self._rng, numpy.array([before.prompt]), again)[0].tolist()
                self._send(SimulatedTask(name, attempt, before.prompt), kept, lengths)
            case GroupsDropped(groups=names):
                for name in names:
                    self._stop(self._tasks.pop(name).responses)
            case BatchFormed():
                self._tally.formed(self._now)
                self._count(record)
                handover = self._model.handover if self._lending else 0.0
                self._lend(False)
                self._trained_at = self._now + handover + self._model.train_seconds

    def _lend(self, lending: bool) -> None:
        if lending != self._lending and self._model.lent:
            self._lending = lending
            self._engine.resize(self._model.split + (self._model.lent if lending else 0))

    def _count(self, batch: BatchFormed) -> None:
        below = batch.mask_below
        for name in batch.groups:
            for response in self._tasks.pop(name).responses:
                masked = 0.0
                if response.oldest < below:  # what was drawn before the first version that counts was live
                    masked = min(response.length, self._work_at[below] - response.began)
                age = batch.version - max(response.oldest, below) if response.newest >= below else None
                self._tally.trained(response.length, masked, age)

    def _ask(self) -> None:
        if self._trained_at < math.inf or self.missing > 0:
            return
        state, config, formed = self._state, self._config, self._state.formed_steps
        self._decide(policy.form_batch(state, config, formed, state.live_version, self._now))
        if state.formed_steps == formed:
            candidates = policy.candidates(state, config, formed, state.live_version)
            self.missing = self._size - len(self._chosen(candidates))
            # of all that wait, the newest that a batch could take
            self._horizon = self._chosen([group for group in reversed(state.groups.values()) if group.step is None])[0].number
            self._lend(True)

    def _chosen(self, groups: list[GroupState]) -> list[GroupState]:
        config = self._config
        return policy.in_order(config.rollout.rollout_order, config.window, self._size, self._state.groups.values(), groups)

    # --- rollout

    def _send(self, task: SimulatedTask, kept: list[Response], lengths: list[float]) -> None:
        """Hands a task to the engine, which generates samples of these lengths beside what is ``kept`` of an earlier attempt."""
        self._tasks[task.group] = task
        made = [Response(length, task) for length in lengths]
        task.responses, task.left = kept + made, len(made)
        self._engine.add(made)

    def _began(self, response: Response) -> None:
        response.oldest, task = self._state.live_version, response.task
        if task.oldest < 0:
            task.oldest = response.oldest
            if self._interrupting:
                self._begun.setdefault(task.oldest, []).append(task)

    def _end(self) -> None:
        response = self._engine.take_ended()
        response.newest, task = self._state.live_version, response.task
        task.left -= 1
        if not task.left:
            self.missing -= group_number(task.group) <= self._horizon
            self._decide(policy.scored(self._state, self._config, [self._scored(task)], self._now))
            self._ask()

    def _stop(self, responses: list[Response]) -> None:
        for response in responses:
            self._tally.discarded(response.length, self._engine.drawn(response))
        self._engine.stop(responses)

    def _scored(self, task: SimulatedTask) -> Scored:
        lengths = [max(1, round(response.length)) for response in task.responses]
        samples = [
            SampleMeta(tokens=length, trained=length, oldest=response.oldest, newest=response.newest, finish="stop")
            for response, length in zip(task.responses, lengths, strict=True)
        ]
        return Scored(
            group=task.group,
            attempt=task.attempt,
            payload=_PAYLOAD,
            samples=samples,
            rewards=self._rewards,
            replica="rollout-0",
            environment="simulated",
            started=0.0,
            ended=self._now,
        )

    # --- the trainer and its weights

    def _step(self) -> None:
        self._pass_until(self._trained_at)
        self._trained_at = math.inf
        step = self._state.trained_steps
        began = self._now - self._model.train_seconds
        batch = self._state.batches[step]
        held = [(group.id, group.scored.samples, group.scored.removed) for group in batch.groups if group.scored is not None]
        attestation = attest_scored(held, batch.mask_below)
        self._decide(policy.trained(self._state, step, step + 1, began, self._now, self._now, attestation))
        self._decide(policy.durable(self._state, step + 1, self._now))
        self._now += self._model.push
        self._engine.stand_still_until(self._now)
        self._live(step + 1)

    def _live(self, version: int) -> None:
        self._work_at.append(self._engine.work)
        self._decide(policy.live(self._state, self._config, version, self._now))
        self.missing = 0
        for task in self._begun.pop(version - self._bound - 1, []):
            if task.left and is_too_stale(task.oldest, version, self._bound, self._config.rollout.staleness_policy):
                stale = Interrupted(group=task.group, attempt=task.attempt, stale=True, replica="rollout-0")
                self._decide(policy.interrupted(self._state, self._config, stale, self._now))
        self._ask()

    def _pass_until(self, now: float) -> None:
        self._engine.pass_until(now)
        self._now = now
