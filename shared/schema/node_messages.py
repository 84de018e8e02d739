"""The wire schema of a trainer's or an engine's nodes: what each says of itself in its lease, and the attempt that the first announces."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.schema.limits import Count, Name, Reason, Timestamp
from shared.schema.message import Message, Part

Over = Literal["", "ending", "stopped", "lost", "failed", "done"]
"""How an attempt stands: at work, being ended, or why it ended. After ``lost`` and ``stopped`` its nodes begin another one."""

MAX_NODES = 4096
"""The most nodes of a job."""

Point = Annotated[str, StringConstraints(max_length=160, pattern=r"^([^\s:]+:\d{1,5})?$")]
"""An address and a port, ``address:port``; empty: none."""


class NodeState(Part):
    """A node, as the `LeaseStatus` of its rank says.

    ``address``: where the other nodes reach it. ``running``: the attempt in which its ranks run, 0: none do. ``ended``: the newest attempt
    whose ranks have ended here, with exit ``code`` and ``reason``; ``consequence``: the reason is that another rank went away.
    ``stopping``: it was asked to stop. ``door``: the port at which an engine's node takes commands to its ranks from who knows its
    `NodeSecret`; 0: it takes none. ``point``: where the other nodes ask it for a sign of life (`shared.nodes.node_agent`); ``silent``: the
    points of others at which it asks in vain.
    """

    address: Name
    running: Count = 0
    ended: Count = 0
    code: int = 0
    reason: Reason = ""
    consequence: bool = False
    stopping: bool = False
    door: Count = 0
    point: Point = ""
    silent: list[Point] = Field(default=[], max_length=MAX_NODES)


class NodeSecret(Message):
    """KV ``secrets/<job>.<rank>``, which the account of the engines alone reads: what proves to an engine's node that a command
    to its ranks comes from another of its nodes, or (of the first node) what the keys of the engine's sockets are made of."""

    secret: str = Field(pattern=r"^[0-9a-f]{32}$", repr=False)


class Attempt(Message):
    """KV ``leases/<job>.attempt`` (``nodes.<role>``, ``engines.<replica>``): an attempt of all nodes, which meet at ``address`` and
    ``port`` of the first one.

    ``terms``: of the nodes' leases, by rank: a node that was started anew is another one. ``points``: where each is asked for a sign of
    life, by rank; each node asks those of a lower rank. ``code``: the exit code of a failed attempt.
    """

    number: Count
    address: Name
    port: Count
    terms: list[Name]
    points: list[Point] = Field(default=[], max_length=MAX_NODES)
    over: Over = ""
    code: int = 0
    reason: Reason = ""
    at: Timestamp
