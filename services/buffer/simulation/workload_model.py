"""The model: how long responses are, and how fast GPUs generate and train them. docs/simulation.md tells what it leaves out.

Symbols: N GPUs; g and h, GPU-seconds of generation and of training a step; w, seconds that a weight push stops everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from shared.runtime.errors import ConfigError

Floats = NDArray[numpy.float64]

DECILES = 10

_NORMAL = NormalDist()


@dataclass(frozen=True)
class WorkloadModel:
    """See the module's docstring.

    Args:
        gpus: N. rollout_gpus: of them, those that generate; the others train. None: the split g/(g + h), rounded.
        batch: samples of a step. samples: of a group. sigma: of the lognormal response lengths. cap: longest response, in means.
        correlation: of the logarithms of two lengths of one prompt. mean_tokens: mean response before the cap. token_rate: tokens per
        second of a response that has its GPU's full attention. saturation: responses that one GPU generates at that rate; with more it
        divides the same throughput evenly. concurrency: responses that one GPU takes at once, the others wait. training: h/g. push: w,
        seconds.

    Raises ConfigError.
    """

    gpus: int = 16
    rollout_gpus: int | None = None
    batch: int = 512
    samples: int = 1
    sigma: float = 0.5
    cap: float = 6.0
    correlation: float = 0.0
    mean_tokens: float = 2000.0
    token_rate: float = 50.0
    saturation: float = 36.0
    concurrency: int = 80
    training: float = 1.0
    push: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean_tokens", "token_rate", "saturation", "training", "cap", "batch", "samples", "concurrency"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(_flag(name), value, "more than 0")
        for name in ("sigma", "push"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(_flag(name), value, "at least 0")
        if not 0 <= self.correlation <= 1:
            raise ConfigError("--correlation", self.correlation, "between 0 and 1")
        if self.gpus < 2:
            raise ConfigError("--gpus", self.gpus, "at least 2, one that generates and one that trains")
        if self.rollout_gpus is not None and not 0 < self.rollout_gpus < self.gpus:
            raise ConfigError("--rollout-gpus", self.rollout_gpus, f"between 1 and {self.gpus - 1}, for the trainer needs some too")
        if self.batch % self.samples:
            raise ConfigError("--batch", self.batch, f"whole groups: a multiple of --samples {self.samples}")

    # --- what follows from it

    @property
    def groups(self) -> int:
        """Groups of a batch."""
        return self.batch // self.samples

    @property
    def generation(self) -> float:
        """g: GPU-seconds of generation a step, at the throughput of busy GPUs."""
        return self.batch * self.capped_mean / (self.saturation * self.token_rate)

    @property
    def train(self) -> float:
        """h: GPU-seconds of training a step."""
        return self.training * self.generation

    @property
    def split(self) -> int:
        """GPUs that generate."""
        if self.rollout_gpus is not None:
            return self.rollout_gpus
        return min(max(1, round(self.gpus / (1 + self.training))), self.gpus - 1)

    @property
    def train_seconds(self) -> float:
        """Seconds that the trainer's GPUs take for a step."""
        return self.train / (self.gpus - self.split)

    @property
    def capped_mean(self) -> float:
        """Tokens of the mean response, the cap applied."""
        if self.sigma == 0:
            return min(self.mean_tokens, self.longest)
        above = (math.log(self.cap) + self.sigma**2 / 2) / self.sigma  # the cap, in standard deviations of the length's logarithm
        return self.mean_tokens * _NORMAL.cdf(above - self.sigma) + self.longest * (1 - _NORMAL.cdf(above))

    @property
    def longest(self) -> float:
        """Tokens of the longest response."""
        return self.cap * self.mean_tokens

    def prompts(self, rng: Generator, count: int) -> Floats:
        """What the lengths of a prompt's responses have in common, standard normal. float64 [count]."""
        return rng.normal(size=count)

    def lengths(self, rng: Generator, prompts: Floats, samples: int) -> Floats:
        """Response lengths in tokens. float64 [len(prompts), samples]."""
        own = rng.normal(size=(len(prompts), samples))
        logarithm = math.sqrt(self.correlation) * prompts[:, None] + math.sqrt(1 - self.correlation) * own
        drawn: Floats = numpy.minimum(self.mean_tokens * numpy.exp(self.sigma * logarithm - self.sigma**2 / 2), self.longest)
        return drawn

    def batches(self, rng: Generator, count: int) -> Floats:
        """Response lengths of whole batches in tokens. float64 [count, batch]."""
        return self.lengths(rng, self.prompts(rng, count * self.groups), self.samples).reshape(count, self.batch)

    @cached_property
    def edges(self) -> Floats:
        """Lengths in tokens that divide the responses into `DECILES` parts of equal number. float64 [9]."""
        places = [_NORMAL.inv_cdf(part / DECILES) for part in range(1, DECILES)]
        return self.mean_tokens * numpy.exp(self.sigma * numpy.array(places) - self.sigma**2 / 2)

    def rate(self, running: int, gpus: int) -> float:
        """Tokens per second of each of ``running`` responses on ``gpus``."""
        return self.token_rate * min(1.0, self.saturation * gpus / running) if running else self.token_rate


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
