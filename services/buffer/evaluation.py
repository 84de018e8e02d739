"""Decides about evaluations: which versions get one, which results count, when they end, and their figures. Pure.

An evaluation belongs to the version that was live when it began. No replica on an older version takes its prompts; pushes go on
meanwhile, as training does, so that a later version may draw some of its tokens: the figures name the oldest and the newest that did.
"""

from typing import Any

import numpy as np

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, EvaluationState
from shared.data import pass_rates
from shared.schema.ledger import EvalEnded, EvalScored, EvalStarted, LedgerRecord
from shared.schema.messages import Failed, Scored
from shared.schema.versions import is_periodic

QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
"""Those of the lengths of responses."""


def is_due(limits: BufferConfig, version: int) -> bool:
    """Returns whether weights of ``version`` are evaluated, in a run that has held-out prompts."""
    if version == limits.last_version:
        return True
    if version == 0:
        return not limits.evaluation.skip_eval_before_train
    interval = limits.evaluation.eval_interval
    steps = version * limits.weights.update_weights_interval
    return interval is not None and is_periodic(steps, interval, limits.rollout.num_rollout_per_epoch)


def due(state: BufferState, limits: BufferConfig, version: int, now: float) -> list[LedgerRecord]:
    """Returns the beginnings of the evaluations of ``version`` that are due and have not begun."""
    if not is_due(limits, version):
        return []
    begun = {*state.evaluations, *state.evaluated}
    return [
        EvalStarted(dataset=name, version=version, prompts=prompts, at=now)
        for name, prompts in limits.eval_sets.items()
        if (version, name) not in begun
    ]


def awaited(state: BufferState, limits: BufferConfig) -> bool:
    """Returns whether the run's last version has a set that is due and not evaluated."""
    last = limits.last_version
    return is_due(limits, last) and any((last, name) not in state.evaluated for name in limits.eval_sets)


def came_back(state: BufferState, message: Scored | Failed, now: float) -> list[LedgerRecord]:
    """Takes the rewards of a held-out prompt, or its failure; one that has come back already, or that nobody asked for, gives no record."""
    current = next((found for found in state.evaluations.values() if message.group in found.pending), None)
    if current is None:
        return []
    known: dict[str, Any] = {"dataset": current.dataset, "version": current.version, "payload": message.payload, "at": now}
    if isinstance(message, Failed):
        return [EvalScored(group=message.group, rewards=[], reason=f"{message.by}: {message.reason}", **known)]
    samples = message.samples
    return [
        EvalScored(
            group=message.group,
            rewards=message.rewards,
            parts=message.parts,
            lengths=tuple(sample.tokens for sample in samples),
            truncated=tuple(index for index, sample in enumerate(samples) if sample.finish == "length"),
            oldest=min((sample.oldest for sample in samples), default=current.version),
            newest=max((sample.newest for sample in samples), default=current.version),
            **known,
        )
    ]


def is_over(evaluation: EvaluationState, limits: BufferConfig, now: float) -> bool:
    """Returns whether all prompts of an evaluation have come back, or its deadline has passed."""
    return not evaluation.pending or now >= limits.eval_deadline(evaluation.started)


def ended(evaluation: EvaluationState, state: BufferState, limits: BufferConfig, now: float) -> EvalEnded:
    """Returns the end of an evaluation, with the figures of what has come back."""
    counts = pass_rates.pass_counts(evaluation.groups, limits.passes)
    rewards = [reward for group in evaluation.groups for reward in group]
    rates = {f"pass@{k}": pass_rates.pass_at(counts, k) for k in pass_rates.powers(counts)}
    rates |= {f"pass^{k}": pass_rates.pass_all(counts, k) for k in pass_rates.powers(counts)}
    return EvalEnded(
        dataset=evaluation.dataset,
        version=evaluation.version,
        oldest=evaluation.oldest if rewards else evaluation.version,
        newest=evaluation.newest if rewards else evaluation.version,
        live=max(evaluation.version, state.live_version),
        prompts=evaluation.prompts,
        failed=evaluation.failed,
        late=len(evaluation.pending),
        samples=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        rates=rates,
        lengths=_lengths(np.asarray(evaluation.lengths)),
        truncated=evaluation.truncated / len(rewards) if rewards else 0.0,
        seconds=max(0.0, now - max(evaluation.started, limits.active_since)),
        at=now,
    )


def _lengths(tokens: Any) -> dict[str, float]:
    if not len(tokens):
        return {}
    quantiles = np.quantile(tokens, list(QUANTILES.values()))
    return {"mean": float(tokens.mean()), **dict(zip(QUANTILES, map(float, quantiles), strict=True))}
