"""Events and registry: who is there, what it does, what a step measured."""

from __future__ import annotations

from shared.schema.messages.message import Message


class TrainerStep(Message):
    """Event ``<run>.trainer.step``: what one step measured, for progress, charts and the summary."""

    step: int
    version: int
    started: float
    ended: float
    metrics: dict[str, float]


class WarmStartEnded(Message):
    """Event ``<run>.trainer.warm_start``: the supervised warm start took ``steps`` steps. ``losses``: the mean loss (nats a token) of each
    ``every`` steps in order, the last of them of what is left over."""

    steps: int
    every: int
    losses: list[float]

    @classmethod
    def of(cls, losses: list[float], points: int = 200) -> WarmStartEnded:
        """The message for the losses of all steps, in at most ``points`` numbers."""
        every = -(-len(losses) // points) or 1
        parts = [losses[begin : begin + every] for begin in range(0, len(losses), every)]
        return cls(steps=len(losses), every=every, losses=[sum(part) / len(part) for part in parts])


class ServiceEvent(Message):
    """Event ``<run>.service.<what>``: a service joined, left, was fenced, failed."""

    service: str
    instance: str
    what: str
    detail: str = ""
    at: float


class ServiceStatus(Message):
    """KV ``services/<service>.<instance>``: who is alive and what it serves. Renewed by heartbeat, gone after its TTL.

    ``version``: weights served (-1: none). ``state``: starting, ready, updating, fenced, stopping, … ``gauges``: small live figures.
    ``ranks``: of its engine in a process group. ``incarnation`` changes whenever what the service holds in memory (an engine's
    weights) is lost. ``detail``: the reason of the state, in words; of a buffer: why the newest dead group died, if any did.
    ``last_error``: the newest error that it logged in this life, at ``last_error_at`` (seconds since the epoch). Service `environment`
    is none of ours: the reward services keep its card, with its URL as ``http``.
    """

    service: str
    instance: str
    host: str
    pid: int
    http: str
    engine: str = ""
    state: str
    version: int = -1
    incarnation: str = ""
    ranks: int = 1
    gauges: dict[str, float] = {}
    detail: str = ""
    last_error: str = ""
    last_error_at: float = 0.0
    at: float


class LeaseStatus(Message):
    """KV ``leases/<job>``: who holds a leader's lease. ``term``: of one holder's one life; empty: free. ``mark``:
    `shared.runtime.liveness`."""

    holder: str
    term: str
    mark: str
    at: float
