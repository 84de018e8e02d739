"""What `services.buffer.simulation` predicts for a measured workload: lengths as they are drawn, the engine's speed as it was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.random import Generator

from benchmarks.end_to_end.length_distribution import LengthDistribution
from services.buffer.simulation.simulation_run import Setting, SimulationPlan
from services.buffer.simulation.workload_model import DECILES, Floats, WorkloadModel

STEPS, WARM_UP = 40, 10
DRAWN = 100_000
"""Lengths that are drawn for the deciles."""


@dataclass(frozen=True)
class MeasuredWorkload(WorkloadModel):
    """A workload whose lengths are those of ``distribution`` and whose engine draws as many tokens a second as it did.

    Args:
        speeds: (running requests, tokens a second of one engine), in order; between them the speed is interpolated.
    """

    distribution: LengthDistribution | None = field(default=None)
    speeds: tuple[tuple[float, float], ...] = field(default=())

    @property
    def _lengths(self) -> LengthDistribution:
        assert self.distribution is not None
        return self.distribution

    @property
    def capped_mean(self) -> float:
        return self._lengths.capped_mean

    @property
    def longest(self) -> float:
        return float(self._lengths.cap)

    def lengths(self, rng: Generator, prompts: Floats, samples: int) -> Floats:
        return self._lengths.draw(rng, len(prompts) * samples).reshape(len(prompts), samples).astype(np.float64)

    @cached_property
    def edges(self) -> Floats:
        drawn = self._lengths.draw(np.random.default_rng(0), DRAWN)
        return np.quantile(drawn, [part / DECILES for part in range(1, DECILES)])

    def rate(self, running: int, gpus: int) -> float:
        """Below the fewest requests that were measured, each is as fast as it was among these."""
        first, speed = self.speeds[0]
        each = running / gpus if running else 1.0
        if each <= first:
            return speed / first
        return float(np.interp(each, *zip(*self.speeds, strict=True))) / each


def predicted(
    distribution: LengthDistribution,
    speeds: Sequence[tuple[float, float]],
    batch: int,
    samples: int,
    train_s: float,
    push_s: float,
    slots: int,
    bounds: Sequence[int],
) -> dict[int, float]:
    """Returns the predicted seconds of a step at each bound, one GPU generating and one training.

    Args:
        speeds: as in `MeasuredWorkload`. train_s: seconds of training a step. push_s: that a push stops generation and training.
    """
    ordered = rising(speeds)
    best = ordered[-1][1]
    generation = batch * distribution.capped_mean / best
    model = MeasuredWorkload(
        gpus=2,
        rollout_gpus=1,
        batch=batch,
        samples=samples,
        mean_tokens=distribution.capped_mean,
        token_rate=best,
        saturation=1.0,
        concurrency=slots,
        training=train_s / generation,
        push=push_s,
        distribution=distribution,
        speeds=ordered,
    )
    plan = SimulationPlan(model, (Setting("drop"),), tuple(bounds), STEPS, WARM_UP, 0, True)
    found = plan.outcomes(plan.baseline(), lambda _setting, _bound: None)
    return {outcome.bound: round(batch / outcome.samples_per_second, 4) for outcome in found}


def rising(speeds: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns speeds in order of the running requests, without those that are slower than fewer requests were: noise."""
    ordered = sorted(speeds)
    kept = ordered[:1]
    for running, speed in ordered[1:]:
        if running > kept[-1][0] and speed >= kept[-1][1]:
            kept.append((running, speed))
    return tuple(kept)
