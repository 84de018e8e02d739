"""The buffer's decisions, pure: state and an event in, ledger records out. There is no clock and no I/O here; the caller appends the
records to the ledger, folds them into the state, and only then acts on them.

Admission: while weights of version v are live, groups are admitted for the steps k with version(k) ≤ v + max_staleness, and dropped and
dead ones are replaced. A batch trained on version V trains no token older than V − max_staleness: `services.buffer.staleness` decides about
what is older when the batch is formed, `in_order` which of the others it takes.

Refusals: after three by the trainer a group leaves its batch, and another takes its place. The counts are in the ledger, so neither the
trainer's deaths nor the buffer's begin them anew.

Lost payloads: a store acknowledges what it has not written to its disk yet. What it loses with its process is no group's fault, so the
group is generated anew from its prompt, unless it happens to the same one again and again: then something removes payloads, and the run has
to say so.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Literal

from services.buffer import evaluation, staleness
from services.buffer.buffer_config import BufferConfig
from services.buffer.staleness import StalenessDecision
from services.buffer.state import BufferState, GroupState, trained_of
from shared.runtime.errors import INFRASTRUCTURE, POLICY, TASK, MyxoError
from shared.schema import codec, ledger
from shared.schema.ledger import PAYLOAD_LOST, LedgerRecord, group_number
from shared.schema.messages import (
    Attestation,
    Batch,
    BatchGroup,
    BatchRefused,
    Discarded,
    Evaluated,
    Failed,
    GroupOutcome,
    Interrupted,
    Outcome,
    Payload,
    RewardPart,
    Scored,
    ScoredGroup,
    Wanted,
)
from shared.schema.sample import too_long

BUFFER = "buffer"  # Who gives up a group for an outcome that is not taken
MOST_LOST = 3  # Losses of one group after which it is not generated again
MOST_REFUSALS = 3  # Refusals after which a group is dead: what a new reading of the payload repairs is over by then

Order = Literal["completion", "windowed_fifo", "fifo"]


def in_order(order: Order, window: int, size: int, groups: Iterable[GroupState], fitting: list[GroupState]) -> list[GroupState]:
    """Returns the next batch's groups, or too few of them where it has to wait.

    Args:
        window: numbers that ``windowed_fifo`` looks ahead. size: groups of a batch. groups: all in flight, in order of admission.
        fitting: those of them that are ready and within the bound, in the order they came back.
    """
    if order == "completion" or len(fitting) < size:
        return fitting[:size]
    first = [group.number for group in islice((group for group in groups if group.step is None), size)]  # in no batch yet
    # never fewer than a batch, even if groups have left the window: it would wait for ever
    last = first[-1] if order == "fifo" else max(first[-1], first[0] + window - 1)
    return [group for group in fitting if group.number <= last][:size]


STALE = "stale"  # Reason of groups dropped for their age
SURPLUS = "surplus"  # Reason of groups dropped because the run finished without them

# The beginning of the reason of groups dropped by a filter, and its continuation where a sample filter took every sample
FILTERED, NOTHING_LEFT = "filtered", "no sample is left to train"
DISCARDED = "discarded"  # The beginning of the reason of groups dropped because a rollout function of the user's did not hand them in
WANTED_BATCHES = 16  # The batches' worth of groups that may be outstanding for a rollout function that discards most of what it finishes

# Samples of one `GroupsScored`: about 70 bytes each. With many named rewards it is divided again (`services.buffer.ledger_writer`).
RECORD_SAMPLES = 2048
MOST_PARTS = 64  # The most named rewards of a batch that are reported: the user chooses the names, and all of them go into one message
PARTS_BYTES = MOST_PARTS * 384  # Of a batch's message: the named rewards, each with a name of at most 64 characters and five numbers


class BadChoice(MyxoError):
    """A buffer filter chose groups that are no batch; the text says which."""


# The answer to a trainer that comes back with more steps than the ledger has
AHEAD = "the checkpoint is ahead of the ledger, as after a loss of power; `myxo repair RUN` says what would be lost, and repairs it"


class WrongStep(MyxoError):
    """A trainer asked for or reported a step that does not follow from the ledger; the text says what was expected."""


class CheckpointsGone(WrongStep):
    """A trainer asks for a batch that was freed once a checkpoint was beyond it, and so has lost that checkpoint; no restart mends it."""


class WrongVersion(MyxoError):
    """Weights were announced that no step of the run can have made."""


# --- admission


def admit(state: BufferState, limits: BufferConfig, now: float) -> list[LedgerRecord]:
    """Returns the record of the groups to let in now, if there are any."""
    complete = state.formed_steps >= limits.rollout.num_rollout and not any(batch.lost for batch in state.batches.values())
    if state.live_version < 0 or complete:
        return []
    room = limits.admissible_groups(state.live_version, state.trained_steps) - (state.admitted - state.dropped - state.dead)
    return [ledger.GroupsAdmitted(first=state.admitted, count=room, version=state.live_version, at=now)] if room > 0 else []


def min_version(group: GroupState, state: BufferState, limits: BufferConfig) -> int:
    """Returns the oldest weights that may begin this group's generation: older ones would be over the bound in the step it is meant for.

    That step follows from the group's rank among those before it that were not dropped and did not die, and never has its batch already.
    """
    slot = group.number - state.ended_before(group.number)
    step = min(max(slot // limits.rollout.rollout_batch_size, state.formed_steps), limits.rollout.num_rollout - 1)
    return max(0, min(limits.version_of_step(step) - limits.rollout.max_staleness, state.live_version))


# --- outcomes


def outcomes(state: BufferState, limits: BufferConfig, messages: Sequence[GroupOutcome], now: float) -> list[LedgerRecord]:
    """Decides about outcomes together: about any number of `Scored`, or about a single one of another kind."""
    match messages:
        case [Failed() as message]:
            return failed(state, message, now)
        case [Interrupted() as message]:
            return interrupted(state, limits, message, now)
        case [Discarded() as message]:
            return discarded(state, message, now)
        case [Wanted() as message]:
            return wanted(state, limits, message, now)
        case [Evaluated() as message]:
            return evaluation.given(state, limits, message, now)
        case _:
            return scored(state, limits, [message for message in messages if isinstance(message, Scored)], now)


def scored(state: BufferState, limits: BufferConfig, messages: list[Scored], now: float) -> list[LedgerRecord]:
    """Takes rewards that arrived. Repeats, late attempts and groups that have ended give no record; a group with a sample too few is dead.

    Groups that a filter took out, or left nothing of to train, are recorded with their rewards and dropped.
    """
    records: list[LedgerRecord] = []
    fresh: list[ScoredGroup] = []
    filtered: dict[str, list[str]] = {}
    decided: set[str] = set()
    for message in messages:
        name = message.group
        group = state.groups.get(name)
        if name in decided or (group is not None and awaiting(state, message) is None):
            continue
        decided.add(name)
        if group is None:
            records += evaluation.came_back(state, aligned(message), now)
        elif (problem := group_problem(message, state, limits)) is not None:
            fault = POLICY if max(message.payload.tokens, default=0) > limits.longest_sample else TASK  # too long is the model's
            records.append(ledger.GroupDead(group=name, reason=problem, fault=fault, payload=message.payload, at=now))
        else:
            fresh.append(message)
            nothing_left = message.filtered is None and not trained_of(message.samples, message.removed)
            if (reason := NOTHING_LEFT if nothing_left else message.filtered) is not None:
                filtered.setdefault(reason, []).append(name)
    size = max(1, RECORD_SAMPLES // max((len(group.samples) for group in fresh), default=1))
    records += [ledger.GroupsScored(groups=fresh[at : at + size], at=now) for at in range(0, len(fresh), size)]
    records += [ledger.GroupsDropped(groups=names, reason=f"{FILTERED}: {reason}", at=now) for reason, names in filtered.items()]
    return records


def aligned(message: Scored) -> Scored | Failed:
    """Returns the rewards of a held-out prompt, or its failure where they do not belong to its samples."""
    problem = _alignment_problem(message)
    if problem is None:
        return message
    return Failed(group=message.group, attempt=message.attempt, reason=problem, by=BUFFER, fault=TASK, payload=message.payload)


def group_problem(message: Scored, state: BufferState, limits: BufferConfig) -> str | None:
    """Returns what is wrong with a training group that should hold one or more samples of each rollout, none longer than a micro-batch.

    Rollouts may be missing, as far as the run's `min_rollouts` allows: what made them failed.
    """
    rollouts, lengths = limits.rollout.n_samples_per_prompt, message.payload.tokens
    samples, rewards = len(message.samples), len(message.rewards)
    origins = message.rollouts or range(samples)
    if not samples == rewards == len(origins) or not limits.rollout.fewest_rollouts <= len(set(origins)) <= rollouts:
        return f"{samples} samples of {len(set(origins))} rollouts, with {rewards} rewards, came back for {rollouts} rollouts"
    if lengths and max(lengths) > limits.longest_sample:
        return f"sample {message.group}/{lengths.index(max(lengths))} {too_long(max(lengths), limits.longest_sample)}"
    newest, problem = max(state.live_version, limits.newest_version(state.formed_steps)), _alignment_problem(message)
    wrong = ((index, one) for index, one in enumerate(message.samples) if not one.oldest <= one.newest <= newest)
    for index, one in wrong if problem is None else ():
        return f"sample {index} holds tokens of versions {one.oldest} to {one.newest}; the newest that there can be is {newest}"
    return problem


def _alignment_problem(message: Scored) -> str | None:
    samples, rewards, rollouts = len(message.samples), len(message.rewards), len(message.rollouts or message.samples)
    if not samples == rewards == rollouts:
        return f"{samples} samples, with {rewards} rewards and the rollouts of {rollouts}, came back"
    if len(message.parts) not in (0, samples) or not set(message.removed) <= set(range(samples)):
        return f"named rewards of {len(message.parts)} samples, and {str(message.removed)[:80]} removed, came back for {samples} samples"
    if not {position for position, _ in message.unread} <= set(range(samples)):
        return f"unread responses {str(message.unread)[:80]} came back for {samples} samples"
    if len(message.payload.tokens) not in (0, samples):
        return f"lengths of {len(message.payload.tokens)} samples came back for {samples} samples"
    return None


def awaiting(state: BufferState, message: Outcome) -> GroupState | None:
    """Returns the group that waits for this outcome of its present attempt."""
    group = state.groups.get(message.group)
    return group if group is not None and group.scored is None and group.attempt == message.attempt else None


def failed(state: BufferState, message: Failed, now: float) -> list[LedgerRecord]:
    """Ends a group that generation or scoring gave up on as dead; its admission is free again."""
    if message.group not in state.groups:
        return evaluation.came_back(state, message, now)
    if awaiting(state, message) is None:
        return []
    reason = f"{message.by}: {message.reason}"
    return [ledger.GroupDead(group=message.group, reason=reason, fault=message.fault, payload=message.payload, at=now)]


def interrupted(state: BufferState, limits: BufferConfig, message: Interrupted, now: float) -> list[LedgerRecord]:
    """Takes back a group that a replica did not finish. Another one continues its samples; where these are stale, the policy decides."""
    if (group := awaiting(state, message)) is None:
        return []
    if message.stale:
        return [_drop([group.id], now)] if limits.rollout.staleness_policy in ("drop", "mask") else [requeue(group, STALE, now)]
    has = message.payload or group.partial
    return [requeue(group, f"{message.replica} did not end it", now, partial=has, renew_below=group.renew_below)]


def discarded(state: BufferState, message: Discarded, now: float) -> list[LedgerRecord]:
    """Drops a group that a rollout function took and does not hand in."""
    if awaiting(state, message) is None:
        return []
    return [ledger.GroupsDropped(groups=[message.group], reason=f"{DISCARDED}: {message.reason}", at=now)]


def wanted(state: BufferState, limits: BufferConfig, message: Wanted, now: float) -> list[LedgerRecord]:
    """Admits groups ahead of those that a rollout function will discard, as long as it has a group, and not too many are outstanding."""
    room = WANTED_BATCHES * limits.rollout.rollout_batch_size - len(state.outstanding)
    if awaiting(state, message) is None or room <= 0:
        return []
    return [ledger.GroupsAdmitted(first=state.admitted, count=min(message.count, room), version=state.live_version, at=now)]


def unwanted(state: BufferState, message: GroupOutcome) -> list[str]:
    """Returns the payload keys of an outcome that are not needed after its decision: it is of an ended group, of an attempt that was given
    up, or a repeat. A second replica may have written them long after they were freed."""
    if message.payload is None or awaiting(state, message) is not None:
        return []
    group = state.groups.get(message.group)
    held = (group.partial, group.scored) if group is not None else ()
    kept = {key for one in held if one is not None for key in one.keys}
    return [key for key in message.payload.keys if key not in kept]


# --- batches


def candidates(state: BufferState, limits: BufferConfig, step: int, version: int) -> list[GroupState]:
    """Returns the ready groups that the batch of ``step`` may take, in the order they came back. Raises WrongStep."""
    return by_decision(state, limits, _bound(state, limits, step, version))["fits"]


def form_batch(
    state: BufferState, limits: BufferConfig, step: int, version: int, now: float, chosen: list[str] | None = None
) -> list[LedgerRecord]:
    """Forms the batch of ``step`` if enough groups within the bound are ready; settles those over it either way.

    Inside a batch groups lie in admission order.

    Args:
        chosen: by a buffer filter among the `candidates`, instead of the run's order. Raises BadChoice where they are no batch.

    Raises WrongStep.
    """
    bound = _bound(state, limits, step, version)
    ready = by_decision(state, limits, bound)
    records: list[LedgerRecord] = [_drop([group.id for group in ready["drop"]], now)] if ready["drop"] else []
    for group in ready["requeue"]:
        kept = group.scored.payload if group.scored is not None and limits.rollout.staleness_policy == "continue" else None
        # only samples of the newest possible version are kept: others would be over the bound before the new ones are back
        records.append(requeue(group, STALE, now, partial=kept, renew_below=version if kept else 0))
    size = limits.rollout.rollout_batch_size
    if chosen is None:
        taken = in_order(limits.rollout.rollout_order, limits.window, size, state.groups.values(), ready["fits"])
        chosen = [group.id for group in taken]
    else:
        _check_choice(chosen, {group.id for group in ready["fits"]}, size)
    if len(chosen) == size:
        mask_below = staleness.mask_below(limits.rollout.staleness_policy, bound)
        names = sorted(chosen, key=group_number)
        if largest := _largest_of_too_large([state.groups[name] for name in names], mask_below, limits):
            reason = f"a batch with it is over the bus's limit of {limits.message_bytes} bytes, and it is the largest of its groups"
            return [*records, ledger.GroupDead(group=largest, reason=reason, fault=TASK, at=now)]
        records.append(ledger.BatchFormed(step=step, version=version, groups=names, mask_below=mask_below, at=now))
    return records


def _largest_of_too_large(groups: list[GroupState], mask_below: int, limits: BufferConfig) -> str | None:
    """Returns the largest of a batch's groups where the batch is over the bus's limit."""
    named, room = limits.named_rewards, limits.message_bytes - PARTS_BYTES
    if sum([_most_bytes(group, named) for group in groups]) <= room:  # nearly always: nothing needs to be encoded for it
        return None
    sizes = {group.id: len(codec.pack(_batch_group(group, mask_below, named).model_dump())) for group in groups}
    return max(sizes, key=lambda name: sizes[name]) if sum(sizes.values()) > room else None


def _most_bytes(group: GroupState, named: bool) -> int:
    """Returns a bound on what a group takes of its batch's message: 9 bytes a number, 4 a character, and the names of the fields."""
    result = group.scored
    assert result is not None
    numbers = len(result.sizes) + len(result.tokens) + 3 * len(result.samples)
    parts = sum([5 + sum([14 + 4 * len(name) for name in sample]) for sample in result.parts]) if named else 0
    return 512 + 9 * numbers + sum([5 + 4 * len(key) for key in result.keys]) + parts


