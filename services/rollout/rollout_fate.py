"""Decides what becomes of a rollout whose function or agent fails, and of the group that it belongs to. Pure.

A rollout is generated anew, a few times; then it is lost, and the group goes on without it, as long as `rollout.min_rollouts` are left.
"""

from shared.hooks import HookFailed
from shared.runtime.errors import MyxoError

TRIES = 5
"""The number of failed calls in a row after which a rollout is lost."""

DISRUPTIVE_TRIES = 2
"""The same for calls that held up or ended their process. All but the first have one of their own, so that they cost nobody else."""


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


class GroupLosses:
    """The lost rollouts of one group.

    Args:
        rollouts: how many there are. fewest: how many have to be left.
    """

    def __init__(self, rollouts: int, fewest: int) -> None:
        self._left, self._fewest = rollouts, fewest

    def lose(self, error: MyxoError) -> None:
        """Takes a lost rollout down. Raises ``error``, which is why, where too few are left."""
        self._left -= 1
        if self._left < self._fewest:
            raise error
