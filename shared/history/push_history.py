"""Every version of the weights: how it got to the replicas, how long that took, and what failed on the way. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.history.metric_history import MetricHistory
from shared.schema.service_messages import ServiceEvent
from shared.schema.weight_messages import WeightsLive, WeightsPushed

CAUGHT_UP = "caught_up"
"""The event of a replica that took a version from another replica or from disk."""

TROUBLES = ("fenced", "snapshot_broken", "snapshot_failed", "peer_weights_differ", "policy_not_exported")
"""Events that tell of weights that did not get where they should."""

MOST = 20_000
"""The newest pushes, versions and events that are kept, of each."""


@dataclass
class VersionHistory:
    """One version. ``live``: the newest word of who serves it, by push or from disk; ``pushes``: those of it that were tried, in order."""

    version: int
    live: WeightsLive | None = None
    pushes: list[WeightsPushed] = field(default_factory=list)

    @property
    def at(self) -> float:
        """Returns when it was first served, or last tried: seconds since the epoch."""
        served = [push.at for push in self.pushes if not push.failure]
        if served:
            return served[0]
        return self.live.at if self.live is not None else self.pushes[-1].at

    @property
    def replicas(self) -> list[str]:
        """Returns the replicas that were told to serve it, in the order of their names."""
        pushed = {part.replica for push in self.pushes for part in push.replicas if not part.failure}
        return sorted(pushed | set(self.live.replicas if self.live is not None else ()))

    @property
    def pushed(self) -> WeightsPushed | None:
        """Returns the first push that some replica served; None where there is none."""
        return next((push for push in self.pushes if not push.failure), None)


@dataclass
class PushHistory:
    """The fold of the events about weights."""

    versions: dict[int, VersionHistory] = field(default_factory=dict)
    events: list[ServiceEvent] = field(default_factory=list)
    """Catch-ups and troubles, in order."""

    def push(self, pushed: WeightsPushed) -> None:
        """Takes that a push has ended."""
        self._version(pushed.version).pushes.append(pushed)

    def live(self, live: WeightsLive) -> None:
        """Takes that a version is served."""
        self._version(live.version).live = live

    def take(self, event: ServiceEvent) -> bool:
        """Takes an event of a service; returns whether it concerns weights."""
        concerns = event.what == CAUGHT_UP or event.what in TROUBLES
        if concerns:
            self.events.append(event)
            del self.events[:-MOST]
        return concerns

    def newest_first(self) -> Sequence[VersionHistory]:
        """Returns the versions, the newest first."""
        return [self.versions[version] for version in sorted(self.versions, reverse=True)]

    def _version(self, version: int) -> VersionHistory:
        if version not in self.versions and len(self.versions) >= MOST:
            del self.versions[min(self.versions)]
        return self.versions.setdefault(version, VersionHistory(version))


PUSH_METRICS = {
    "seconds": "perf/update_weights_time",
    "transfer": "perf/update_weights_wire_time",
    "stall": "perf/update_weights_stall",
    "bytes": "perf/update_weights_bytes",
}
"""Figure of a push → the metric that has it, by version."""


def pushes_in(metrics: MetricHistory) -> Iterator[WeightsPushed]:
    """Yields the pushes that a run's metrics tell of, for a run without events: their figures, not the replicas."""
    found: dict[int, dict[str, float]] = {}
    for figure, tag in PUSH_METRICS.items():
        if (series := metrics.series.get(tag)) is not None:
            for version, value, at in zip(series.steps.tolist(), series.values.tolist(), series.at.tolist(), strict=True):
                found.setdefault(int(version), {})[figure] = value
                found[int(version)]["at"] = at
    for version, figures in sorted(found.items()):
        if all(map(math.isfinite, figures.values())):
            yield WeightsPushed(version=version, replicas=[], **(figures | {"bytes": int(figures.get("bytes", 0))}))


def gb_per_s(pushed: WeightsPushed) -> float | None:
    """Returns the speed of the transfer in 10⁹ bytes a second; None where nothing was sent."""
    return pushed.bytes / pushed.transfer / 1e9 if pushed.bytes and pushed.transfer > 0 else None
