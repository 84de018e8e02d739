"""Decides about evaluations: which versions get one, which results count, when they end. Pure."""

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState, EvaluationState
from shared.schema.ledger import EvalEnded, EvalScored, LedgerRecord, eval_group_id, eval_group_parts
from shared.schema.messages import Failed, Outcome, Scored


def groups(evaluation: EvaluationState) -> list[tuple[str, int]]:
    """Returns (group id, row) of the held-out prompts that have not come back."""
    rows = {eval_group_id(evaluation.dataset, evaluation.version, row): row for row in range(evaluation.prompts)}
    return [(name, rows[name]) for name in evaluation.pending()]


def is_due(limits: BufferConfig, version: int) -> bool:
    """Returns whether weights of ``version`` are evaluated, in a run that has held-out prompts."""
    if version == limits.last_version:
        return True
    if version == 0:
        return not limits.evaluation.skip_eval_before_train
    interval = limits.evaluation.eval_interval
    return interval is not None and (version * limits.weights.update_weights_interval) % interval == 0


def scored(state: BufferState, message: Scored, now: float) -> list[LedgerRecord]:
    """Takes the rewards of a held-out prompt; one that has come back already, or of another evaluation, gives no record."""
    current = _awaiting(state, message)
    if current is None:
        return []
    named = any(score.parts for score in message.scores)
    return [
        EvalScored(
            group=message.group,
            dataset=current.dataset,
            version=current.version,
            rewards=[score.reward for score in message.scores],
            parts=tuple(score.parts for score in message.scores) if named else (),
            oldest=min((sample.oldest for sample in message.samples), default=current.version),
            newest=max((sample.newest for sample in message.samples), default=current.version),
            payload=message.payload,
            at=now,
        )
    ]


def failed(state: BufferState, message: Failed, now: float) -> list[LedgerRecord]:
    """Takes note of a held-out prompt that was given up: it counts as failed."""
    current = _awaiting(state, message)
    if current is None:
        return []
    return [
        EvalScored(
            group=message.group,
            dataset=current.dataset,
            version=current.version,
            rewards=[],
            oldest=0,
            newest=0,
            reason=f"{message.by}: {message.reason}",
            payload=message.payload,
            at=now,
        )
    ]


def _awaiting(state: BufferState, message: Outcome) -> EvaluationState | None:
    """Returns the evaluation under way that waits for the message's group."""
    parts = eval_group_parts(message.group)
    current = state.evaluations.get(parts[1]) if parts else None
    return current if current is not None and current.awaits(message.group) else None


def ended(evaluation: EvaluationState, now: float) -> EvalEnded:
    """Returns the end of an evaluation all of whose prompts came back or failed."""
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