def batch(state: BufferState, step: int, named: bool = False) -> Batch | None:
    """Returns the batch of a step as the trainer gets it, the same one every time; None where it was not formed yet, or lacks a group.

    Args:
        named: with the named rewards of each sample.
    """
    record = state.batches.get(step)
    if record is None or record.lost:
        return None
    groups = [_batch_group(group, record.mask_below, named) for group in record.groups]
    parts = _reward_parts(sample for group in record.groups if group.scored is not None for sample in group.scored.parts)
    return Batch(step=step, version=record.version, mask_below=record.mask_below, groups=groups, parts=parts)


def _batch_group(group: GroupState, mask_below: int, named: bool) -> BatchGroup:
    result = group.scored
    assert result is not None  # only scored groups are ever batched
    rewards, stale, parts = result.rewards.tolist(), result.stale(mask_below), result.parts if named else ()
    return BatchGroup(group=group.id, payload=result.payload, rewards=rewards, parts=parts, removed=result.removed, stale=stale)


def _reward_parts(samples: Iterable[Mapping[str, float]]) -> dict[str, RewardPart]:
    """Returns the moments of each named reward over the samples that have it; `MOST_PARTS` at most, those of most samples."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for sample in samples for item in sample.items()):
        found[name].append(value)
    parts = {}
    for name, values in sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_PARTS]:
        mean = statistics.fmean(values)
        spread = statistics.fmean([(value - mean) ** 2 for value in values]) ** 0.5
        parts[name] = RewardPart(samples=len(values), mean=mean, std=spread, min=min(values), max=max(values))
    return parts


def trained(
    state: BufferState, step: int, version: int, started: float, ended: float, now: float, attestation: Attestation | None = None
) -> list[LedgerRecord]:
    """Ends the groups of a step that the trainer has finished; a repeat gives no record. Raises WrongStep."""
    if step < state.trained_steps:
        return []
    if step > state.trained_steps:
        raise WrongStep(f"step {step} was reported as trained; the next one to train is {state.trained_steps}")
    if step not in state.batches:
        raise WrongStep(f"step {step} was reported as trained; its batch was not formed yet")
    if lost := state.batches[step].lost:
        raise WrongStep(f"step {step} was reported as trained; its groups {', '.join(lost)} were refused, and are not replaced yet")
    return [ledger.BatchTrained(step=step, version=version, started=started, ended=ended, attestation=attestation, at=now)]


def durable(state: BufferState, steps: int, now: float) -> list[LedgerRecord]:
    """Takes note of a checkpoint that is on disk; an older one gives no record. Raises WrongStep."""
    if steps > state.trained_steps:
        raise WrongStep(f"a checkpoint of {steps} steps was reported; {state.trained_steps} are trained: {AHEAD}")
    return [ledger.CheckpointDurable(steps=steps, at=now)] if steps > state.durable_steps else []


# --- versions, evaluation, the end


def live(state: BufferState, limits: BufferConfig, version: int, now: float) -> list[LedgerRecord]:
    """Takes note of a version that is served; an older one gives no record. Starts the evaluations that are due, unless it did before.

    Raises WrongVersion. A version is announced again and again: a buffer that died between these two records finds the second one missing.
    """
    if version < state.live_version:
        return []
    if version > limits.last_version:
        raise WrongVersion(f"weights of version {version} are announced; the run's last is {limits.last_version}")
    records: list[LedgerRecord] = [ledger.VersionLive(version=version, at=now)] if version > state.live_version else []
    return records + evaluation.due(state, limits, version, now)


def is_late(state: BufferState, limits: BufferConfig, now: float) -> bool:
    """Returns whether the deadline of an evaluation has passed, so that `close` ends it."""
    return any(evaluation.is_over(current, limits, now) for current in state.evaluations.values())


def close(state: BufferState, limits: BufferConfig, now: float, logging: bool = False) -> list[LedgerRecord]:
    """Ends evaluations that are complete or late, and the run once all of it is done. ``logging``: a log function is still to see one, or
    responses are still to be kept."""
    records: list[LedgerRecord] = [
        evaluation.ended(current, state, limits, now) for current in state.evaluations.values() if evaluation.is_over(current, limits, now)
    ]
    evaluating = logging or bool(state.evaluations) or evaluation.awaited(state, limits)
    if state.durable_steps >= limits.rollout.num_rollout > state.finished_steps and not evaluating:
        # over-sampled, or of a run that was resumed with fewer steps than it had admitted groups for
        surplus = [name for name, group in state.groups.items() if group.step is None]
        if surplus:
            records.append(ledger.GroupsDropped(groups=surplus, reason=SURPLUS, at=now))
        records.append(ledger.RunFinished(steps=state.trained_steps, at=now))
    return records


def lost_ready(state: BufferState, name: str, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was scored, and is in no batch yet. One that is lost again and again is dead."""
    group = state.ready.get(name)
    if group is not None and group.lost >= MOST_LOST:
        return [ledger.GroupDead(group=name, reason=f"{PAYLOAD_LOST}, {MOST_LOST + 1} times", fault=INFRASTRUCTURE, at=now)]
    return [requeue(group, PAYLOAD_LOST, now)] if group else []


