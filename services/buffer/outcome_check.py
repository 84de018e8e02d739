"""Decides which outcomes are taken as they are. Pure.

An outcome may speak of the blobs of its own attempt alone: the buffer frees what is named to it, and the trainer reads it.
"""

from services.buffer.policy import BUFFER
from shared.bus.subjects import Subjects
from shared.schema.messages import Failed, GroupOutcome, Outcome


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
    if other := next((key for key in keys if not key.startswith(prefix)), None):
        reason = f"names the blob {other}, which is not its own"
    elif len(own) < len(keys):
        reason = "names a blob twice"
    elif last:
        reason = "was delivered too often"
    else:
        return outcome
    kept = None if payload is None or not own else payload.model_copy(update={"keys": own})
    return Failed(group=outcome.group, attempt=outcome.attempt, reason=f"its outcome {reason}", by=BUFFER, payload=kept)
