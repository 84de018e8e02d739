"""What surrounds the buffer in the simulation: an engine, a trainer and weight pushes, event by event.

Every decision is `services.buffer.policy`'s, every record is folded by `services.buffer.state` and replayed by
`shared.schema.ledger_audit`, as in a run on a bus. What is left out there is the time that messages, verifiers, prefill and checkpoints
take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy
from numpy.random import Generator

from services.buffer import batch_order, policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.simulation.length_tally import LengthTally
from services.buffer.simulation.modelled_engine import ModelledEngine, Response
from services.buffer.simulation.workload_model import WorkloadModel
from services.buffer.state import BufferState, GroupState
from shared.runtime.errors import MyxoError
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsAdmitted, GroupsDropped, LedgerRecord, group_id, group_number
from shared.schema.ledger_audit import Audit, AuditReport
from shared.schema.messages import Interrupted, Payload, SampleMeta, Score, Scored
from shared.schema.versions import is_lost

ENDLESS = 1 << 40
"""Steps of a simulated run: it is left while it is under way, so that the idle time at a run's end is no part of it."""

NO_BOUND = 1 << 20
"""A bound in versions that nothing exceeds."""


_PAYLOAD = Payload(keys=["simulated"], bytes=1)


class Broken(MyxoError):
    """The audit of a simulated run found a violation."""


@dataclass(eq=False, slots=True)
class SimulatedTask:
    """One group's present attempt.

    prompt: see `WorkloadModel.prompts`. left: of its responses, those that have not ended. oldest: version of the first token that was
    drawn.
    """

    group: str
    attempt: int
    prompt: float
    responses: list[Response] = field(default_factory=list)
    left: int = 0
    oldest: int = -1


