"""The world around the buffer's pure decisions, played at random: replicas, verifiers, a trainer with checkpoints, deaths.

`World` does what `services.buffer.buffer_service` does with the decisions (append the records, fold them in, act on them), keeps the list
of records as the ledger, and checks every invariant after every record.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, GroupState
from shared.schema.digests import attest_scored
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    EvalEnded,
    EvalScored,
    EvalStarted,
    GroupRequeued,
    GroupsAdmitted,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    VersionLive,
    group_id,
)
from shared.schema.ledger_audit import Audit
from shared.schema.messages import Batch, BatchRefused, Failed, Interrupted, Payload, SampleMeta, Scored
from shared.schema.versions import admissible_steps, is_pushed, is_too_stale, version_after
from tests.unit.buffer.decisions import meta, of_samples


def replay(records: Sequence[LedgerRecord]) -> BufferState:
    """The state that a restarted buffer has."""
    state = BufferState()
    for record in records:
        state.apply(LedgerRecord.decode(record.encode()))
    return state


@dataclass
class Job:
    """A task in a replica's hands. ``oldest``: weights of its first token, None while it has not begun.

    ``partial``: keys of the samples that it continues from.
    """

    group: str
    attempt: int
    samples: int
    minimum: int
    oldest: int | None = None
    partial: tuple[str, ...] = ()
    renew_below: int = 0


@dataclass
class World:
    """See the module's docstring."""

    limits: BufferConfig
    dice: random.Random
    state: BufferState = field(default_factory=BufferState)
    records: list[LedgerRecord] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    delivered: list[Scored] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    step: int = 0  # the trainer's next step
    offered: int = 0  # the newest version that the trainer has made
    checkpoints: list[int] = field(default_factory=lambda: [0])
    filters: bool = False
    store: dict[str, list[SampleMeta]] = field(default_factory=dict)  # payloads: what the samples under a key hold
    freed: set[str] = field(default_factory=set)
    refusals: int = 0

    def __post_init__(self) -> None:
        self.audit = Audit(self.limits.rollout.max_staleness, self.limits.rollout.rollout_batch_size)

    # --- what the service does

    def decide(self, records: Sequence[LedgerRecord]) -> None:
        self._record(records)
        while following := [*policy.close(self.state, self.limits, 0.0), *policy.admit(self.state, self.limits, 0.0)]:
            self._record(following)

    def _record(self, records: Sequence[LedgerRecord]) -> None:
        for record in records:
            self.records.append(record)
            self.audit.see(record)
            self.state.apply(record)
            self._free(self.state.released)
            self._act(record)
            self._check()

    def _act(self, record: LedgerRecord) -> None:
        match record:
            case GroupsAdmitted(first=first, count=count):
                for number in range(first, first + count):
                    self._send(self.state.groups[group_id(number)])
            case GroupRequeued(group=name):
                self._send(self.state.groups[name])
            case BatchAmended(step=step):
                self.batches.pop(step, None)
            case EvalStarted(version=version, dataset=dataset):
                for name in self.state.evaluations[version, dataset].pending:
                    self.jobs.append(Job(name, 0, 1, version))

    def _send(self, group: GroupState) -> None:
        minimum = policy.min_version(group, self.state, self.limits)
        keys = () if group.partial is None else tuple(group.partial.keys)
        assert not self.freed & set(keys)  # what a task continues from is there
        self.jobs.append(
            Job(group.id, group.attempt, self.limits.rollout.n_samples_per_prompt, minimum, partial=keys, renew_below=group.renew_below)
        )

    def _free(self, keys: Sequence[str]) -> None:
        assert len(set(keys)) == len(keys) and not self.freed & set(keys)  # each payload is freed once
        self.freed |= set(keys)

    # --- invariants

    def _check(self) -> None:
        state, limits = self.state, self.limits
        report = self.audit.report()
        assert report.violations == []
        assert (report.admitted, report.trained) == (state.admitted, state.trained)
        assert (report.dropped.total(), report.dead.total()) == (state.dropped, state.dead)
        assert report.in_flight == state.in_flight == state.admitted - state.trained - state.dropped - state.dead
        assert (report.steps, report.durable_steps, report.live_version) == (state.trained_steps, state.durable_steps, state.live_version)
        if state.live_version >= 0:
            rollout, interval = limits.rollout, limits.weights.update_weights_interval
            steps = admissible_steps(state.live_version, rollout.max_staleness, interval, rollout.num_rollout)
            allowed = steps * rollout.rollout_batch_size
            assert state.admitted - state.dropped - state.dead <= allowed + limits.surplus
        # memory follows what is in flight and what could be handed out again
        kept = sum(len(batch.groups) for step, batch in state.batches.items() if step < state.trained_steps)
        assert len(state.groups) == state.in_flight + kept
        assert set(state.batches) == set(range(state.durable_steps, state.formed_steps))
        for name, group in state.ready.items():
            assert state.groups[name] is group
            assert group.scored is not None and group.step is None
            assert group.scored.attempt == group.attempt  # the payload of an older attempt is gone
            assert group.partial is None
        assert not self._needed() & self.freed  # nothing is freed that a batch, or a task, still needs

    def _needed(self) -> set[str]:
        """Payload keys that a batch, or a task, refers to."""
        groups = self.state.groups.values()
        scored = {key for group in groups if group.scored for key in group.scored.keys}
        return scored | {key for group in groups if group.partial for key in group.partial.keys}

    def _tidy(self, message: Scored | Failed | Interrupted) -> None:
        """The service frees what an outcome leaves behind."""
        assert not set(policy.unwanted(self.state, message)) & self._needed()

    def check_replay(self) -> None:
        assert replay(self.records) == self.state

    # --- what may happen

    def begin(self) -> None:
        """A replica takes a task up, on the live weights or older ones that the task allows."""
        waiting = [job for job in self.jobs if job.oldest is None]
        if waiting and self.state.live_version >= 0:
            job = self.dice.choice(waiting)
            job.oldest = self.dice.randint(min(job.minimum, self.state.live_version), self.state.live_version)

    def finish(self) -> None:
        """Some generations end and are scored; the bus may deliver them in one lot, twice, and old ones again."""
        ended = [job for job in self.jobs if job.oldest is not None and self.dice.random() < 0.5]
        lot = [self._scored(job) for job in ended]
        for job in ended:
            self.jobs.remove(job)
        self.delivered += lot
        lot += self.dice.choices(self.delivered, k=self.dice.randint(0, 2)) if self.delivered else []
        self.dice.shuffle(lot)
        self._deliver(lot)

    def fall_short(self) -> None:
        """A group comes back with a sample too few."""
        begun = [job for job in self.jobs if job.oldest is not None and not job.group.startswith("eval")]
        if begun:
            job = self.dice.choice(begun)
            self.jobs.remove(job)
            short = self._scored(job)
            self._deliver([short.model_copy(update={"samples": short.samples[1:], "rewards": short.rewards[1:], "removed": ()})] * 2)

    def interrupt(self) -> None:
        """A replica leaves, or stops what is stale, and hands back what it has; perhaps it says so twice."""
        begun = [job for job in self.jobs if job.oldest is not None and not job.group.startswith("eval")]
        if not begun:
            return
        job = self.dice.choice(begun)
        self.jobs.remove(job)
        assert job.oldest is not None
        stale = is_too_stale(job.oldest, self.state.live_version, self.limits.rollout.max_staleness, self.limits.rollout.staleness_policy)
        payload = None
        if not stale and self.dice.random() < 0.7:
            key = f"{job.group}:{job.attempt}"
            self.store[key] = self._samples(job)
            payload = Payload(keys=[key], bytes=1)
        message = Interrupted(group=job.group, attempt=job.attempt, stale=stale, replica="r", payload=payload)
        for _ in range(self.dice.randint(1, 2)):
            self.decide(policy.interrupted(self.state, self.limits, message, 0.0))
            self._tidy(message)

    def fail(self) -> None:
        """A replica or verifier gives a group up, or says so again."""
        if self.jobs:
            job = self.dice.choice(self.jobs)
            if self.dice.random() < 0.8:
                self.jobs.remove(job)
            message = Failed(group=job.group, attempt=job.attempt, reason="died", by="r")
            anew = policy.lost_failed(self.state, message, 0.0) if self.dice.random() < 0.3 else []
            self.decide(anew or policy.failed(self.state, message, 0.0))

    def fail_late(self) -> None:
        """A failure of a group that came back before."""
        if self.delivered:
            old = self.dice.choice(self.delivered)
            self.decide(policy.failed(self.state, Failed(group=old.group, attempt=old.attempt, reason="late", by="r"), 0.0))

    def lose_payload(self) -> None:
        """The store has lost a group, ready or not."""
        names = [*self.state.ready, *self.state.groups, "g99999999"]
        self.decide(policy.lost_ready(self.state, self.dice.choice(names), 0.0))

    def ask(self) -> None:
        """The trainer asks for its next batch: a new one, or one that it had before it died."""
        if self.step >= self.limits.rollout.num_rollout:
            return
        version = self.limits.version_of_step(self.step)
        if self.step in self.state.batches:
            self.decide(policy.amended(self.state, self.limits, self.step, 0.0))
        else:
            self.decide(policy.form_batch(self.state, self.limits, self.step, version, 0.0))
        batch = policy.batch(self.state, self.step)
        if batch is not None:
            assert batch.version == version
            assert self.batches.setdefault(self.step, batch) == batch
            self._check_bound(batch)

    def _check_bound(self, batch: Batch) -> None:
        """The strict bound, token by token: on what the trainer would train of this batch."""
        bound = batch.version - self.limits.rollout.max_staleness
        for group in batch.groups:
            scored = self.state.groups[group.group].scored
            assert scored is not None
            trained = [sample for index, sample in enumerate(scored.samples) if index not in group.removed]
            oldest = [max(sample.oldest, batch.mask_below) for sample in trained if sample.newest >= batch.mask_below]
            assert oldest, "a group of which nothing is trained"
            assert min(oldest) >= bound
            if self.limits.rollout.staleness_policy == "continue":
                assert len(oldest) == len(trained)  # no sample has lost all its tokens
            if self.limits.rollout.staleness_policy in ("drop", "requeue"):
                assert batch.mask_below == 0

    def refuse(self) -> None:
        """The trainer, or its critic, cannot train a group of a batch, says so perhaps twice, and tries again at once or not.

        It may be that the store has lost it.
        """
        groups = [group for batch in self.state.batches.values() if batch.step >= self.step for group in batch.groups]
        if groups:
            group = self.dice.choice(groups)
            step = group.step
            assert step is not None
            lost = self.dice.random() < 0.5
            for _ in range(self.dice.randint(1, policy.MOST_REFUSALS)):
                self.refusals += 1
                message = BatchRefused(step=step, group=group.id, sample=0, reason="no good", at=float(self.refusals))
                for _ in range(self.dice.randint(1, 2)):
                    self.decide(policy.refused(self.state, message, 0.0, lost))

    def train(self) -> None:
        """The trainer trains the batch it has and reports it, perhaps twice."""
        if self.step in self.state.batches and self.state.batches[self.step].lost:
            return
        if self.step in self.batches and self.step < self.limits.rollout.num_rollout and self.step in self.state.batches:
            step, self.step = self.step, self.step + 1
            for _ in range(self.dice.randint(1, 2)):
                batch = self.state.batches[step]
                held = [(group.id, group.scored.samples, group.scored.removed) for group in batch.groups if group.scored]
                attestation = attest_scored(held, batch.mask_below)
                self.decide(policy.trained(self.state, step, step + 1, 0.0, 1.0, 0.0, attestation))
            if is_pushed(self.step, self.limits.weights.update_weights_interval, self.limits.rollout.num_rollout):
                self.offered = version_after(self.step, self.limits.weights.update_weights_interval, self.limits.rollout.num_rollout)

    def push(self) -> None:
        """The newest version goes live, and old news arrives again."""
        for version in (self.offered, self.dice.randint(0, self.offered)):
            self.decide(policy.live(self.state, self.limits, version, 0.0))

    def save(self) -> None:
        """The trainer writes a checkpoint and reports it, or an old one again."""
        if self.step <= self.state.trained_steps:
            self.checkpoints.append(max(self.step, *self.checkpoints))
        self.decide(policy.durable(self.state, self.dice.choice(self.checkpoints), 0.0))

    def kill_trainer(self) -> None:
        """The trainer dies and continues from its newest durable checkpoint."""
        self.step = self.state.durable_steps
        self.checkpoints = [self.state.durable_steps]

    def kill_buffer(self) -> None:
        """The buffer dies; its successor replays the ledger and sends out again what is outstanding."""
        self.check_replay()
        self.state = replay(self.records)
        for group in self.state.outstanding:
            self._send(group)
        for current in self.state.evaluations.values():
            self.jobs += [Job(name, 0, 1, current.version) for name in current.pending]

    def _samples(self, job: Job) -> list[SampleMeta]:
        """Samples as a replica makes them on the live weights: new ones, and those it continues."""
        assert job.oldest is not None
        newest = self.state.live_version
        earlier = [sample for key in job.partial for sample in self.store[key]]
        samples = []
        for index in range(job.samples):
            if index < len(earlier) and earlier[index].newest >= job.renew_below:
                old = earlier[index]
                samples.append(replace(old, newest=self.dice.randint(old.newest, max(old.newest, newest))))
                continue
            oldest = job.oldest if index == 0 else self.dice.randint(job.oldest, newest)
            samples.append(meta(oldest, self.dice.randint(oldest, newest), 3))
        return samples

    def _scored(self, job: Job) -> Scored:
        key = f"{job.group}:{job.attempt}"
        samples = self.store[key] = self._samples(job)
        training = not job.group.startswith("eval")
        rewards = [float(self.dice.randint(0, 1)) for _ in samples]
        removed = tuple(index for index in range(len(samples)) if self.filters and training and self.dice.random() < 0.2)
        filtered = "zero_std" if self.filters and training and self.dice.random() < 0.1 else None
        return of_samples(
            Scored, job.group, samples, key, attempt=job.attempt, rewards=rewards, removed=removed, filtered=filtered, environment="math"
        )

    def _deliver(self, lot: list[Scored]) -> None:
        records = policy.scored(self.state, self.limits, lot, 0.0)
        for record in records:
            if isinstance(record, GroupsScored):
                for scored in record.groups:
                    assert len(scored.samples) == len(scored.rewards) == self.limits.rollout.n_samples_per_prompt
        self.decide(records)
        for message in lot:
            self._tidy(message)

    # --- everything comes back

    def settle(self) -> None:
        """From here on nothing fails; the run must finish in as many rounds as it has steps and evaluations, and some."""
        self.filters = False
        if self.offered < (made := version_after(self.step, self.limits.weights.update_weights_interval, self.limits.rollout.num_rollout)):
            self.offered = made
        for _ in range(4 * self.limits.rollout.num_rollout + 8):
            self.decide(policy.live(self.state, self.limits, self.offered, 0.0))
            for job in self.jobs:
                job.oldest = self.state.live_version if job.oldest is None else job.oldest
            jobs, self.jobs = self.jobs, []
            self._deliver([self._scored(job) for job in jobs])
            self.ask()
            self.train()
            self.decide(policy.durable(self.state, self.step, 0.0))
            if self.state.finished_steps > 0:
                return

    def check_end(self) -> None:
        """All that a finished run must be."""
        state, limits, report = self.state, self.limits, self.audit.report()
        assert state.finished_steps == limits.rollout.num_rollout, "the run does not finish although everything comes back"
        assert report.finished and report.in_flight == 0
        shrunk = sum(len(record.removed) - len(record.added) for record in self.records if isinstance(record, BatchAmended))
        assert report.trained == limits.rollout.num_rollout * limits.rollout.rollout_batch_size - shrunk == state.trained
        assert not state.groups and not state.batches and not state.evaluations
        assert sum(isinstance(record, RunFinished) for record in self.records) == 1
        assert [record.step for record in self.records if isinstance(record, BatchFormed)] == list(range(limits.rollout.num_rollout))
        went_live = [record.version for record in self.records if isinstance(record, VersionLive)]
        assert [(record.version, record.dataset) for record in self.records if isinstance(record, EvalEnded)] == list(state.evaluated)
        came_back = [record.group for record in self.records if isinstance(record, EvalScored)]
        assert len(set(came_back)) == len(came_back) == sum(limits.eval_sets[name] for _, name in state.evaluated)
        assert set(state.evaluated) == {
            (version, name)
            for before, version in pairwise([-1, *went_live])
            if self._evaluates(before, version)
            for name in limits.eval_sets
        }
        for ended in state.evaluated.values():
            assert (ended.prompts, ended.late) == (limits.eval_sets[ended.dataset], 0) and ended.version <= ended.live
        self.check_replay()

    def _evaluates(self, before: int, version: int) -> bool:
        """Whether an evaluation falls due between two versions that went live one after the other."""
        limits = self.limits
        if version == limits.last_version or version == 0:
            return version == limits.last_version or not limits.evaluation.skip_eval_before_train
        interval, made = limits.evaluation.eval_interval, limits.weights.update_weights_interval
        first = before < 0 and not limits.evaluation.skip_eval_before_train
        return first or (
            interval is not None and any(steps % interval == 0 for steps in range(max(0, before) * made + 1, version * made + 1))
        )