def lost_failed(state: BufferState, message: Outcome, now: float) -> list[LedgerRecord]:
    """Has a group generated anew that was given up before it was scored. None where it ends as any that failed."""
    group = awaiting(state, message)
    return [requeue(group, PAYLOAD_LOST, now)] if group is not None and group.lost < MOST_LOST else []


def refused(state: BufferState, message: BatchRefused, now: float, lost: bool = False) -> list[LedgerRecord]:
    """Counts a refusal, and ends the group at the last one. A repeat, and a group that is not in the batch any more, give no record.

    Args:
        lost: whether the store holds the group's samples no more.
    """
    group = state.groups.get(message.group)
    if group is None or group.step != message.step or message.at in group.refused:
        return []
    name = {"step": message.step, "group": message.group, "sample": message.sample, "reason": message.reason}
    records: list[LedgerRecord] = [ledger.SampleRefused(**name, refused=message.at, at=now)]
    if lost and message.step >= state.trained_steps and group.lost < MOST_LOST:  # else its batch continues without it
        records.append(requeue(group, PAYLOAD_LOST, now))
    elif len(group.refused) + 1 >= MOST_REFUSALS:
        reason = f"trainer: sample {message.group}/{message.sample}: {message.reason}"
        records.append(ledger.GroupDead(group=message.group, reason=reason, fault=INFRASTRUCTURE if lost else POLICY, at=now))
    return records


