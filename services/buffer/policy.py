"""The buffer's decisions, pure: state and an event in, ledger records out. No clock, no I/O; whoever calls appends the records to the
ledger, folds them into the state, and only then acts on them.

Admission: while weights of version v are live, groups are admitted for the steps k with version(k) ≤ v + max_staleness, dropped and
dead ones replaced. Staleness: a batch trained on version V takes no group with a trained token older than V − max_staleness; what is
over the bound is dropped when the batch is formed, which frees its admission.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.buffer.state import BufferState, Evaluation, Group, eval_group_id, eval_group_parts
from shared.config import RunConfig
from shared.errors import MyxoError
from shared.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalEnded,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    ScoredGroup,
    VersionLive,
    group_number,
)
from shared.messages import Batch, BatchGroup, Failed, Scored
from shared.versions import admissible_steps, version_after

STALE = "stale"
"""Reason of groups dropped for their age."""

SURPLUS = "surplus"
"""Reason of groups dropped because the run finished without them."""


@dataclass(frozen=True)
class Limits:
    """What the run's config fixes for the buffer's decisions.

    groups: per batch. eval_prompts: held-out prompts (0: the run evaluates nothing).
    """

    steps: int
    groups: int
    samples: int
    max_staleness: int
    interval: int
    eval_name: str = "heldout"
    eval_prompts: int = 0
    eval_interval: int | None = None
    eval_first: bool = True

    @classmethod
    def of(cls, config: RunConfig, eval_prompts: int) -> Limits:
        return cls(
            steps=config.rollout.num_rollout,
            groups=config.rollout.rollout_batch_size,
            samples=config.rollout.n_samples_per_prompt,
            max_staleness=config.rollout.max_staleness,
            interval=config.weights.update_weights_interval,
            eval_name=config.eval.eval_name,
            eval_prompts=eval_prompts,
            eval_interval=config.eval.eval_interval,
            eval_first=not config.eval.skip_eval_before_train,
        )

    @property
    def last_version(self) -> int:
        return version_after(self.steps, self.interval, self.steps)

    def version_of_step(self, step: int) -> int:
        """The weight version that ``step`` trains on."""
        return step // self.interval


class WrongStep(MyxoError):
    """A trainer asked for or reported a step that does not follow from the ledger; the text says what was expected."""


# --- admission


def admit(state: BufferState, limits: Limits, now: float) -> list[LedgerRecord]:
    """Groups to let in now, at most one record."""
    if state.live_version < 0 or _waits_for_first_evaluation(state, limits):
        return []
    allowed = admissible_steps(state.live_version, limits.max_staleness, limits.interval, limits.steps) * limits.groups
    room = allowed - (state.admitted - state.dropped - state.dead)
    return [GroupsAdmitted(first=state.admitted, count=room, version=state.live_version, at=now)] if room > 0 else []


def min_version(group: Group, state: BufferState, limits: Limits) -> int:
    """The oldest weights that may begin this group's generation: older ones would be over the bound in the step it is meant for."""
    slot = max(0, group.number - state.dropped - state.dead)
    step = min(slot // limits.groups, limits.steps - 1)
    return max(0, min(limits.version_of_step(step) - limits.max_staleness, state.live_version))


def _waits_for_first_evaluation(state: BufferState, limits: Limits) -> bool:
    return bool(limits.eval_prompts) and limits.eval_first and 0 not in state.evaluated


# --- what comes back


def scored(state: BufferState, limits: Limits, messages: list[Scored], now: float) -> list[LedgerRecord]:
    """Rewards arrived. Repeats, late attempts and groups that have ended give no record; a group with a sample too few is dead."""
    fresh: dict[str, ScoredGroup] = {}
    records: list[LedgerRecord] = []
    seen: set[str] = set()
    for message in messages:
        if message.group in seen:
            continue
        group = state.groups.get(message.group)
        if group is None and eval_group_parts(message.group) is not None:
            seen.add(message.group)
            records += _eval_scored(state, message, now)
            continue
        if group is None or group.scored is not None or group.attempt != message.attempt:
            continue
        seen.add(message.group)
        if not len(message.samples) == len(message.scores) == limits.samples:
            found = f"{len(message.samples)} samples and {len(message.scores)} scores came back for {limits.samples}"
            records.append(GroupDead(group=message.group, reason=found, payload=message.payload, at=now))
            continue
        fresh[message.group] = ScoredGroup(
            group=message.group,
            attempt=message.attempt,
            payload=message.payload,
            samples=message.samples,
            rewards=[score.reward for score in message.scores],
            replica=message.replica,
            started=message.started,
            ended=message.ended,
        )
    if fresh:
        records.append(GroupsScored(groups=list(fresh.values()), at=now))
    return records


def failed(state: BufferState, message: Failed, now: float) -> list[LedgerRecord]:
    """A group that generation or scoring gave up on is dead; its admission is free again."""
    parts = eval_group_parts(message.group)
    if parts is not None:
        dataset, version, _ = parts
        evaluation = state.evaluations.get(version)
        if evaluation is None or not evaluation.awaits(message.group):
            return []
        ending = EvalScored(
            group=message.group, dataset=dataset, version=version, rewards=[], oldest=0, newest=0, payload=message.payload, at=now
        )
        return [ending]
    group = state.groups.get(message.group)
    if group is None or group.scored is not None or group.attempt != message.attempt:
        return []
    return [GroupDead(group=message.group, reason=f"{message.by}: {message.reason}", payload=message.payload, at=now)]


def lost_payload(state: BufferState, name: str, now: float) -> list[LedgerRecord]:
    """The store lost a ready group's samples: it is generated anew."""
    group = state.ready.get(name)
    return [GroupRequeued(group=name, attempt=group.attempt + 1, reason="payload lost", at=now)] if group else []


# --- batches


def form_batch(state: BufferState, limits: Limits, step: int, version: int, now: float) -> list[LedgerRecord]:
    """Forms the batch of ``step`` if enough groups within the bound are ready; drops those over it either way.

    The oldest-finished groups go first; inside a batch groups lie in admission order. Raises WrongStep.
    """
    if step != state.formed_steps:
        raise WrongStep(f"step {step} was asked for; the next batch is of step {state.formed_steps}")
    if version != limits.version_of_step(step):
        raise WrongStep(f"step {step} trains on version {limits.version_of_step(step)}, not {version}")
    bound = version - limits.max_staleness
    stale = [name for name, group in state.ready.items() if _oldest(group) < bound]
    records: list[LedgerRecord] = [GroupsDropped(groups=stale, reason=STALE, at=now)] if stale else []
    over = set(stale)
    chosen = [name for name in state.ready if name not in over][: limits.groups]
    if len(chosen) == limits.groups:
        records.append(BatchFormed(step=step, version=version, groups=sorted(chosen, key=group_number), at=now))
    return records


def batch(state: BufferState, step: int) -> Batch | None:
    """The batch of a step as the trainer gets it: the same one every time."""
    record = state.batches.get(step)
    if record is None:
        return None
    groups = []
    for group in record.groups:
        assert group.scored is not None  # only scored groups are ever batched
        scored = group.scored
        groups.append(BatchGroup(group=group.id, payload=scored.payload, samples=scored.samples, rewards=scored.rewards.tolist()))
    return Batch(step=step, version=record.version, groups=groups)


def trained(state: BufferState, step: int, version: int, started: float, ended: float, now: float) -> list[LedgerRecord]:
    """The trainer finished a step; a repeat gives no record. Raises WrongStep."""
    if step < state.trained_steps:
        return []
    if step > state.trained_steps:
        raise WrongStep(f"step {step} was reported as trained; the next one to train is {state.trained_steps}")
    if step not in state.batches:
        raise WrongStep(f"step {step} was reported as trained; its batch was not formed yet")
    return [BatchTrained(step=step, version=version, started=started, ended=ended, at=now)]


def durable(state: BufferState, steps: int, now: float) -> list[LedgerRecord]:
    """A checkpoint is on disk; an older one gives no record. Raises WrongStep."""
    if steps > state.trained_steps:
        raise WrongStep(f"a checkpoint of {steps} steps was reported; {state.trained_steps} are trained")
    return [CheckpointDurable(steps=steps, at=now)] if steps > state.durable_steps else []


# --- versions, evaluation, the end


def live(state: BufferState, limits: Limits, version: int, now: float) -> list[LedgerRecord]:
    """A version is served. Older news gives no record. Where an evaluation is due, it starts."""
    if version <= state.live_version:
        return []
    records: list[LedgerRecord] = [VersionLive(version=version, at=now)]
    if limits.eval_prompts and _evaluates(limits, version):
        records.append(EvalStarted(dataset=limits.eval_name, version=version, prompts=limits.eval_prompts, at=now))
    return records


def close(state: BufferState, limits: Limits, now: float) -> list[LedgerRecord]:
    """Ends evaluations that are complete, and the run once all of it is done."""
    records: list[LedgerRecord] = []
    for evaluation in state.evaluations.values():
        if evaluation.complete:
            records.append(_eval_ended(evaluation, now))
    evaluating = bool(state.evaluations) or (
        bool(limits.eval_prompts) and limits.last_version not in state.evaluated and _evaluates(limits, limits.last_version)
    )
    if state.durable_steps >= limits.steps > state.finished_steps and not evaluating:
        # a run that was resumed with fewer steps than it had admitted groups for
        surplus = [name for name, group in state.groups.items() if group.step is None]
        if surplus:
            records.append(GroupsDropped(groups=surplus, reason=SURPLUS, at=now))
        records.append(RunFinished(steps=state.trained_steps, at=now))
    return records


def eval_groups(evaluation: Evaluation) -> list[tuple[str, int]]:
    """(group id, row) of the held-out prompts that have not come back."""
    pending = set(evaluation.pending())
    names = ((eval_group_id(evaluation.dataset, evaluation.version, row), row) for row in range(evaluation.prompts))
    return [(name, row) for name, row in names if name in pending]


def _evaluates(limits: Limits, version: int) -> bool:
    if version == limits.last_version:
        return True
    if version == 0:
        return limits.eval_first
    return limits.eval_interval is not None and (version * limits.interval) % limits.eval_interval == 0


def _eval_scored(state: BufferState, message: Scored, now: float) -> list[LedgerRecord]:
    parts = eval_group_parts(message.group)
    assert parts is not None
    dataset, version, _ = parts
    evaluation = state.evaluations.get(version)
    if evaluation is None or not evaluation.awaits(message.group):
        return []
    return [
        EvalScored(
            group=message.group,
            dataset=dataset,
            version=version,
            rewards=[score.reward for score in message.scores],
            oldest=min((sample.oldest for sample in message.samples), default=version),
            newest=max((sample.newest for sample in message.samples), default=version),
            payload=message.payload,
            at=now,
        )
    ]


def _eval_ended(evaluation: Evaluation, now: float) -> EvalEnded:
    rewards = [reward for group in evaluation.rewards.values() for reward in group]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return EvalEnded(
        dataset=evaluation.dataset,
        version=evaluation.version,
        failed=len(evaluation.failed),
        samples=len(rewards),
        mean_reward=mean,
        oldest=evaluation.oldest if rewards else evaluation.version,
        newest=evaluation.newest if rewards else evaluation.version,
        at=now,
    )


def _oldest(group: Group) -> int:
    assert group.scored is not None  # only called for ready groups
    return group.scored.oldest
