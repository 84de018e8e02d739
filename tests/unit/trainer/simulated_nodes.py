"""Nodes of a trainer without processes: the state machines of all of them over a simulated KV, ranks and clock."""

import itertools
from dataclasses import dataclass, field

from shared.nodes.node_decisions import (
    AnnounceAttempt,
    BeginRanks,
    FirstNode,
    FurtherNode,
    KillRanks,
    LeaveNode,
    NodeObserver,
    NodeSituation,
    OwnRanks,
    PublishNodeEvent,
    ShowState,
    StopRanks,
)
from shared.schema.service_messages import Attempt, LeaseStatus, NodeState

DURATION, TICK = 5.0, 0.5
PATIENCE = 600.0


@dataclass
class SimulatedNode:
    """One agent and its ranks. ``cut``: it reaches nothing; ``left``: the exit code of an agent that has ended."""

    rank: int
    nodes: int
    term: str
    known: int = 0
    cut: bool = False
    deaf_to: set[int] = field(default_factory=set)  # lower ranks that it does not reach, though both reach the bus
    stopping: bool = False
    stop_asked: bool = False  # of its ranks
    unwritten: Attempt | None = None  # announced while it was cut off
    left: int | None = None
    reason: str = ""
    ranks: OwnRanks = field(default_factory=OwnRanks)
    told: list[PublishNodeEvent] = field(default_factory=list)
    shown: ShowState | None = None

    def __post_init__(self) -> None:
        self.machine: FirstNode | FurtherNode = (
            FirstNode(self.nodes, PATIENCE, self.known) if self.rank == 0 else FurtherNode(self.rank, self.nodes, PATIENCE)
        )
        watched = range(1, self.nodes) if self.rank == 0 else range(1)
        self.observers = {other: NodeObserver(other, DURATION) for other in watched}

    @property
    def works(self) -> bool:
        return self.left is None

    @property
    def point(self) -> str:
        return f"10.0.0.{self.rank + 1}:{self.term.removeprefix('term-')}"


class SimulatedCluster:
    """All nodes; `tick` is one round of their agents. ``agents[rank]`` is None while a node is dead."""

    def __init__(self, nodes: int) -> None:
        self.now, self._terms, self._ports = 0.0, itertools.count(1), itertools.count(4001)
        self.leases: dict[int, tuple[int, LeaseStatus]] = {}
        self.attempt: Attempt | None = None
        self.agents: list[SimulatedNode | None] = [None] * nodes
        self.begun: list[tuple[int, int]] = []  # (rank, attempt) of all ranks that were ever started

    def start(self, rank: int) -> None:
        known = self.attempt.number if self.attempt else 0
        self.agents[rank] = SimulatedNode(rank, len(self.agents), f"term-{next(self._terms)}", known)

    def kill(self, rank: int) -> None:
        """Agent and ranks are gone; its lease stays as it was."""
        self.agents[rank] = None

    def node(self, rank: int) -> SimulatedNode:
        found = self.agents[rank]
        assert found is not None
        return found

    def running(self) -> list[int]:
        """The attempt that each node's ranks run in."""
        return [0 if agent is None else agent.ranks.running for agent in self.agents]

    def tick(self, seconds: float = TICK) -> None:
        self.now += seconds
        for agent in filter(None, self.agents):
            if not agent.cut and agent.works:
                self._renew(agent)
                self._write(agent)
        for agent in filter(None, self.agents):
            if agent.works:
                self._step(agent)

    def until(self, condition: "object", rounds: int = 400) -> None:
        for _ in range(rounds):
            if condition():  # type: ignore[operator]
                return
            self.tick()
        raise AssertionError(f"it did not come within {rounds} rounds: {self.running()}, {self.attempt}")

    def _write(self, agent: SimulatedNode) -> None:
        if agent.unwritten is not None and not agent.cut:
            self.attempt, agent.unwritten = agent.unwritten, None

    def _renew(self, agent: SimulatedNode, term: str | None = None) -> None:
        own, revision = agent.ranks, self.leases.get(agent.rank, (0, None))[0]
        state = NodeState(
            address=f"10.0.0.{agent.rank + 1}",
            running=own.running,
            ended=own.ended,
            code=own.code,
            reason=own.reason,
            consequence=own.consequence,
            stopping=agent.stopping,
            point=agent.point,
            silent=[point for point in self.attempt.points[: agent.rank] if int(point.split(":")[0][-1]) - 1 in agent.deaf_to]
            if self.attempt
            else [],
        )
        status = LeaseStatus(holder=f"host-{agent.rank}", term=agent.term if term is None else term, mark="", at=self.now, node=state)
        self.leases[agent.rank] = revision + 1, status

    def _step(self, agent: SimulatedNode) -> None:
        nodes = attempt = None
        if agent.cut:
            for observer in agent.observers.values():
                observer.unreadable()
        else:
            nobody = LeaseStatus(holder="", term="", mark="", at=0.0)
            nodes = {rank: observer.see(*self.leases.get(rank, (0, nobody)), self.now) for rank, observer in agent.observers.items()}
            attempt = self.attempt
        now = NodeSituation(self.now, agent.term, "10.0.0.1", agent.ranks, nodes, attempt, agent.stopping, agent.point)
        for command in agent.machine.step(now):
            self._do(agent, command)

    def _do(self, agent: SimulatedNode, command: object) -> None:
        match command:
            case BeginRanks(number=number, port=port):
                assert not agent.ranks.running, "ranks were begun beside others"
                self.begun.append((agent.rank, number))
                agent.ranks = OwnRanks(number, next(self._ports) if agent.rank == 0 else port, agent.ranks.ended)
                agent.stop_asked = False
            case KillRanks():
                self.end(agent.rank, 1, "killed", True)
            case StopRanks():
                agent.stop_asked = True
            case AnnounceAttempt(attempt=attempt):
                agent.unwritten = attempt
                self._write(agent)
            case PublishNodeEvent():
                agent.told.append(command)
            case ShowState():
                agent.shown = command
            case LeaveNode(code=code, reason=reason):
                assert not agent.ranks.running, "an agent left its ranks behind"
                agent.left, agent.reason = code, reason
                self._renew(agent, term="")

    def end(self, rank: int, code: int, reason: str = "", consequence: bool = False) -> None:
        """A node's ranks end."""
        agent = self.node(rank)
        if agent.ranks.running:
            agent.ranks = OwnRanks(0, ended=agent.ranks.running, code=code, reason=reason, consequence=consequence)

    def said(self, rank: int, what: str) -> list[str]:
        return [told.detail for told in self.node(rank).told if told.what == what]