class World:
    """See the module's docstring.

    Args:
        limits: of the batches and of admission; ``num_rollout`` is not looked at. tally: is told what becomes of the samples.
        enforced: whether batches keep to the bound; otherwise only admission does. interrupting: whether the engine stops what has fallen
        behind it. record: called with every ledger record.
    """

    def __init__(
        self,
        model: WorkloadModel,
        limits: BufferConfig,
        rng: Generator,
        tally: LengthTally,
        *,
        enforced: bool = True,
        interrupting: bool = True,
        record: Callable[[LedgerRecord], None] = lambda _: None,
    ) -> None:
        limits = replace(limits, rollout=limits.rollout.model_copy(update={"num_rollout": ENDLESS}))
        self._model, self._rng, self._tally, self._see = model, rng, tally, record
        self._admission = limits
        self._limits = limits if enforced else replace(limits, rollout=limits.rollout.model_copy(update={"max_staleness": NO_BOUND}))
        self._interrupting = interrupting and enforced
        self._state = BufferState()
        self._scores = [Score(reward=0.0) for _ in range(limits.rollout.n_samples_per_prompt)]
        self._audit = Audit(self._limits.rollout.max_staleness, limits.rollout.rollout_batch_size)
        self._engine = ModelledEngine(model, model.split, self._began)
        self._jobs: dict[str, SimulatedTask] = {}
        self._begun: dict[int, list[SimulatedTask]] = {}  # unfinished ones by the version of their first token
        self._work_at: list[float] = []  # the engine's work when each version went live
        self._now = 0.0
        self._trained_at = math.inf
        # asking at every return would take most of the time: at least so many groups, of those up to this number, have to come back first
        self._missing, self._horizon = 0, math.inf

    def run(self, steps: int) -> AuditReport:
        """Trains ``steps`` steps from the beginning, and is left there with groups in flight. Raises Broken."""
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
            raise Broken(f"{len(report.violations)} violations in a simulated run, the first: {report.violations[0]}")
        return report

    # --- the buffer

    def _decide(self, records: Sequence[LedgerRecord]) -> None:
        self._fold(records)
        while following := policy.admit(self._state, self._admission, self._now):
            self._fold(following)

    def _fold(self, records: Sequence[LedgerRecord]) -> None:
        for record in records:
            self._see(record)
            self._audit.see(record)
            self._state.apply(record)
            self._act(record)

    def _act(self, record: LedgerRecord) -> None:
        match record:
            case GroupsAdmitted(first=first, count=count):
                prompts = self._model.prompts(self._rng, count)
                lengths = self._model.lengths(self._rng, prompts, self._limits.rollout.n_samples_per_prompt).tolist()
                for place in range(count):
                    self._send(SimulatedTask(group_id(first + place), 0, float(prompts[place])), [], lengths[place])
            case GroupRequeued(group=name, attempt=attempt, partial=partial, renew_below=renew_below):
                before = self._jobs[name]
                kept = [response for response in before.responses if partial is not None and response.newest >= renew_below]
                self._stop([response for response in before.responses if response not in kept])
                again = len(before.responses) - len(kept)
                lengths = self._model.lengths(self._rng, numpy.array([before.prompt]), again)[0].tolist()
                self._send(SimulatedTask(name, attempt, before.prompt), kept, lengths)
            case GroupsDropped(groups=names):
                for name in names:
                    self._stop(self._jobs.pop(name).responses)
            case BatchFormed():
                self._tally.formed(record.step, self._now)
                self._count(record)
                self._trained_at = self._now + self._model.train_seconds

    def _count(self, batch: BatchFormed) -> None:
        below = batch.mask_below
        for name in batch.groups:
            for response in self._jobs.pop(name).responses:
                masked = 0.0
                if response.oldest < below:  # what was drawn before the first version that counts was live
                    masked = min(response.length, self._work_at[below] - response.began)
                age = batch.version - max(response.oldest, below) if response.newest >= below else None
                self._tally.trained(response.length, masked, age)

    def _ask(self) -> None:
        """The trainer asks for its next batch, unless it has one or there cannot be one."""
        if self._trained_at < math.inf or self._missing > 0:
            return
        state, limits, formed = self._state, self._limits, self._state.formed_steps
        self._decide(policy.form_batch(state, limits, formed, state.live_version, self._now))
        if state.formed_steps == formed:
            candidates = policy.candidates(state, limits, formed, state.live_version)
            self._missing = limits.rollout.rollout_batch_size - len(self._chosen(candidates))
            # of all that wait, the newest that a batch could take
            self._horizon = self._chosen([group for group in reversed(state.groups.values()) if group.step is None])[0].number

    def _chosen(self, groups: list[GroupState]) -> list[GroupState]:
        rollout = self._limits.rollout
        return batch_order.choose(
            rollout.rollout_order, self._limits.window, rollout.rollout_batch_size, self._state.groups.values(), groups
        )

    # --- rollout

    def _send(self, job: SimulatedTask, kept: list[Response], lengths: list[float]) -> None:
        """A task reaches the engine: beside what is ``kept`` of an earlier attempt, samples of these lengths are generated."""
        self._jobs[job.group] = job
        made = [Response(length, job) for length in lengths]
        job.responses, job.left = kept + made, len(made)
        self._engine.add(made)

    def _began(self, response: Response) -> None:
        response.oldest, job = self._state.live_version, response.job
        if job.oldest < 0:
            job.oldest = response.oldest
            if self._interrupting:
                self._begun.setdefault(job.oldest, []).append(job)

    def _end(self) -> None:
        """A response ends; if it is its group's last, the group is scored."""
        response = self._engine.take_ended()
        response.newest, job = self._state.live_version, response.job
        job.left -= 1
        if not job.left:
            self._missing -= group_number(job.group) <= self._horizon
            self._decide(policy.scored(self._state, self._limits, [self._scored(job)], self._now))
            self._ask()

    def _stop(self, responses: list[Response]) -> None:
        for response in responses:
            self._tally.discarded(response.length, self._engine.drawn(response))
        self._engine.stop(responses)

    def _scored(self, job: SimulatedTask) -> Scored:
        samples = [
            SampleMeta(tokens=max(1, round(response.length)), oldest=response.oldest, newest=response.newest, finish="stop")
            for response in job.responses
        ]
        return Scored(
            group=job.group,
            attempt=job.attempt,
            payload=_PAYLOAD,
            samples=samples,
            scores=self._scores,
            rollouts=[],
            replica="rollout-0",
            environment="simulated",
            started=0.0,
            ended=self._now,
        )

    # --- the trainer and its weights

    def _step(self) -> None:
        """A training step ends; its weights are pushed and served."""
        self._pass_until(self._trained_at)
        self._trained_at = math.inf
        step = self._state.trained_steps
        began = self._now - self._model.train_seconds
        self._decide(policy.trained(self._state, step, step + 1, began, self._now, self._now))
        self._decide(policy.durable(self._state, step + 1, self._now))
        self._now += self._model.push
        self._engine.stand_still_until(self._now)
        self._live(step + 1)

    def _live(self, version: int) -> None:
        self._work_at.append(self._engine.work)
        self._decide(policy.live(self._state, self._limits, version, self._now))
        self._missing = 0
        for job in self._begun.pop(version - self._limits.rollout.max_staleness - 1, []):
            if job.left and is_lost(job.oldest, version, self._limits.rollout.max_staleness, self._limits.rollout.staleness_policy):
                stale = Interrupted(group=job.group, attempt=job.attempt, stale=True, replica="rollout-0")
                self._decide(policy.interrupted(self._state, self._limits, stale, self._now))
        self._ask()

    def _pass_until(self, now: float) -> None:
        self._engine.pass_until(now)
        self._now = now
