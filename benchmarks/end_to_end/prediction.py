"""What `myxo simulate` predicts for a measured workload: lengths as they are drawn, the engine's speed as it was measured.

An engine is the slower the more requests begin one by one: each prefill stops all that run. So its decoding is measured apart, with
requests that all begin at once, and what it is slower where each one's end is followed by a new one is put down to the prefills.

A decoding step costs something by itself, something for each request, and something for each token of their contexts, which attention
reads. The simulation knows how many requests run, so each of them has the mean context here.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.random import Generator

from benchmarks.end_to_end.length_distribution import DRAWN, LengthDistribution
from services.buffer.policy import Order
from services.buffer.simulate_command import Setting, Simulated, SimulationPlan
from services.buffer.simulated_world import DECILES, Floats, WorkloadModel
from services.rollout.request_slots import lot

STEPS, WARM_UP = 40, 10


@dataclass(frozen=True)
class MeasuredWorkload(WorkloadModel):
    """A workload whose lengths are those of ``distribution`` and whose engine draws as many tokens a second as it did.

    Args:
        decode: seconds of a decoding step, and by how much more each request that runs prolongs it.
    """

    distribution: LengthDistribution | None = field(default=None)
    decode: tuple[float, float] = field(default=(1.0, 0.0))

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

    def rate(self, running: int, gpus: float) -> float:
        base, each = self.decode
        return 1 / (base + each * max(1.0, running / gpus))


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine's speed. ``decode``: as for `MeasuredWorkload`; ``prefill``: seconds that it stops for requests that begin together."""

    decode: tuple[float, float]
    prefill: float

    @classmethod
    def of(cls, decode: tuple[float, float], speeds: Sequence[tuple[float, float]], mean_tokens: float) -> "MeasuredEngine":
        """Returns what was measured.

        Args:
            speeds: (running requests, tokens a second) where each request that ends is followed by another. mean_tokens: of one.
        """
        return cls(decode, max(0.0, statistics.median(_prefill(decode, running, speed / mean_tokens, speed) for running, speed in speeds)))


def _prefill(decode: tuple[float, float], running: float, arrivals: float, speed: float) -> float:
    """Returns the seconds of a prefill, of which there is one in each step's time into which one of the ``arrivals`` a second falls."""
    step = running / speed
    return (step - decode[0] - decode[1] * running) / -math.expm1(-arrivals * step)


def decoding(lengths: Sequence[int], ends: Sequence[float], prompt_tokens: int) -> tuple[float, float, float]:
    """Returns the seconds of a decoding step by itself, for each request, and for each token of its context.

    By least squares over the steps between two ends, with as many of the three as are not negative.

    Args:
        lengths: tokens of requests that began at the same time. ends: when each ended, seconds. prompt_tokens: of each.
    """
    order = np.lexsort((np.asarray(ends), np.asarray(lengths)))
    steps, times = np.asarray(lengths, np.float64)[order], np.maximum.accumulate(np.asarray(ends)[order])
    taken, seconds, running = np.diff(steps), np.diff(times), np.arange(len(steps) - 1, 0, -1)
    context = prompt_tokens + (steps[1:] + steps[:-1]) / 2
    parts = np.stack([taken, taken * running, taken * running * context], axis=1)
    for count in (3, 2, 1):  # noise: too few requests to tell them apart
        found = np.linalg.lstsq(parts[:, :count], seconds, rcond=None)[0]
        if count == 1 or (found >= 0).all():
            break
    base, each, token = (*map(float, found), 0.0, 0.0)[:3]
    return base, each, token


def at_context(decode: Sequence[float], context: float) -> tuple[float, float]:
    """Returns the seconds of a decoding step by itself and for each request, whose context has so many tokens.

    Args:
        decode: of `decoding`; without a third number, contexts cost nothing.
    """
    base, each, *token = decode
    return base, each + sum(token) * context


def predicted(
    distribution: LengthDistribution,
    engine: MeasuredEngine,
    batch: int,
    samples: int,
    train_s: float,
    push_s: float,
    slots: Mapping[int, int],
    order: Order = "completion",
    engines: int = 1,
    lend: float = 0.0,
    policy: Simulated = "drop",
) -> dict[int, float]:
    """Returns the predicted seconds of a step at each bound, one GPU training and the others generating.

    Args:
        train_s: seconds of training a step. push_s: that a push stops generation and training. slots: of an engine, by the bound.
        order: of the batches. engines: of one GPU each. lend: as `WorkloadModel` has it. policy: what becomes of stale groups.
    """
    found = {}
    for bound, places in slots.items():
        model = MeasuredWorkload(
            gpus=1 + engines,
            rollout_gpus=engines,
            batch=batch,
            samples=samples,
            mean_tokens=distribution.capped_mean,
            token_rate=1.0,
            saturation=1.0,
            concurrency=places,
            lot=lot(places),
            prefill=engine.prefill,
            push=push_s,
            distribution=distribution,
            decode=engine.decode,
            lend=lend,
        )
        model = replace(model, training=train_s / model.generation)
        plan = SimulationPlan(model, (Setting(policy, order),), (bound,), STEPS, WARM_UP, 0, True)
        found[bound] = round(batch / next(iter(plan.outcomes(plan.baseline()))).samples_per_second, 4)
    return found
