"""The wire schema of live services and of nodes: the events that services publish, their state in the registry, what each node of a trainer
or an engine says of itself in its lease, and the attempt that the first one announces.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.schema.message import Count, Gauges, Message, Name, Part, Reason, Timestamp

# How an attempt stands: at work, being ended, or why it ended. After ``lost`` and ``stopped`` its nodes begin another one.
Over = Literal["", "ending", "stopped", "lost", "failed", "done"]
MAX_NODES = 4096  # The most nodes of a job

# An address and a port, ``address:port``; empty: none
Point = Annotated[str, StringConstraints(max_length=160, pattern=r"^([^\s:]+:\d{1,5})?$")]


class NodeState(Part):
    """A node, as the `LeaseStatus` of its rank says.

    ``address``: where the other nodes reach it. ``running``: the attempt in which its ranks run, 0: none do. ``ended``: the newest attempt
    whose ranks have ended here, with exit ``code`` and ``reason``; ``consequence``: the reason is that another rank went away.
    ``stopping``: it was asked to stop. ``command_port``: the port at which an engine's node takes commands to its ranks from who knows its
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
    command_port: Count = 0
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


class WarmStartEnded(Message):
    """Event ``<run>.trainer.warm_start``: the supervised warm start took ``steps`` steps. ``losses``: the mean loss (nats a token) of each
    ``every`` steps in order, the last of them of what is left over."""

    steps: int
    every: int
    losses: list[float]

    @classmethod
    def of(cls, losses: list[float], points: int = 200) -> "WarmStartEnded":
        """Returns the message for the losses of all steps, in at most ``points`` numbers."""
        every = -(-len(losses) // points) or 1
        parts = [losses[begin : begin + every] for begin in range(0, len(losses), every)]
        return cls(steps=len(losses), every=every, losses=[sum(part) / len(part) for part in parts])


class MetricsWritten(Message):
    """Event ``<run>.trainer.metrics``: what a trainer process (``role``: actor, critic) has measured of ``step``, by the names of
    docs/metrics.md. A step that is trained again after a restart is written again."""

    role: Name
    step: Count
    values: dict[str, float]
    at: Timestamp


VALUES_CHANGED = "values_changed"  # The event of a run that continues with other values of its training


class ServiceEvent(Message):
    """Event ``<run>.service.<what>``: a service joined, left, was fenced, failed."""

    service: Name
    instance: Name
    what: Name
    detail: Reason = ""
    at: float


# The parts of services that report: a trainer's loop, its push, the work of a rollout or reward service, a buffer's next batch
LOOP, PUSH, WORK, BATCH = "loop", "push", "work", "batch"


class Doing(Part):
    """Something that a service does now, or waits for, ``since`` then (seconds since the epoch; 0: not known).

    ``part``: which part of the service: ``loop`` of a trainer, ``push``, ``work`` of a rollout or reward service, ``batch`` of a buffer.
    ``what``: as the end of a sentence ("training step 3"). ``awaited_from``: the instances whose answers are missing; empty where it
    is at work itself. ``next_action``: what happens if it takes too long. ``stuck``: it should have continued by now.
    """

    part: Name
    what: Reason
    since: float = 0.0
    awaited_from: list[str] = []
    next_action: Reason = ""
    stuck: bool = False


class ServiceStatus(Message):
    """KV ``services/<service>.<instance>``: a live service and its state. Renewed by heartbeat, gone after its TTL.

    ``version``: weights served (-1: none). ``model``: the frozen model that it serves, if it does. ``prefill``: of a replica that only
    prefills, where decode engines' services ask it, and behind ``#`` the port for these engines; its ``engine`` is empty. ``state``:
    starting, ready, updating, fenced, stopping, … ``gauges``: small live figures.
    ``ranks``: how many ranks its engine has in a process group. ``incarnation`` changes whenever what the service holds in memory (an
    engine's weights) is lost. ``detail``: the reason of the state, in words; for a buffer: why the newest dead group died, if any did.
    ``held_back``: why it holds its work back (a stream or the store is full), how long already, and until when. ``last_error``: the
    newest error that it logged in this life, at ``last_error_at`` (seconds since the epoch). ``state_since``: when its state began;
    ``doing``: what it does or waits for now. Service `environment` is none of Myxo's: the
    reward services keep its status, with its URL as ``http``.
    """

    service: str
    instance: str
    host: str
    pid: int
    http: str
    engine: str = ""
    prefill: str = ""
    model: Reason = ""
    state: str
    version: int = -1
    incarnation: str = ""
    ranks: int = 1
    gauges: Gauges = {}
    detail: Reason = ""
    held_back: Reason = ""
    last_error: Reason = ""
    last_error_at: float = 0.0
    state_since: float = 0.0
    doing: list[Doing] = []
    at: float


class LeaseStatus(Message):
    """KV ``leases/<job>``: the holder of a leader's lease. ``term``: unique to one life of a holder; empty: free. ``mark``:
    `shared.runtime.host.process_mark`. ``node``: what a node of the trainer says of itself."""

    holder: str
    term: str
    mark: str
    at: float
    node: NodeState | None = None
