"""What a run tells while it continues: its steps, its groups' ends and its replicas' gauges, and the figures that come of them."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsDropped, GroupsScored
from shared.schema.messages import SampleMeta, Trained
from shared.schema.service_messages import MetricsWritten
from shared.view.flow_view import PARTS

GAUGES = ("running_requests", "queued_requests", "kv_usage", "request_slots", "used_slots", "running_groups")

ANEW = "generated anew"

ALL_ANEW = 1 << 30
"""A version that no token has reached: of a group without a partial attempt nothing is kept."""


@dataclass
class RunRecord:
    """The record of one run. ``metrics``: of each step; ``gauges``: of all replicas together, by when they were read; ``origins``: of a
    group, the replica that generated it and how many samples it has; ``batches``: the groups of each step; ``samples``: of groups that have
    come back; ``lost``: tokens of such groups that will not be trained, with when and why."""

    steps: list[Trained] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, list[SampleMeta]] = field(default_factory=dict)
    lost: list[tuple[float, str, int]] = field(default_factory=list)
    gauges: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    origins: dict[str, tuple[str, int]] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)

    def written(self, message: MetricsWritten) -> None:
        """Notes metrics of a step; they come in several messages."""
        self.metrics.setdefault(message.step, {}).update(message.values)

    def scored(self, record: GroupsScored) -> None:
        """Notes the tokens of groups that have come back."""
        for group in record.groups:
            self.samples[group.group] = group.samples
            self.origins[group.group] = (group.replica, len(group.samples))

    def formed(self, record: BatchFormed) -> None:
        """Notes which groups a step trains."""
        self.batches[record.step] = record.groups

    def ended(self, record: GroupsDropped) -> None:
        """Notes groups that were dropped; those that were stopped while they were generated have no tokens here."""
        tokens = sum(sample.tokens for group in record.groups for sample in self.samples.pop(group, ()))
        self.lost.append((record.at, record.reason, tokens))

    def requeued(self, record: GroupRequeued) -> None:
        """Notes a group that is generated anew, but for the samples that its next attempt keeps."""
        kept = record.renew_below if record.partial is not None else ALL_ANEW
        tokens = sum(sample.tokens for sample in self.samples.pop(record.group, ()) if sample.newest < kept)
        self.lost.append((record.at, ANEW, tokens))

    def window(self, warm_up: int, end: int | None = None) -> tuple[float, float] | None:
        """Returns when the steps after the warm-up began and ended, seconds since the epoch; None where there are under two.

        Args:
            end: the step before which it is over; None: it is that of all steps.
        """
        steps = self.steps[:end]
        return (steps[warm_up].ended, steps[-1].ended) if len(steps) >= warm_up + 2 else None

    def samples_by_replica(self, begin: int, end: int | None = None) -> dict[str, int]:
        """Returns how many samples of the steps from ``begin`` to before ``end`` each replica generated, as far as it was heard of."""
        groups = (group for step in self.steps[begin:end] for group in self.batches.get(step.step, ()))
        found: Counter[str] = Counter()
        for replica, samples in (self.origins[group] for group in groups if group in self.origins):
            found[replica] += samples
        return dict(sorted(found.items()))

    def figures(self, warm_up: int, gpus: int, last: int | None = None) -> dict[str, Any]:
        """Returns the figures of the steps after the warm-up. Seconds, tokens, and tokens a second. ``last``: as ``end`` of `window`."""
        if (window := self.window(warm_up, last)) is None:
            return {"steps": len(self.steps[:last]), "problem": f"no two steps after the {warm_up} of the warm-up"}
        begin, end = window
        measured, seconds = self.steps[warm_up + 1 : last], end - begin
        ends = [begin, *(step.ended for step in measured)]
        metrics = [found for step in measured if (found := self.metrics.get(step.step))]
        step_tokens = mean(metrics, "rollout/response_tokens") or 0.0
        generated = self._rise("generated_tokens", begin, end)
        lost: Counter[str] = Counter()
        for at, reason, tokens in self.lost:
            lost[reason] += tokens if begin < at <= end else 0
        anew = lost.pop(ANEW, 0)
        return {
            "steps": len(measured),
            "step_seconds": round(seconds / len(measured), 4),
            "step_seconds_median": round(statistics.median(after - before for before, after in pairwise(ends)), 4),
            "train_seconds": median(metrics, "perf/step_time"),
            "optimizer_seconds": median(metrics, "perf/actor_train_time"),
            "wait_seconds": median(metrics, "perf/train_wait_time"),
            "parts": {part: mean(metrics, f"perf/train_{part}_time") for part in PARTS},
            "push_begin_seconds": median(metrics, "perf/train_push_time"),
            "push_seconds": median(metrics, "perf/update_weights_time"),
            "push_stall_seconds": median(metrics, "perf/update_weights_stall"),
            "trained_tokens_per_s": round(step_tokens * len(measured) / seconds, 1),
            "generated_tokens_per_s": round(generated / seconds, 1),
            "trained_tokens_per_s_per_gpu": round(step_tokens * len(measured) / seconds / gpus, 1),
            "step_response_tokens": round(step_tokens, 1),
            "trainer_busy": round((mean(metrics, "perf/step_time") or 0.0) * len(measured) / seconds, 4),
            "staleness_mean": mean(metrics, "rollout/staleness_mean"),
            "staleness_max": max((_of(one, "rollout/staleness_max") for one in metrics), default=0.0),
            "masked_tokens": sum(_of(one, "rollout/masked_tokens") for one in metrics),
            "dropped_tokens": lost.total(),
            "dropped_by_reason": {reason: tokens for reason, tokens in sorted(lost.items()) if tokens},
            "anew_tokens": anew,
            "logprob_diff": median(metrics, "train/train_rollout_logprob_abs_diff", digits=9),
            **{name: self._mean(name, begin, end) for name in GAUGES},
        }

    def _mean(self, name: str, begin: float, end: float) -> float | None:
        found = [gauges[name] for at, gauges in self.gauges if begin <= at <= end and name in gauges]
        return round(statistics.fmean(found), 3) if found else None

    def _rise(self, name: str, begin: float, end: float) -> float:
        """By how much a counter rose in that time, at its mean rate from the reading before it to the one after it."""
        found = [(at, gauges[name]) for at, gauges in self.gauges if name in gauges]
        first = max((one for one in found if one[0] <= begin), default=found[0] if found else None)
        last = min((one for one in found if one[0] >= end), default=found[-1] if found else None)
        if first is None or last is None or last[0] <= first[0]:
            return 0.0
        return (last[1] - first[1]) * (end - begin) / (last[0] - first[0])


def summed(gauges: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of several replicas' gauges; of shares the largest."""
    total: dict[str, float] = {}
    for one in gauges:
        for name, value in one.items():
            total[name] = max(total.get(name, 0.0), value) if name == "kv_usage" else total.get(name, 0.0) + value
    return total


def median(metrics: Sequence[Mapping[str, float]], name: str, digits: int = 5) -> float | None:
    """Returns the median of a metric over those that have it, with so many digits after the point."""
    found = [one[name] for one in metrics if name in one]
    return round(statistics.median(found), digits) if found else None


def mean(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Returns the mean of a metric over those that have it."""
    found = [one[name] for one in metrics if name in one]
    return round(statistics.fmean(found), 4) if found else None


def _of(metrics: Mapping[str, float], name: str) -> float:
    return metrics.get(name, 0.0)
