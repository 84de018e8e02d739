"""Decides how a batch treats a group, by the age of its tokens and the run's staleness policy.

A batch that is trained on version V takes no trained token older than the bound b = V − max_staleness. The four policies differ in what
they do with a group that holds older tokens (docs/staleness.md). Before: `policy.admit`, `shared.schema.versions.is_too_stale`.
"""

from typing import Literal

from services.buffer.state import Result

# ``drop``: end the group; a new prompt takes its place. ``requeue``: generate it anew. ``continue``: train it without its stale tokens if
# each sample has others, else generate anew those that have none. ``mask``: train it without them if any has others, else end it.
Policy = Literal["drop", "requeue", "continue", "mask"]
StalenessDecision = Literal["fits", "drop", "requeue"]


def staleness_decision(policy: Policy, result: Result, bound: int) -> StalenessDecision:
    """Returns the decision about a scored group for a batch that takes no token older than ``bound``."""
    if result.oldest >= bound:
        return "fits"
    match policy:
        case "drop":
            return "drop"
        case "requeue":
            return "requeue"
        case "continue":
            return "fits" if min(result.newest) >= bound else "requeue"
        case "mask":
            return "fits" if max(result.newest) >= bound else "drop"


def mask_below(policy: Policy, bound: int) -> int:
    """Returns the version below which a batch's tokens leave the loss; 0 where no batch holds any."""
    return max(0, bound) if policy in ("continue", "mask") else 0
