"""The list of groups that `myxo samples` shows: which are wanted, in which order, how many. Pure but for the console's width."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from myxo.display.printable import printable
from myxo.run.group_history import BATCHED, DEAD, DROPPED, READY, REQUEUED, TRAINED, GroupHistory, GroupRecord
from shared.schema.ledger import LedgerRecord

NEVER = float("-inf")

ORDERS: dict[str, Callable[[GroupRecord], float]] = {
    "age": lambda facts: facts.changed,
    "reward": lambda facts: NEVER if facts.reward is None else facts.reward,
    "tokens": lambda facts: sum(facts.tokens),
}
"""What a list can be sorted by, ascending: what is newest, best rewarded, longest stands last, and stays where there are too many."""

_STYLES = {READY: "green", BATCHED: "cyan", TRAINED: "", DROPPED: "yellow", DEAD: "bold red", REQUEUED: "yellow"}

_REWARDS_SHOWN = 8
"""A group with more samples shows its rewards as their mean and range."""

_REASON_SHOWN = 60
"""Characters of a status: the reason of a death may be long. The group's own page has all of it."""


@dataclass(frozen=True)
class Wanted:
    """Which groups to list; None: any.

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

    def admits(self, facts: GroupRecord) -> bool:
        """Whether a group is wanted. One without rewards is within no bounds of reward, one without samples of no version."""
        if (facts.dataset is not None) != self.evaluation or self.dataset not in (None, facts.dataset):
            return False
        if self.status not in (None, facts.status) or self.step not in (None, facts.step) or self.group not in (None, facts.group):
            return False
        if self.min_reward is not None and (facts.reward is None or facts.reward < self.min_reward):
            return False
        if self.max_reward is not None and (facts.reward is None or facts.reward > self.max_reward):
            return False
        if self.evaluation:
            return self.version in (None, facts.version)
        return self.version is None or any(low <= self.version <= high for low, high in zip(facts.oldest, facts.newest, strict=True))


@dataclass
class SampleList:
    """Takes the ledger, gives the last ``limit`` wanted groups in order (0: all). Keeps no more of those that have ended.

    Args:
        order: a key of `ORDERS`.
    """

    wanted: Wanted
    order: str = "age"
    limit: int = 20
    matched: int = 0
    """Ended groups that are wanted, shown or not."""
    trails: GroupHistory = field(default_factory=GroupHistory)

    def __post_init__(self) -> None:
        self._kept: list[tuple[float, int, str, GroupRecord]] = []

    def see(self, sequence: int, record: LedgerRecord) -> None:
        """Takes a record; they come in the ledger's order."""
        for facts in self.trails.see(sequence, record):
            self.add(facts)

    def add(self, facts: GroupRecord) -> None:
        """Takes a group that has ended."""
        if self.wanted.admits(facts):
            self.matched += 1
            self._keep(self._kept, facts)

    def rows(self) -> tuple[list[GroupRecord], int]:
        """The groups to show, and how many are wanted in all."""
        kept, still = list(self._kept), [facts for facts in self.trails.open.values() if self.wanted.admits(facts)]
        for facts in still:
            self._keep(kept, facts)
        return [entry[-1] for entry in sorted(kept)], self.matched + len(still)

    def _keep(self, kept: list[tuple[float, int, str, GroupRecord]], facts: GroupRecord) -> None:
        entry = (ORDERS[self.order](facts), facts.changed, facts.group, facts)  # a group ends once: entries never compare their facts
        if self.limit and len(kept) >= self.limit:
            heapq.heappushpop(kept, entry)
        else:
            heapq.heappush(kept, entry)


def table(run: str, rows: Sequence[GroupRecord], of: int) -> Table:
    """One line a group."""
    shown = f"{of} groups" if len(rows) == of else f"{len(rows)} of {of} groups"
    lines = Table(title=f"Run {run}: {shown}", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "attempt"):
        lines.add_column(name, no_wrap=True)
    lines.add_column("status", overflow="fold")
    for name in ("rewards", "tokens", "versions"):
        lines.add_column(name, justify="right")
    lines.add_column("replica")
    lines.add_column("seconds", justify="right", no_wrap=True)
    for facts in rows:
        lines.add_row(
            facts.group,
            str(facts.attempt),
            Text(_short(printable(facts.where())), style=_STYLES.get(facts.status, "dim")),
            _rewards(facts.rewards),
            span(facts.tokens, facts.tokens),
            span(facts.oldest, facts.newest),
            Text(printable(facts.replica) or "–"),
            "–" if facts.seconds is None else f"{facts.seconds:.1f}",
        )
    return lines


def span(low: Sequence[int], high: Sequence[int]) -> str:
    """From the lowest to the highest."""
    if not low or not high:
        return "–"
    return str(min(low)) if min(low) == max(high) else f"{min(low)}–{max(high)}"


def _short(text: str) -> str:
    return text if len(text) <= _REASON_SHOWN else text[:_REASON_SHOWN] + " …"


def _rewards(rewards: Sequence[float]) -> str:
    if not rewards:
        return "–"
    if len(rewards) <= _REWARDS_SHOWN:
        return " ".join(f"{reward:.3g}" for reward in rewards)
    return f"{sum(rewards) / len(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})"
