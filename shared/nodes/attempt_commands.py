"""What a node's state machine is told, and what it commands (`first_node`, `further_node`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.nodes.node_presence import SeenNode
from shared.schema.service_messages import Attempt


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
    """Ask the ranks to leave in order: rank 0 saves and tells all others."""


@dataclass(frozen=True)
class KillRanks:
    """End the ranks at once: they may be inside a collective that never ends."""


@dataclass(frozen=True)
class TellNodes:
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


NodeCommand = BeginRanks | AnnounceAttempt | StopRanks | KillRanks | TellNodes | ShowState | LeaveNode

NODE_LOST, LINK_LOST, ATTEMPT_BEGUN, ATTEMPT_ENDED = "node_lost", "link_lost", "attempt_begun", "attempt_ended"
"""Events of `TellNodes`."""