def amended(state: BufferState, limits: BufferConfig, step: int, now: float) -> list[LedgerRecord]:
    """Replaces the groups that the batch of ``step`` has lost, once as many others are ready that it may train.

    Two kinds of steps continue with the groups that are left, if any are: one that is trained again after a death, since what comes
    now is newer than its weights, and one with a critic, which has given its values to the batch as it was.
    """
    batch = state.batches.get(step)
    if batch is None or not batch.lost:
        return []
    goes_on = limits.has_critic or step < state.trained_steps
    fitting = [] if goes_on else by_decision(state, limits, batch.version - limits.rollout.max_staleness)["fits"]
    known = (group for group in fitting if group.scored is not None and max(group.scored.newest, default=0) <= batch.version)
    added = [*islice(known, len(batch.lost))]
    if not goes_on and len(added) < len(batch.lost):
        return []
    names = sorted((group.id for group in added), key=group_number)
    return [ledger.BatchAmended(step=step, removed=batch.lost, added=names, at=now)]


def _bound(state: BufferState, limits: BufferConfig, step: int, version: int) -> int:
    if step > state.formed_steps:
        raise WrongStep(f"step {step} was asked for; the next batch is of step {state.formed_steps}: {AHEAD}")
    if step != state.formed_steps:
        gone = "the checkpoints of the steps before that are gone; put them back where they were, or see `myxo repair RUN`"
        raise CheckpointsGone(f"step {step} was asked for; the next batch is of step {state.formed_steps}: {gone}")
    if version != limits.version_of_step(step):
        raise WrongStep(f"step {step} trains on version {limits.version_of_step(step)}, not {version}")
    return version - limits.rollout.max_staleness


