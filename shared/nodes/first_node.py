"""The first node's decisions: when an attempt begins, when and why it is over, and which node is missing. Pure.

Invariants:

- an attempt begins only while every node's lease is being renewed and no node has ranks of an earlier attempt;
- its number is higher than that of every earlier one;
- it is over on all nodes as soon as one node is lost, started anew or has failed, or two of them do not reach each other: ranks are killed,
  for they may wait inside a collective;
- the next one does not begin before the nodes reach each other again, where it is known that they did not;
- why it is over is said once every node has no ranks any more or is known to be lost: ranks that saw another go away are not the cause.
"""

from collections.abc import Mapping

from shared.bus.registry import WAITING
from shared.nodes.attempt_commands import (
    ATTEMPT_BEGUN,
    ATTEMPT_ENDED,
    LINK_LOST,
    NODE_LOST,
    AnnounceAttempt,
    BeginRanks,
    KillRanks,
    LeaveNode,
    NodeCommand,
    NodeSituation,
    ShowState,
    StopRanks,
    TellNodes,
)
from shared.nodes.node_presence import SeenNode
from shared.runtime import exit_codes
from shared.runtime.errors import DeadlineExceeded
from shared.schema.service_messages import Attempt, Over

STOP_SECONDS = 120.0
"""The seconds that ranks have to leave in order before they are killed."""

MOST_UNEXPLAINED = 3
"""The attempts in a row that may end with all ranks saying that others went away, and no node lost. The next one has failed."""

HEALTHY_SECONDS = 600.0
"""The seconds of an attempt after which those before it are no reason to give up, as with a process that has lived for long
(`myxo.launch.restart_policy`)."""


