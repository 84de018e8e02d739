"""Decides which outcomes the buffer takes from whom. Pure.

A role's services report on a subject of their own, which only their account may publish on: what a rollout replica says is a reward is
none, whatever it claims.
"""

from shared.bus.subjects import REWARD, ROLLOUT, Subjects
from shared.schema.messages import Discarded, Evaluated, Failed, Interrupted, Outcome, Scored, Wanted

KINDS: dict[str, tuple[type[Outcome], ...]] = {ROLLOUT: (Failed, Interrupted, Discarded, Wanted, Evaluated), REWARD: (Scored, Failed)}
"""The outcomes that a role's services report."""


def refusal(names: Subjects, subject: str, outcome: Outcome) -> str | None:
    """Returns why an outcome that came on ``subject`` is not taken; None: it is."""
    if any(subject == names.scored(role) and isinstance(outcome, kinds) for role, kinds in KINDS.items()):
        return None
    return f"a {type(outcome).__name__} of {outcome.group} came on {subject}, on which nobody may report one"
