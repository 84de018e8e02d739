"""Decides about evaluations: which versions get one, which results count, when they end, and their figures. Pure.

An evaluation belongs to the version that was live when it began. No replica on an older version takes its prompts; pushes continue
meanwhile, as training does, so that a later version may draw some of its tokens: the figures name the oldest and the newest that did.
Where the user's own function evaluates, it is asked once for all sets of a version, and a set ends with what it gives for it.
"""

from typing import Any

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, EvaluationState
from shared.data.pass_rates import eval_figures
from shared.schema.ledger import MOST_SKIPPED, EvalEnded, EvalScored, EvalStarted, LedgerRecord, eval_group_parts
from shared.schema.messages import Evaluated, Failed, Scored
from shared.schema.versions import crossed

MOST_OWN_SETS = 64  # The sets of one version that a function may give results for although the run does not name them


def is_due(limits: BufferConfig, version: int) -> bool:
    """Returns whether weights of ``version`` are evaluated, in a run that has held-out prompts: the steps since the version before them
    reach or cross one after which an evaluation is due."""
    if version == limits.last_version:
        return True
    if version == 0:
        return not limits.evaluation.skip_eval_before_train
    evaluated_every, steps = limits.evaluation.eval_interval, version * limits.weights.update_weights_interval
    before = steps - limits.weights.update_weights_interval
    return evaluated_every is not None and crossed(before, steps, evaluated_every, limits.rollout.num_rollout_per_epoch)


def due(state: BufferState, limits: BufferConfig, version: int, now: float) -> list[LedgerRecord]:
    """Returns the beginnings of the evaluations that are due and have not begun, now that ``version`` is live.

    Versions are skipped where pushes fail or take longer than a step. The next version that goes live is evaluated in place of those that
    were due, once for all of them. The ledger's newest version counts again: the buffer may have died before it recorded the beginnings.
    """
    found = [skipped for skipped in range(state.version_before + 1, version + 1) if is_due(limits, skipped)]
    records: list[LedgerRecord] = []
    for name, prompts in limits.eval_sets.items() if found else ():
        begun = max((of for of, dataset in (*state.evaluations, *state.evaluated) if dataset == name), default=-1)
        if missing := [of for of in found if of > begun]:
            skipped = tuple(of for of in missing if of != version)[-MOST_SKIPPED:]
            records.append(EvalStarted(dataset=name, version=version, prompts=prompts, skipped=skipped, at=now))
    return records


def awaited(state: BufferState, limits: BufferConfig) -> bool:
    """Returns whether a set of the run's last version, which is always due, is not evaluated."""
    return any((limits.last_version, name) not in state.evaluated for name in limits.eval_sets)


def came_back(state: BufferState, message: Scored | Failed, now: float) -> list[LedgerRecord]:
    """Takes the rewards of a held-out prompt, or its failure; one that came back before, or was not asked for, gives no record."""
    current = next((found for found in state.evaluations.values() if message.group in found.pending), None)
    if current is None:
        return []
    known: dict[str, Any] = {"dataset": current.dataset, "version": current.version, "payload": message.payload, "at": now}
    if isinstance(message, Failed):
        return [EvalScored(group=message.group, rewards=[], reason=f"{message.by}: {message.reason}", fault=message.fault, **known)]
    samples = message.samples
    return [
        EvalScored(
            group=message.group,
            rewards=message.rewards,
            parts=message.parts,
            rollouts=message.rollouts,
            lengths=tuple(sample.tokens for sample in samples),
            truncated=tuple(index for index, sample in enumerate(samples) if sample.finish == "length"),
            oldest=min((sample.oldest for sample in samples if sample.tokens), default=current.version),
            newest=max((sample.newest for sample in samples if sample.tokens), default=current.version),
            **known,
        )
    ]


def given(state: BufferState, limits: BufferConfig, message: Evaluated, now: float) -> list[LedgerRecord]:
    """Takes what the user's function gives for a set: one of the run's, or one of its own while an evaluation of that version continues.

    A set that has ended, a version that is not being evaluated, and a result that was not asked for give no record.
    """
    named, result = eval_group_parts(message.group), message.result
    if not limits.eval_function or named is None or (named[1], named[0]) in state.evaluated:
        return []
    dataset, version, _ = named
    current = state.evaluations.get((version, dataset))
    begun: list[LedgerRecord] = []
    if current is None:
        current = _own_set(state, limits, message, dataset, version)
        if current is None:
            return []
        begun = [EvalStarted(dataset=dataset, version=version, prompts=result.prompts, at=now)]
    counts = {} if result.samples else {"prompts": current.prompts, "failed": current.prompts}
    found = {**result.model_dump(), "dataset": dataset, **counts}
    live, seconds = max(version, state.live_version), max(0.0, now - max(current.started, limits.active_since))
    return [*begun, EvalEnded(**found, version=version, live=live, seconds=seconds, at=now)]


def _own_set(state: BufferState, limits: BufferConfig, message: Evaluated, dataset: str, version: int) -> EvaluationState | None:
    started = min((current.started for (of, _), current in state.evaluations.items() if of == version), default=None)
    there = sum(of == version and name not in limits.eval_sets for of, name in state.evaluated)
    if started is None or there >= MOST_OWN_SETS or not message.result.samples:
        return None
    return EvaluationState(dataset, version, message.result.prompts, started, {})


def is_over(evaluation: EvaluationState, limits: BufferConfig, now: float) -> bool:
    """Returns whether all prompts of an evaluation have come back, or its deadline has passed."""
    return not evaluation.pending or now >= limits.eval_deadline(evaluation.started)


def ended(evaluation: EvaluationState, state: BufferState, limits: BufferConfig, now: float) -> EvalEnded:
    """Returns the end of an evaluation, with the figures of what has come back."""
    figures = eval_figures(evaluation.groups, evaluation.lengths, evaluation.truncated, limits.passes)
    has = bool(figures["samples"])
    return EvalEnded(
        dataset=evaluation.dataset,
        version=evaluation.version,
        oldest=evaluation.oldest if has else evaluation.version,
        newest=evaluation.newest if has else evaluation.version,
        live=max(evaluation.version, state.live_version),
        prompts=evaluation.prompts,
        failed=evaluation.failed,
        late=len(evaluation.pending),
        seconds=max(0.0, now - max(evaluation.started, limits.active_since)),
        at=now,
        **figures,
    )
