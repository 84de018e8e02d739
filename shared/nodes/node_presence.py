"""What one node knows of another from the lease that it reads. Pure: times are arguments."""

from dataclasses import dataclass

from shared.bus.leader_lease import LeaseObserver
from shared.schema.service_messages import LeaseStatus, NodeState


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

    Args:
        duration: of the lease in seconds.
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
