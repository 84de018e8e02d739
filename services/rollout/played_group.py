"""Plays the rollouts of a group, and decides what becomes of those that fail and of their group.

A rollout is generated anew, a few times; then it is lost, and the group continues without it, as long as `rollout.min_rollouts` are left.

A group may begin more rollouts than it needs (`rollout.surplus_rollouts`; active partial rollouts, APRIL, Zhou et al. 2025, arXiv
2509.18521, within a group): it is complete when as many as it needs have ended, and the others are aborted. While there are more than it
needs, a rollout that fails is not tried again: a surplus one takes its place.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from services.rollout.in_flight import Stopped
from shared.config.rollout_section import RolloutSection
from shared.hooks import HookFailed
from shared.runtime.cancellation import cancelled
from shared.runtime.errors import MyxoError
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.schema.sample import Sample

TRIES = 5  # the number of failed calls in a row after which a rollout is lost

# The same for calls that held up or ended their process. All but the first have one of their own, so that they cost nobody else.
DISRUPTIVE_TRIES = 2


class RolloutFailures:
    """The failed calls of one rollout in a row, of which ``tries`` lose it.

    Attributes:
        count: how many. alone: its next call gets a process of its own.
    """

    def __init__(self, tries: int = TRIES) -> None:
        self.count, self._disruptive, self._tries = 0, 0, tries

    @property
    def alone(self) -> bool:
        return self._disruptive > 0

    def note(self, error: HookFailed, counts: bool) -> None:
        """Notes a failed call. Raises HookFailed where there should be no other.

        Args:
            counts: False where it may not have been the function's fault, since the engine had died under it.
        """
        self.count += counts
        self._disruptive += error.disruptive
        if self.count >= self._tries or self._disruptive >= DISRUPTIVE_TRIES:
            failed = max(self.count, self._disruptive)
            raise HookFailed(error.field, error.path, error.reason + (f"; it failed {failed} times in a row" if failed > 1 else ""))


class GroupProgress:
    """The rollouts of one group: how many are left, and which have ended.

    Args:
        wanted: with how many it is complete. surplus: how many are begun beyond them. fewest: how many have to be left.
    """

    def __init__(self, wanted: int, fewest: int, surplus: int = 0) -> None:
        self._left, self._wanted, self._fewest = wanted + surplus, wanted, fewest
        self._ended: list[int] = []

    @classmethod
    def of(cls, task: Task, settings: RolloutSection) -> "GroupProgress":
        """Returns that of a task. A held-out prompt needs all of its rollouts, and has no surplus ones: the shorter would be favoured."""
        if is_evaluation(task.group):
            return cls(task.n, task.n)
        return cls(task.n, min(task.n, settings.fewest_rollouts), settings.surplus_rollouts)

    @property
    def begun(self) -> range:
        """Returns the indices of the rollouts that are begun."""
        return range(self._left)

    @property
    def complete(self) -> bool:
        return len(self._ended) >= self._wanted

    @property
    def kept(self) -> frozenset[int]:
        """Returns the rollouts that make up a complete group: those that ended first."""
        return frozenset(self._ended[: self._wanted])

    @property
    def aborted(self) -> int:
        """Returns how many rollouts a complete group does without, although none of them failed."""
        return self._left - self._wanted if self.complete else 0

    def end(self, index: int) -> None:
        """Notes a rollout that has ended well."""
        self._ended.append(index)

    def check_needed(self, error: MyxoError) -> None:
        """Raises the ``error`` of a rollout that need not be tried again, since a surplus one takes its place."""
        if self._left > self._wanted:
            raise error

    def lose(self, error: MyxoError) -> None:
        """Takes a lost rollout down. Raises ``error``, which is why, where too few are left."""
        self._left -= 1
        if self._left < self._fewest:
            raise error


class PlayedGroup(NamedTuple):
    """What became of a group's rollouts: samples, in the rollouts' order; why they were ``stopped``, if they were; ``aborted``: how many
    surplus ones were, since the others had ended."""

    samples: list[Sample]
    stopped: Stopped | None
    aborted: int = 0


class PlayedRollout(Protocol):
    """One rollout: its index, and why it was stopped, if it was."""

    index: int
    stopped: Stopped | None


Made = TypeVar("Made", bound=PlayedRollout)


def kept(rollouts: Sequence[Made], progress: GroupProgress) -> tuple[list[Made], Stopped | None]:
    """Returns the rollouts that make up a complete group; of another all of them, and why it was stopped, if it was."""
    if progress.complete:
        return [rollout for rollout in rollouts if rollout.index in progress.kept], None
    return list(rollouts), next((rollout.stopped for rollout in rollouts if rollout.stopped is not None), None)


async def until_complete(playing: Sequence[Coroutine[Any, Any, None]], progress: GroupProgress) -> None:
    """Runs a group's rollouts until it is complete, or all have come to an end; the others are cancelled. Raises what one of them does."""
    running = [asyncio.create_task(one) for one in playing]
    left = set(running)
    try:
        while left and not progress.complete:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for one in ended:
                one.result()
    finally:
        await cancelled(running)
