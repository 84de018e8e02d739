"""The decisions of a job's nodes: when an attempt begins, when and why it is over, which node is missing, when ranks join and end. Pure.

Invariants of the first node:

- an attempt begins only while every node's lease is being renewed and no node has ranks of an earlier attempt;
- its number is higher than that of every earlier one;
- it is over on all nodes as soon as one node is lost, started anew or has failed, or two of them do not reach each other: ranks are killed,
  for they may wait inside a collective;
- the next one does not begin before the nodes reach each other again, where it is known that they did not;
- why it is over is said once every node has no ranks any more or is known to be lost: ranks that saw another go away are not the cause.

Invariants of every other node:

- ranks start only for an attempt that names this very agent (by its lease's term), once, while the first node's lease is being renewed;
- ranks of an attempt that is over, or whose first node is lost or another one by now, are killed;
- a node that cannot reach the bus decides nothing: it cannot know whether it alone is cut off.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.bus.leader_lease import LeaseObserver
from shared.bus.registry import WAITING
from shared.runtime import exit_codes
from shared.runtime.errors import DeadlineExceeded
from shared.schema.service_messages import Attempt, LeaseStatus, NodeState, Over


@dataclass(frozen=True)
class SeenNode:
    """A node as its lease shows it. ``term``: of its agent, empty where it has left, or was never there. ``alive``: its lease is being
    renewed. ``expired``: it has not been for the lease's whole duration."""

    rank: int
    holder: str = ""
    term: str = ""
    state: NodeState | None = None
    alive: bool = False
    expired: bool = False

    @property
    def running(self) -> int:
        """Returns the attempt that its ranks take part in; 0: they run in none, as far as this can be known."""
        return self.state.running if self.state is not None and self.term and not self.expired else 0

    @property
    def ready(self) -> bool:
        """Returns whether an attempt may begin with it."""
        return self.alive and self.state is not None and not self.state.stopping

    @property
    def point(self) -> str:
        """Returns where it is asked for a sign of life; empty: nowhere, or it is not there."""
        return self.state.point if self.state is not None and self.alive else ""

    @property
    def silent(self) -> list[str]:
        """Returns the points at which it asks in vain, as long as it says so: not of one whose own lease is not being renewed."""
        return self.state.silent if self.state is not None and self.alive else []

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.holder, self.state.address if self.state else "")))
        return f"node {self.rank}" + (f" ({where})" if where else "")


class NodeObserver:
    """Follows one node's lease.

    A lease that was found when watching began may be that of a dead agent: the node counts as alive once the lease was renewed, or taken,
    before the eyes of this process.

    ``duration``: of the lease in seconds.
    """

    def __init__(self, rank: int, duration: float) -> None:
        self._rank, self._lease = rank, LeaseObserver(duration)
        self._first: int | None = None
        self._last = LeaseStatus(holder="", term="", mark="", at=0.0)

    def see(self, revision: int, status: LeaseStatus | None, now: float) -> SeenNode:
        """Takes the lease that was read by ``now``; ``revision`` 0: there is none. ``status`` None: it cannot be read, the node is as
        it was, until its lease has run out."""
        status = self._last = status or self._last
        if self._first is None:
            self._first = revision
        expired = self._lease.see(revision, now)
        alive = bool(status.term) and not expired and revision != self._first
        return SeenNode(self._rank, status.holder, status.term, status.node, alive, bool(status.term) and expired)

    def unreadable(self) -> None:
        """Restarts the count: the bus is away, and the node may be unable to renew."""
        self._lease.unreadable()


@dataclass(frozen=True)
class OwnRanks:
    """The ranks of this node. ``running``: their attempt, 0: there are none. ``port``: of the meeting point that they have opened on the
    first node, 0: not yet. ``ended``: the newest attempt whose ranks have ended here, with ``code``, ``reason`` and ``consequence`` as
    `shared.schema.service_messages.NodeState` has them."""

    running: int = 0
    port: int = 0
    ended: int = 0
    code: int = 0
    reason: str = ""
    consequence: bool = False


@dataclass(frozen=True)
class NodeSituation:
    """All that a node knows at ``now`` (seconds). ``nodes``: the others that it watches, by rank; None where the bus did not answer.
    ``attempt``: the newest that was announced; None where there is none, or the bus did not answer. ``point``: where the other nodes ask
    this one for a sign of life."""

    now: float
    term: str
    address: str
    ranks: OwnRanks
    nodes: Mapping[int, SeenNode] | None
    attempt: Attempt | None
    stopping: bool = False
    point: str = ""


@dataclass(frozen=True)
class BeginRanks:
    """Start this node's ranks for an attempt; on the first node they open the meeting point."""

    number: int
    address: str
    port: int = 0


@dataclass(frozen=True)
class AnnounceAttempt:
    """Write the attempt into KV."""

    attempt: Attempt


