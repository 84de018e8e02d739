"""The surroundings of the buffer in the simulation: an engine, a trainer and weight pushes, event by event.

Every decision is `services.buffer.policy`'s, every record is folded by `services.buffer.state` and replayed by
`shared.schema.ledger_audit`, as in a run on a bus. The time that messages, verifiers and checkpoints take is left out.
"""

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
from shared.schema.attestation import attest_scored
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsAdmitted, GroupsDropped, LedgerRecord, group_id, group_number
from shared.schema.ledger_audit import Audit, AuditReport
from shared.schema.messages import Interrupted, Payload, SampleMeta, Scored
from shared.schema.versions import is_lost

ENDLESS = 1 << 40
"""The number of steps of a simulated run. The simulation stops before they are done, so that it has no idle time of a run's end."""

NO_BOUND = 1 << 20
"""A bound in versions that nothing exceeds."""


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
        self.missing, self._horizon = 0, math.inf
        """At least so many groups, of those up to this number, have to come back before asking for a batch is of use; asking at every
        return would take most of the time."""

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
                self._trained_at = self._now + self._model.train_seconds

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
        """Asks for the trainer's next batch, unless it has one or there cannot be one."""
        if self._trained_at < math.inf or self.missing > 0:
            return
        state, config, formed = self._state, self._config, self._state.formed_steps
        self._decide(policy.form_batch(state, config, formed, state.live_version, self._now))
        if state.formed_steps == formed:
            candidates = policy.candidates(state, config, formed, state.live_version)
            self.missing = self._size - len(self._chosen(candidates))
            # of all that wait, the newest that a batch could take
            self._horizon = self._chosen([group for group in reversed(state.groups.values()) if group.step is None])[0].number

    def _chosen(self, groups: list[GroupState]) -> list[GroupState]:
        config = self._config
        return batch_order.choose(config.rollout.rollout_order, config.window, self._size, self._state.groups.values(), groups)

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
        """Ends a response; if it is its group's last, the group is scored."""
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
        samples = [
            SampleMeta(tokens=max(1, round(response.length)), oldest=response.oldest, newest=response.newest, finish="stop")
            for response in task.responses
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
        """Ends a training step; its weights are pushed and served."""
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
            if task.left and is_lost(task.oldest, version, self._bound, self._config.rollout.staleness_policy):
                stale = Interrupted(group=task.group, attempt=task.attempt, stale=True, replica="rollout-0")
                self._decide(policy.interrupted(self._state, self._config, stale, self._now))
        self._ask()

    def _pass_until(self, now: float) -> None:
        self._engine.pass_until(now)
        self._now = now
