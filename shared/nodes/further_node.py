"""The decisions of every node but the first: when its ranks join an attempt, and when they end. Pure.

Invariants:

- ranks start only for an attempt that names this very agent (by its lease's term), once, while the first node's lease is being renewed;
- ranks of an attempt that is over, or whose first node is lost or another one by now, are killed;
- a node that cannot reach the bus decides nothing: it cannot know whether it alone is cut off.
"""

from shared.bus.registry import WAITING
from shared.nodes.attempt_commands import (
    NODE_LOST,
    BeginRanks,
    KillRanks,
    LeaveNode,
    NodeCommand,
    NodeSituation,
    ShowState,
    TellNodes,
)
from shared.nodes.first_node import STOP_SECONDS
from shared.runtime import exit_codes
from shared.runtime.errors import DeadlineExceeded
from shared.schema.service_messages import Attempt


class FurtherNode:
    """The state machine of a node of rank 1 or higher.

    Args:
        nodes: how many there are. patience: seconds that the first node's next attempt is waited for. leave_seconds: that ranks which were
            told to leave have, before they are killed.
    """

    def __init__(self, rank: int, nodes: int, patience: float, leave_seconds: float = STOP_SECONDS) -> None:
        self._rank, self._nodes, self._patience, self._leave_seconds = rank, nodes, patience, leave_seconds
        self._joined: Attempt | None = None  # whose end this node has not acted on yet
        self._newest = 0
        self._waiting_since: float | None = None
        self._leaving_since: float | None = None
        self._told_lost = False

    def step(self, now: NodeSituation) -> list[NodeCommand]:
        """Returns the commands of this moment."""
        if self._joined is not None:
            return self._work(now, self._joined)
        return self._wait(now)

    def _wait(self, now: NodeSituation) -> list[NodeCommand]:
        if now.stopping:
            return [LeaveNode(exit_codes.DONE)]
        if now.nodes is None:
            return []
        first, attempt = now.nodes[0], now.attempt
        if attempt is not None and first.alive and self._is_new(attempt, first.term, now.term):
            self._newest, self._joined, self._waiting_since, self._told_lost = attempt.number, attempt, None, False
            shown = ShowState("ready", f"node {self._rank} of {self._nodes}, attempt {attempt.number}")
            return [BeginRanks(attempt.number, attempt.address, attempt.port), shown]
        if self._waiting_since is None:
            self._waiting_since = now.now
        if now.now - self._waiting_since > self._patience:
            error = DeadlineExceeded("an attempt of all nodes", str(first), self._patience, "this node stops")
            return [LeaveNode(exit_codes.FAILED, str(error))]
        return [ShowState(WAITING, f"node {self._rank} of {self._nodes}, for {first}" + (" (lost)" if first.expired else ""))]

    def _is_new(self, attempt: Attempt, first: str, own: str) -> bool:
        """Returns whether an attempt is one to join: of the first node that is there now, and of this very agent."""
        members = len(attempt.terms) == self._nodes and attempt.terms[0] == first and attempt.terms[self._rank] == own
        return members and attempt.number > self._newest and not attempt.over

    def _work(self, now: NodeSituation, joined: Attempt) -> list[NodeCommand]:
        kill: list[NodeCommand] = [KillRanks()] if now.ranks.running else []
        if now.stopping and (leaving := self._leave(now, kill)):
            return leaving
        if now.nodes is None:
            return []
        first, attempt = now.nodes[0], now.attempt
        if attempt is not None and attempt.number == joined.number and attempt.over not in ("", "ending"):
            return self._over(now, attempt, kill)
        if first.expired or first.term != joined.terms[0]:
            return [*self._first_lost(str(first), first.expired), *(kill or self._waits_again())]
        if attempt is None or not (attempt.over or attempt.number > joined.number):
            return []
        return kill or self._waits_again(attempt.number > joined.number)

    def _leave(self, now: NodeSituation, kill: list[NodeCommand]) -> list[NodeCommand]:
        """Returns the commands of a node that was asked to stop: its ranks leave with all others, and are waited for."""
        if not now.ranks.running:
            return [LeaveNode(exit_codes.DONE)]
        self._leaving_since = now.now if self._leaving_since is None else self._leaving_since
        return kill if now.now - self._leaving_since > self._leave_seconds else []

    def _over(self, now: NodeSituation, attempt: Attempt, kill: list[NodeCommand]) -> list[NodeCommand]:
        """Returns the commands where the attempt is over, and why is known, whether or not the first node has left since."""
        if now.ranks.running and attempt.over in ("stopped", "done"):  # rank 0 has told them to leave
            self._leaving_since = now.now if self._leaving_since is None else self._leaving_since
            return [] if now.now - self._leaving_since <= self._leave_seconds else kill
        if now.ranks.running or attempt.over in ("stopped", "lost"):
            return kill or self._waits_again()
        return [LeaveNode(attempt.code, attempt.reason)]

    def _first_lost(self, first: str, expired: bool) -> list[NodeCommand]:
        if self._told_lost:
            return []
        self._told_lost = True
        how = "is lost: its lease was not renewed in time" if expired else "was started anew, or has left"
        return [TellNodes(NODE_LOST, f"{first} {how}")]

    def _waits_again(self, over: bool = True) -> list[NodeCommand]:
        """Waits for the next attempt, unless the end of this one is still to be explained."""
        if over:
            self._joined, self._leaving_since = None, None
        return []
