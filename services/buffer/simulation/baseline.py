"""The synchronous run that speed-ups are over: all N GPUs generate a batch, then all of them train it.

Symbols as in `services.buffer.simulation.workload_model`; M, seconds that all N GPUs take to generate a batch, its longest responses last.
A synchronous step takes T_sync = M + h/N. However the work is spread, a step takes at least (g + h)/N + w, so nothing is faster than the
synchronous run by more than the limit T_sync/((g + h)/N + w). U_sync = (g + h)/(N · T_sync) is the part of its GPUs' time that the
synchronous run uses; where w = 0, the limit is 1/U_sync.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.random import Generator

from services.buffer.simulation.modelled_engine import ModelledEngine
from services.buffer.simulation.workload_model import Floats, WorkloadModel

MAKESPANS = 10_000
"""Batches that M is the mean of; of those played event by event, a fiftieth."""


@dataclass(frozen=True)
class Baseline:
    """See the module's docstring. ``makespan``: M, ``step``: T_sync, in seconds. ``utilisation``: U_sync."""

    makespan: float
    step: float
    utilisation: float
    limit: float

    @classmethod
    def of(cls, model: WorkloadModel, rng: Generator) -> Baseline:
        makespan, ideal = mean_makespan(model, rng), (model.generation + model.train) / model.gpus
        step = makespan + model.train / model.gpus
        return cls(makespan, step, ideal / step, step / (ideal + model.push))


def mean_makespan(model: WorkloadModel, rng: Generator) -> float:
    """M, in seconds."""
    if model.batch > model.concurrency * model.gpus:
        batches = model.batches(rng, MAKESPANS // 50).tolist()
        return sum(ModelledEngine.alone(model, model.gpus, lengths) for lengths in batches) / len(batches)
    # all responses run at once, so the k-th shortest ends a known time after the one before it
    rates = numpy.array([model.rate(running, model.gpus) for running in range(model.batch, 0, -1)])
    rows, seconds = max(1, 1_000_000 // model.batch), 0.0
    for first in range(0, MAKESPANS, rows):
        lengths = numpy.sort(model.batches(rng, min(rows, MAKESPANS - first)), axis=1)
        seconds += float((_pieces(lengths) / rates).sum())
    return seconds / MAKESPANS


def _pieces(lengths: Floats) -> Floats:
    """Tokens between one end and the next, in each row."""
    pieces: Floats = numpy.diff(lengths, axis=1, prepend=0.0)
    return pieces
