"""Decides about evaluations: which versions get one, which results count, when they end. Pure."""

from typing import Any

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, EvaluationState
from shared.schema.ledger import EvalEnded, EvalScored, LedgerRecord
from shared.schema.messages import Failed, Scored
from shared.schema.versions import is_periodic


def is_due(limits: BufferConfig, version: int) -> bool:
    """Returns whether weights of ``version`` are evaluated, in a run that has held-out prompts."""
    if version == limits.last_version:
        return True
    if version == 0:
        return not limits.evaluation.skip_eval_before_train
    interval = limits.evaluation.eval_interval
    steps = version * limits.weights.update_weights_interval
    return interval is not None and is_periodic(steps, interval, limits.rollout.num_rollout_per_epoch)


def came_back(state: BufferState, message: Scored | Failed, now: float) -> list[LedgerRecord]:
    """Takes the rewards of a held-out prompt, or its failure; one that has come back already, or that nobody asked for, gives no record."""
    current = next((found for found in state.evaluations.values() if message.group in found.pending), None)
    if current is None:
        return []
    known: dict[str, Any] = {"dataset": current.dataset, "version": current.version, "payload": message.payload, "at": now}
    if isinstance(message, Failed):
        return [EvalScored(group=message.group, rewards=[], reason=f"{message.by}: {message.reason}", **known)]
    oldest = min((sample.oldest for sample in message.samples), default=current.version)
    newest = max((sample.newest for sample in message.samples), default=current.version)
    return [EvalScored(group=message.group, rewards=message.rewards, parts=message.parts, oldest=oldest, newest=newest, **known)]


def ended(evaluation: EvaluationState, now: float) -> EvalEnded:
    """Returns the end of an evaluation all of whose prompts came back or failed."""
    rewards = evaluation.rewards
    return EvalEnded(
        dataset=evaluation.dataset,
        version=evaluation.version,
        failed=evaluation.failed,
        samples=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        at=now,
    )
