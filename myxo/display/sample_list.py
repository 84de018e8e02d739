"""The list of groups that `myxo samples` shows: selects, orders and limits them. Pure."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from shared.runtime.safe_text import printable
from shared.schema.ledger import LedgerRecord
from shared.view.group_history import BATCHED, DEAD, DROPPED, ENDS, READY, REQUEUED, TRAINED, GroupHistory, GroupRecord

ORDERS: dict[str, Callable[[GroupRecord], float]] = {
    "age": lambda group: group.changed,
    "reward": lambda group: float("-inf") if group.reward is None else group.reward,
    "tokens": lambda group: sum(group.tokens),
}
"""The orders of a list, ascending: the newest, best rewarded or longest stands last, and stays where there are too many."""

_STYLES = {READY: "green", BATCHED: "cyan", TRAINED: "", DROPPED: "yellow", DEAD: "bold red", REQUEUED: "yellow"}

_REWARDS_SHOWN = 8
"""A group with more samples shows its rewards as their mean and range."""

_REASON_SHOWN = 60
"""Characters of a status: the reason of a death may be long, and the group's own page has all of it."""


@dataclass(frozen=True)
class WantedGroups:
    """The selection of groups to list; None: any.

    step: in the batch of that step. min_reward, max_reward: of the samples' mean. version: holds a trained token of that version, or
    lies between two that do. evaluation: held-out prompts in place of training groups, of ``dataset``; version is that evaluated.
    """

    status: str | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    group: str | None = None
    version: int | None = None
    evaluation: bool = False
    dataset: str | None = None

    def admits(self, group: GroupRecord) -> bool:
        """Returns whether a group is wanted. A group without rewards fits no bound on rewards, one without samples no version."""
        if (group.dataset is not None) != self.evaluation or self.dataset not in (None, group.dataset):
            return False
        if self.status not in (None, group.status) or self.step not in (None, group.step) or self.group not in (None, group.group):
            return False
        if self.min_reward is not None and (group.reward is None or group.reward < self.min_reward):
            return False
        if self.max_reward is not None and (group.reward is None or group.reward > self.max_reward):
            return False
        if self.evaluation:
            return self.version in (None, group.version)
        return self.version is None or any(low <= self.version <= high for low, high in zip(group.oldest, group.newest, strict=True))


@dataclass
class SampleList:
    """Reads the ledger and returns the last ``limit`` wanted groups in order (0: all). Keeps no more of those that have ended.

    Args:
        order: a key of `ORDERS`.
    """

    wanted: WantedGroups
    order: str = "age"
    limit: int = 20
    matched: int = 0
    """Ended groups that are wanted, shown or not."""
    history: GroupHistory = field(default_factory=GroupHistory)
    ended: list[tuple[float, int, str, GroupRecord]] = field(default_factory=list)
    """A heap of the ended groups that may be shown; a group ends once, so that entries never compare their records."""

    def apply(self, sequence: int, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        for group in self.history.apply(sequence, record):
            if group.status in ENDS:
                self.add(group)

    def add(self, group: GroupRecord) -> None:
        """Takes a group that has ended."""
        if self.wanted.admits(group):
            self.matched += 1
            heapq.heappush(self.ended, self._entry(group))
            if self.limit and len(self.ended) > self.limit:
                heapq.heappop(self.ended)

    def rows(self) -> tuple[list[GroupRecord], int]:
        """Returns the groups to show, in order, and how many are wanted in all."""
        still = [self._entry(group) for group in self.history.open.values() if self.wanted.admits(group)]
        entries = sorted([*self.ended, *still])[-self.limit :]
        return [entry[-1] for entry in entries], self.matched + len(still)

    def _entry(self, group: GroupRecord) -> tuple[float, int, str, GroupRecord]:
        return ORDERS[self.order](group), group.changed, group.group, group


def table(run: str, rows: Sequence[GroupRecord], of: int) -> Table:
    """Returns one line a group."""
    shown = f"{of} groups" if len(rows) == of else f"{len(rows)} of {of} groups"
    lines = Table(title=Text(f"Run {run}: {shown}"), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "attempt"):
        lines.add_column(name, no_wrap=True)
    lines.add_column("status", overflow="fold")
    for name in ("rewards", "tokens", "versions"):
        lines.add_column(name, justify="right")
    lines.add_column("replica")
    lines.add_column("seconds", justify="right", no_wrap=True)
    for group in rows:
        where = printable(group.where())
        lines.add_row(
            Text(printable(group.group)),
            str(group.attempt),
            Text(where if len(where) <= _REASON_SHOWN else where[:_REASON_SHOWN] + " …", style=_STYLES.get(group.status, "dim")),
            _rewards(group.rewards),
            span(group.tokens, group.tokens),
            span(group.oldest, group.newest),
            Text(printable(group.replica) or "–"),
            "–" if group.seconds is None else f"{group.seconds:.1f}",
        )
    return lines


def span(low: Sequence[int], high: Sequence[int]) -> str:
    """Returns the lowest and the highest value, as text."""
    if not low or not high:
        return "–"
    return str(min(low)) if min(low) == max(high) else f"{min(low)}–{max(high)}"


def _rewards(rewards: Sequence[float]) -> str:
    if not rewards:
        return "–"
    if len(rewards) <= _REWARDS_SHOWN:
        return " ".join(f"{reward:.3g}" for reward in rewards)
    return f"{sum(rewards) / len(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})"
