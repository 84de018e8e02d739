"""Decides which outcomes are taken as they are, and from which role. Pure.

A role's services report on a subject of their own, which only their account may publish on: a reward that a rollout replica reports is
none, whatever it claims. An outcome may name the blobs of its own attempt alone: the buffer frees what is named to it, and the trainer
reads it.
"""

from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.bus.subjects import GATEWAY, REWARD, ROLLOUT, Subjects
from shared.runtime.errors import INFRASTRUCTURE, TASK
from shared.schema.messages import Discarded, Evaluated, Failed, GroupOutcome, Interrupted, Outcome, Scored, Wanted
from shared.schema.sample import too_long

BUFFER = "buffer"  # Who gives up a group for an outcome that is not taken


def checked(outcome: Outcome, subjects: Subjects, *, last: bool) -> GroupOutcome:
    """Returns the outcome, or the failure of its group that stands for one that is not taken.

    Args:
        last: whether it is delivered for the last time: buffers have died or stood still with it in hand.
    """
    assert isinstance(outcome, GroupOutcome)  # what is decoded is none of a base
    payload = outcome.payload
    keys = [] if payload is None else payload.keys
    prefix = subjects.payload_prefix(outcome.group, outcome.attempt)
    own = list(dict.fromkeys(key for key in keys if key.startswith(prefix)))
    fault = TASK
    if other := next((key for key in keys if not key.startswith(prefix)), None):
        reason = f"names the blob {other}, which is not its own"
    elif len(own) < len(keys):
        reason = "names a blob twice"
    elif last:
        reason, fault = "was delivered too often", INFRASTRUCTURE
    else:
        return outcome
    kept = None if payload is None or not own else payload.model_copy(update={"keys": own, "sizes": ()})
    return Failed(group=outcome.group, attempt=outcome.attempt, reason=f"its outcome {reason}", by=BUFFER, fault=fault, payload=kept)


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


# The outcomes that a role's services report
ROLE_OUTCOMES: dict[str, tuple[type[Outcome], ...]] = {
    ROLLOUT: (Failed, Interrupted, Discarded, Wanted, Evaluated),
    REWARD: (Scored, Failed),
    GATEWAY: (Failed,),
}


def source_refusal(names: Subjects, subject: str, outcome: Outcome) -> str | None:
    """Returns why an outcome that came on ``subject`` is not taken; None: it is."""
    if any(subject == names.scored(role) and isinstance(outcome, kinds) for role, kinds in ROLE_OUTCOMES.items()):
        return None
    return f"a {type(outcome).__name__} of {outcome.group} came on {subject}, on which none may be reported"