def by_decision(state: BufferState, limits: BufferConfig, bound: int) -> dict[StalenessDecision, list[GroupState]]:
    """Returns the ready groups, in the order they came back, by their staleness decision."""
    ready: dict[StalenessDecision, list[GroupState]] = {"fits": [], "drop": [], "requeue": []}
    rule = limits.rollout.staleness_policy
    for group in state.ready.values():
        assert group.scored is not None  # of a ready group
        ready[staleness.staleness_decision(rule, group.scored, bound)].append(group)
    return ready


def _check_choice(chosen: list[str], candidates: Set[str], size: int) -> None:
    for name in chosen:
        if name not in candidates:
            raise BadChoice(f"the buffer filter chose group {name}, which is not among those that it may choose from")
    if len(set(chosen)) != len(chosen) or len(chosen) > size:
        raise BadChoice(f"the buffer filter chose {len(chosen)} groups, {len(set(chosen))} of them different; a batch has {size}")


def _drop(names: list[str], now: float) -> ledger.GroupsDropped:
    return ledger.GroupsDropped(groups=names, reason=STALE, at=now)


def requeue(group: GroupState, reason: str, now: float, partial: Payload | None = None, renew_below: int = 0) -> ledger.GroupRequeued:
    """Has a group generated anew, from ``partial`` where it is given."""
    return ledger.GroupRequeued(
        group=group.id, attempt=group.attempt + 1, reason=reason, partial=partial, renew_below=max(0, renew_below), at=now
    )
