"""How replicas join a run while it trains: when each serves, from where it has its weights, the run's figures before and after. Pure."""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.end_to_end.run_record import RunRecord
from shared.schema.service_messages import ServiceEvent, ServiceStatus

PUSH = "push"
"""The source of a replica's first weights where it has not caught up: the trainer."""

_CAUGHT_UP = re.compile(r"version (\d+) from (.+) in ([\d.]+) s\Z")


def join_after(steps: int, warm_up: int) -> int:
    """Returns after how many of a run's steps replicas join: its warm-up and half of the others, two of them at least."""
    return warm_up + max(2, (steps - warm_up) // 2)


@dataclass
class JoinedReplica:
    """One replica that joins. ``started``: its process; ``served``: when it was first seen to serve; seconds since the epoch.

    ``source``: a replica, ``disk`` or `PUSH`, and the seconds that its weights took from there: None of a push.
    """

    started: float
    served: float | None = None
    version: int = -1
    source: str = PUSH
    weights_seconds: float | None = None


@dataclass
class ScaleRecord:
    """The record of a run that is scaled. ``replicas``: those that join, by instance."""

    replicas: dict[str, JoinedReplica] = field(default_factory=dict)

    def begun(self, instance: str, at: float) -> None:
        """Notes that the process of a replica was started."""
        self.replicas[instance] = JoinedReplica(at)

    def seen(self, statuses: Iterable[ServiceStatus], at: float) -> None:
        """Notes which replicas serve a version of the weights by now."""
        for status in statuses:
            replica = self.replicas.get(status.instance)
            if replica is not None and replica.served is None and status.state in ("ready", "updating") and status.version >= 0:
                replica.served, replica.version = at, status.version

    def caught_up(self, event: ServiceEvent) -> None:
        """Notes from where a replica has its first weights."""
        replica, told = self.replicas.get(event.instance), _CAUGHT_UP.match(event.detail)
        if replica is not None and told is not None and replica.weights_seconds is None:
            replica.source, replica.weights_seconds = told[2], float(told[3])

    @property
    def serving(self) -> float | None:
        """Returns since when all of them serve; None while some do not, or none has been started."""
        times = [replica.served for replica in self.replicas.values()]
        return None if not times or None in times else max(time for time in times if time is not None)

    def settled(self, record: RunRecord, bound: int) -> int | None:
        """Returns the index of the step from whose end on the run is measured again; None while they join.

        That is ``bound`` + 1 steps after the first one since all serve: what is trained until then was admitted before.
        """
        if (serving := self.serving) is None:
            return None
        return sum(step.ended < serving for step in record.steps) + bound + 1

    def is_over(self, record: RunRecord, bound: int, steps: int) -> bool:
        """Returns whether so many steps have been made since the run has settled."""
        settled = self.settled(record, bound)
        return settled is not None and len(record.steps) > settled + max(1, steps)

    def before(self, record: RunRecord) -> int:
        """Returns the number of steps that had ended when the first of them was started; all, where none was."""
        began = min((replica.started for replica in self.replicas.values()), default=float("inf"))
        return sum(step.ended <= began for step in record.steps)

    def figures(self, record: RunRecord, bound: int, warm_up: int, engines: int, gpus: int) -> dict[str, Any]:
        """Returns what became of the scaling.

        Args:
            engines, gpus: of the run once all have joined.
        """
        first, settled = self.before(record), self.settled(record, bound)
        ends = [step.ended for step in record.steps]
        own, joining = gaps(ends[warm_up:first]), gaps(ends[max(0, first - 1) : None if settled is None else settled + 1])
        after = {"problem": "not all of the replicas came to serve"} if settled is None else record.figures(settled, gpus)
        return {
            "engines": engines,
            "gpus": gpus,
            "after_steps": first,
            "settled_after_steps": settled,
            "joiners": [_told(instance, replica) for instance, replica in self.replicas.items()],
            "longest_step_before": max(own, default=None),
            "joining": {
                "steps": len(joining),
                "step_seconds": round(statistics.median(joining), 4) if joining else None,
                "longest_step": max(joining, default=None),
            },
            "samples_before": record.samples_by_replica(warm_up + 1, first),
            "samples_after": {} if settled is None else record.samples_by_replica(settled + 1),
            "after": after,
        }


def gaps(ends: list[float]) -> list[float]:
    """Returns the seconds between the ends of successive steps."""
    return [round(after - before, 4) for before, after in pairwise(ends)]


def _told(instance: str, replica: JoinedReplica) -> dict[str, Any]:
    seconds = None if replica.served is None else round(replica.served - replica.started, 2)
    served = {} if seconds is None else {"version": replica.version, "weights_from": replica.source}
    return {"instance": instance, "serves_after_s": seconds, **served, "weights_seconds": replica.weights_seconds}