class FirstNode:
    """The state machine of node 0.

    Args:
        nodes: how many there are. patience: seconds that missing nodes are waited for. known: number of the newest attempt so far.
        healthy: seconds of an attempt after which earlier ones that ended without a reason no longer count; longer than ranks may take to
            start, or those that never come up would be started for ever.
    """

    def __init__(self, nodes: int, patience: float, known: int = 0, healthy: float = HEALTHY_SECONDS) -> None:
        self._nodes, self._patience, self._number, self._healthy = nodes, patience, known, healthy
        self._begun = 0.0
        self._attempt: Attempt | None = None  # announced, and not over
        self._opening = self._ending = False
        self._waiting_since: float | None = None
        self._stop_asked: float | None = None
        self._stop_reason = ""
        self._unexplained = 0
        self._lost: dict[int, str] = {}  # nodes that were lost in this attempt, in words
        self._cut: dict[tuple[int, int], str] = {}  # links that were lost in it
        self._named: set[int] = set()
        self._first_failed: list[int] = []  # the nodes for which the attempt was ended
        self._terms: dict[int, str] = {}
        self._points: dict[int, str] = {}

    def step(self, now: NodeSituation) -> list[NodeCommand]:
        """Returns the commands of this moment."""
        if self._ending:
            return self._end(now)
        if self._opening or self._attempt is not None:
            return self._work(now)
        return self._wait(now)

    # --- between attempts

    def _wait(self, now: NodeSituation) -> list[NodeCommand]:
        if now.stopping:
            return [LeaveNode(exit_codes.DONE)]
        if now.nodes is None:
            return []
        if self._waiting_since is None:
            self._waiting_since = now.now
        missing = [self._described(node) for node in now.nodes.values() if not node.ready] or list(self._down_links(now).values())
        if missing:
            names = ", ".join(missing)
            if now.now - self._waiting_since > self._patience:
                error = DeadlineExceeded("an attempt of all nodes", names, self._patience, "this node stops")
                return [LeaveNode(exit_codes.FAILED, str(error))]
            return [ShowState(WAITING, f"for {names}, of {self._nodes} nodes")]
        if busy := [node for node in now.nodes.values() if node.running]:
            return [ShowState(WAITING, f"for the earlier ranks of {', '.join(map(str, busy))} to end")]
        return self._open(now, now.nodes)

    def _open(self, now: NodeSituation, nodes: Mapping[int, SeenNode]) -> list[NodeCommand]:
        # by the nodes where what stands on the bus of the newest attempt cannot be read
        ended = [max(node.state.ended, node.state.running) for node in nodes.values() if node.state is not None]
        self._number = max(self._number, now.attempt.number if now.attempt else 0, *ended) + 1
        self._opening, self._waiting_since, self._stop_asked = True, None, None
        self._lost, self._cut, self._named, self._begun = {}, {}, set(), now.now
        self._terms = {0: now.term, **{rank: node.term for rank, node in nodes.items()}}
        self._points = {0: now.point, **{rank: node.point for rank, node in nodes.items()}}
        return [BeginRanks(self._number, now.address), ShowState("starting", f"attempt {self._number} of {self._nodes} nodes")]

    @staticmethod
    def _described(node: SeenNode) -> str:
        if not node.term:
            return f"{node} (not there)"
        return f"{node} ({'lost' if node.expired else 'stopping' if node.state and node.state.stopping else 'not seen yet'})"

    # --- during one

    def _work(self, now: NodeSituation) -> list[NodeCommand]:
        commands = [*self._note_lost(now), *self._note_cut(now)]
        if self._lost or self._cut or self._failed(now):
            return [*commands, *self._begin_end(now)]
        commands += self._stop(now)
        if now.ranks.ended == self._number:
            return [*commands, *self._ended_in_order(now)]
        if self._opening and now.ranks.port:
            self._opening = False
            terms = [self._terms[rank] for rank in range(self._nodes)]
            points = [self._points[rank] for rank in range(self._nodes)]
            self._attempt = Attempt(number=self._number, address=now.address, port=now.ranks.port, terms=terms, points=points, at=0.0)
            where = f"{now.address}:{now.ranks.port}"
            commands += [
                AnnounceAttempt(self._attempt),
                TellNodes(ATTEMPT_BEGUN, f"attempt {self._number} of {self._nodes} nodes meets at {where}"),
                ShowState("ready", f"node 0 of {self._nodes}, attempt {self._number}"),
            ]
        return commands

    def _note_lost(self, now: NodeSituation) -> list[NodeCommand]:
        """Notes the nodes whose lease has run out, or whose agent is another one than at the attempt's beginning; tells of each once."""
        for rank, node in (now.nodes or {}).items():
            if rank in self._lost or (self._stop_asked is not None and not node.term):
                continue
            if node.expired:
                self._lost[rank] = f"{node} is lost: its lease was not renewed in time"
            elif node.term != self._terms[rank]:
                self._lost[rank] = f"{node} was started anew" if node.term else f"{node} has left"
        told = [rank for rank in self._lost if rank not in self._named]
        self._named.update(told)
        return [TellNodes(NODE_LOST, self._lost[rank]) for rank in told]

    def _note_cut(self, now: NodeSituation) -> list[NodeCommand]:
        """Notes the links that are down while the nodes at both ends renew their leases; tells of each once."""
        found = {ends: words for ends, words in self._down_links(now).items() if ends not in self._cut and not {*ends} & {*self._lost}}
        self._cut.update(found)
        return [TellNodes(LINK_LOST, f"{words} is down: no answer for too long, though both reach the bus") for words in found.values()]

    @staticmethod
    def _down_links(now: NodeSituation) -> dict[tuple[int, int], str]:
        """Returns the links over which one node asks another in vain, in words, by the ranks of both."""
        nodes = now.nodes or {}
        points = {0: now.point, **{rank: node.point for rank, node in nodes.items()}}
        names = {0: f"node 0 ({now.address})", **{rank: str(node) for rank, node in nodes.items()}}
        ends = [(lower, rank) for rank in nodes for lower in points if lower < rank and points[lower]]
        down = [(lower, rank) for lower, rank in ends if points[lower] in nodes[rank].silent]
        return {(lower, rank): f"the link between {names[lower]} and {names[rank]}" for lower, rank in down}

    def _failed(self, now: NodeSituation) -> list[int]:
        """Returns the nodes whose ranks have failed, as far as is known."""
        ends = [(0, now.ranks.ended, now.ranks.code)]
        ends += [(rank, node.state.ended, node.state.code) for rank, node in (now.nodes or {}).items() if node.state is not None]
        return [rank for rank, ended, code in ends if ended == self._number and code]

    def _stop(self, now: NodeSituation) -> list[NodeCommand]:
        """Returns the commands where this node or another was asked to stop."""
        leaving = [str(node) for node in (now.nodes or {}).values() if node.state is not None and node.state.stopping]
        if not (now.stopping or leaving):
            return []
        if self._stop_asked is None:
            self._stop_asked = now.now
            self._stop_reason = f"{'node 0' if now.stopping else ', '.join(leaving)} was asked to stop"
            return [TellNodes("attempt_stopping", self._stop_reason), StopRanks()]
        return [KillRanks()] if now.now - self._stop_asked > STOP_SECONDS and now.ranks.running else []

    def _ended_in_order(self, now: NodeSituation) -> list[NodeCommand]:
        if self._stop_asked is None:
            return [*self._over("done", exit_codes.DONE, ""), LeaveNode(exit_codes.DONE)]
        stopped = self._over("stopped", exit_codes.DONE, self._stop_reason)
        return [*stopped, LeaveNode(exit_codes.DONE)] if now.stopping else stopped

    # --- its end by force

    def _begin_end(self, now: NodeSituation) -> list[NodeCommand]:
        self._ending, self._first_failed = True, self._failed(now)
        if now.now - self._begun >= self._healthy:
            self._unexplained = 0
        commands: list[NodeCommand] = [KillRanks()] if now.ranks.running else []
        if self._attempt is not None:
            commands.append(AnnounceAttempt(replace_over(self._attempt, "ending", 0, self._losses())))
        return [*commands, ShowState("ending", f"attempt {self._number}")]

    def _end(self, now: NodeSituation) -> list[NodeCommand]:
        commands = self._note_lost(now)
        if now.ranks.running:
            return [*commands, KillRanks()]
        if now.nodes is None or any(node.running == self._number and rank not in self._lost for rank, node in now.nodes.items()):
            return commands
        if self._lost or self._cut:
            self._unexplained = 0
            return [*commands, *self._over("lost", 0, self._losses())]
        code, reason, consequence = self._cause(now)
        if consequence and self._stop_asked is None and self._unexplained < MOST_UNEXPLAINED:
            self._unexplained += 1
            return [*commands, *self._over("lost", 0, f"its nodes lost each other; {reason}")]
        if self._stop_asked is not None:
            stopped = self._over("stopped", exit_codes.DONE, f"{self._stop_reason}; {reason}")
            return [*stopped, LeaveNode(code, reason)] if now.stopping else stopped
        return [*self._over("failed", code, reason), LeaveNode(code, reason)]

    def _losses(self) -> str:
        return "; ".join([*self._lost.values(), *(f"{words} is down" for words in self._cut.values())])

    def _cause(self, now: NodeSituation) -> tuple[int, str, bool]:
        """Returns exit code and reason of the node that failed first, as far as reasons tell, and whether none failed by itself."""
        ends = [(0, now.ranks)] if now.ranks.ended == self._number and now.ranks.code else []
        found = [(rank, ranks.code, ranks.reason, ranks.consequence) for rank, ranks in ends]
        for rank, node in (now.nodes or {}).items():
            if (state := node.state) is not None and state.ended == self._number and state.code:
                found.append((rank, state.code, state.reason, state.consequence))
        if not found:
            return exit_codes.FAILED, "the ranks ended", False
        # the others' ranks were killed for it, and say no more than that
        rank, code, reason, consequence = min(found, key=lambda end: (end[3], end[0] not in self._first_failed, not end[2]))
        code = code if code in (exit_codes.BAD_INPUT, exit_codes.FAILED) else exit_codes.FAILED
        return code, f"node {rank}: {reason or 'its ranks ended'}", consequence

    def _over(self, over: Over, code: int, reason: str) -> list[NodeCommand]:
        attempt, self._attempt = self._attempt, None
        self._opening = self._ending = False
        told = TellNodes(ATTEMPT_ENDED, f"attempt {self._number} is over: {reason or over}")
        return [told] if attempt is None else [AnnounceAttempt(replace_over(attempt, over, code, reason)), told]


def replace_over(attempt: Attempt, over: Over, code: int, reason: str) -> Attempt:
    """Returns the attempt as it is over."""
    return attempt.model_copy(update={"over": over, "code": code, "reason": reason})
