"""Why a training step began no earlier: the wait before it, divided among causes. Pure.

A step's batch is complete with the last of its groups to be scored, so that the wait is what this group's way was: its admission, its place
in the queue, its generation, its scoring. What came before is the trainer's
own: its restart, checkpoints, and pushes that it stood still for.
"""

from dataclasses import dataclass

from shared.history.intervals import Interval

RESTARTING, SAVING, PUSHING = "restarting", "saving", "pushing"
ADMISSION, QUEUE, GENERATION, SCORING = "admission", "queue", "generation", "scoring"
HANDING_OUT = "handing out"
"""From the last group's score to the step's start: forming the batch, and reading it."""


@dataclass(frozen=True, slots=True)
class GroupPassage:
    """When a group passed where, seconds since the epoch; 0: not known, long ago. ``generated``: its generation on ``replica`` ended."""

    group: str
    replica: str
    admitted: float
    started: float
    generated: float
    scored: float


def wait_causes(
    wait: Interval, last: GroupPassage | None, saving: float = 0.0, stall: float = 0.0, back: float = 0.0
) -> list[tuple[str, Interval]]:
    """Returns the parts of a wait in order, each with its cause; together they are the wait.

    Args:
        last: the group of the batch that was scored last; None: not known. saving, stall: the seconds that a checkpoint and a push of
            weights took of it; both come first. back: when a trainer that had died in it was back, 0 where none had.
    """
    begin, end = wait
    own = max(begin, back)
    marks = [(RESTARTING, back), (SAVING, own + saving), (PUSHING, own + saving + stall)]
    if last is not None:
        marks += [(ADMISSION, last.admitted), (QUEUE, last.started), (GENERATION, last.generated), (SCORING, last.scored)]
    found, now = [], begin
    for cause, until in [*marks, (HANDING_OUT, end)]:
        if (until := min(until, end)) > now:  # the clocks of two machines differ: no part goes back
            found.append((cause, (now, until)))
            now = until
    return found