@dataclass(frozen=True)
class StopRanks:
    """Ask the ranks to leave in order: rank 0 saves and notifies all others."""


@dataclass(frozen=True)
class KillRanks:
    """End the ranks at once: they may be inside a collective that never ends."""


@dataclass(frozen=True)
class PublishNodeEvent:
    """Log and publish an event about the nodes."""

    what: str
    detail: str


@dataclass(frozen=True)
class ShowState:
    """Show the node's state and the reason of it."""

    state: str
    detail: str


@dataclass(frozen=True)
class LeaveNode:
    """End this node's agent with an exit code, with its reason where that is not 0."""

    code: int
    reason: str = ""


NodeCommand = BeginRanks | AnnounceAttempt | StopRanks | KillRanks | PublishNodeEvent | ShowState | LeaveNode

# Events of `PublishNodeEvent`
NODE_LOST, LINK_LOST, ATTEMPT_BEGUN, ATTEMPT_ENDED = "node_lost", "link_lost", "attempt_begun", "attempt_ended"


STOP_SECONDS = 1800.0  # that ranks have to save and leave in order before they are killed; whoever stops a node gives it less

# The attempts in a row that may end with all ranks saying that others went away, and no node lost. The next one has failed.
MOST_UNEXPLAINED = 3

# The seconds of an attempt after which those before it are no reason to give up, as with a process that has lived for long
# (`myxo.launch.supervisor`).
HEALTHY_SECONDS = 600.0


class FirstNode:
    """The state machine of node 0.

    ``nodes``: how many there are. ``patience``: seconds that missing nodes are waited for. ``known``: number of the newest attempt so far.
    ``healthy``: seconds of an attempt after which earlier ones that ended without a reason no longer count; longer than ranks may take to
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
                PublishNodeEvent(ATTEMPT_BEGUN, f"attempt {self._number} of {self._nodes} nodes meets at {where}"),
                ShowState("ready", f"node 0 of {self._nodes}, attempt {self._number}"),
            ]
        return commands

    def _note_lost(self, now: NodeSituation) -> list[NodeCommand]:
        """Notes the nodes whose lease has run out, or whose agent is another one than at the attempt's beginning; reports each once."""
        for rank, node in (now.nodes or {}).items():
            if rank in self._lost or (self._stop_asked is not None and not node.term):
                continue
            if node.expired:
                self._lost[rank] = f"{node} is lost: its lease was not renewed in time"
            elif node.term != self._terms[rank]:
                self._lost[rank] = f"{node} was started anew" if node.term else f"{node} has left"
        new = [rank for rank in self._lost if rank not in self._named]
        self._named.update(new)
        return [PublishNodeEvent(NODE_LOST, self._lost[rank]) for rank in new]

    def _note_cut(self, now: NodeSituation) -> list[NodeCommand]:
        """Notes the links that are down while the nodes at both ends renew their leases; reports each once."""
        found = {ends: words for ends, words in self._down_links(now).items() if ends not in self._cut and not {*ends} & {*self._lost}}
        self._cut.update(found)
        return [
            PublishNodeEvent(LINK_LOST, f"{words} is down: no answer for too long, though both reach the bus") for words in found.values()
        ]

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
        ends = [(0, now.ranks.ended, now.ranks.code)]
        ends += [(rank, node.state.ended, node.state.code) for rank, node in (now.nodes or {}).items() if node.state is not None]
        return [rank for rank, ended, code in ends if ended == self._number and code]

    def _stop(self, now: NodeSituation) -> list[NodeCommand]:
        leaving = [str(node) for node in (now.nodes or {}).values() if node.state is not None and node.state.stopping]
        if not (now.stopping or leaving):
            return []
        if self._stop_asked is None:
            self._stop_asked = now.now
            self._stop_reason = f"{'node 0' if now.stopping else ', '.join(leaving)} was asked to stop"
            return [PublishNodeEvent("attempt_stopping", self._stop_reason), StopRanks()]
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
        event = PublishNodeEvent(ATTEMPT_ENDED, f"attempt {self._number} is over: {reason or over}")
        return [event] if attempt is None else [AnnounceAttempt(replace_over(attempt, over, code, reason)), event]


def replace_over(attempt: Attempt, over: Over, code: int, reason: str) -> Attempt:
    """Returns the attempt as it is over."""
    return attempt.model_copy(update={"over": over, "code": code, "reason": reason})


class FurtherNode:
    """The state machine of a node of rank 1 or higher.

    ``nodes``: how many there are. ``patience``: seconds that the first node's next attempt is waited for. ``leave_seconds``: that ranks
    which were told to leave have, before they are killed.
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
        return [PublishNodeEvent(NODE_LOST, f"{first} {how}")]

    def _waits_again(self, over: bool = True) -> list[NodeCommand]:
        """Waits for the next attempt, unless the end of this one is still to be explained."""
        if over:
            self._joined, self._leaving_since = None, None
        return []
