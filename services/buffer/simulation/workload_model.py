"""The model of response lengths and of the speed at which GPUs generate and train them. docs/simulation.md lists what it leaves out.

Symbols: N GPUs; g and h, GPU-seconds of generation and of training a step; w, seconds that a weight push stops everything.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from shared.runtime.errors import ConfigError

Floats = NDArray[numpy.float64]

DECILES = 10

_NORMAL = NormalDist()


def _option(default: float | None, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class WorkloadModel:
    """The lengths of responses and the speed of GPUs; each field is an option of ``myxo simulate``. Raises ConfigError."""

    gpus: int = _option(16, "GPUs of rollout and trainer together")
    rollout_gpus: int | None = _option(None, "of them, those that generate (default: in the proportion of the work)")
    batch: int = _option(512, "samples a step")
    samples: int = _option(1, "samples a group")
    sigma: float = _option(0.5, "of the lognormal response lengths")
    cap: float = _option(6.0, "longest response, in means")
    correlation: float = _option(0.0, "of the logarithms of two lengths of one prompt")
    mean_tokens: float = _option(2000.0, "mean response")
    token_rate: float = _option(50.0, "tokens per second of a response on a GPU that is not saturated")
    saturation: float = _option(36.0, "responses that saturate a GPU; more of them share its throughput")
    concurrency: int = _option(80, "responses that a GPU takes at once; more of them wait")
    lot: int = _option(1, "places on a GPU that are filled together once all were taken, not one by one")
    prefill: float = _option(0.0, "seconds for which all responses stand still for those that begin together")
    training: float = _option(1.0, "GPU time of training over that of generation, h/g")
    push: float = _option(0.0, "seconds that a weight push stops everything")

    def __post_init__(self) -> None:
        for name in ("mean_tokens", "token_rate", "saturation", "training", "cap", "batch", "samples", "concurrency", "lot"):
            self._require(name, 0 < getattr(self, name) < math.inf, "more than 0")
        for name in ("sigma", "push", "prefill"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        self._require("correlation", 0 <= self.correlation <= 1, "between 0 and 1")
        self._require("gpus", self.gpus >= 2, "at least 2, one that generates and one that trains")
        split = f"between 1 and {self.gpus - 1}, for the trainer needs some too"
        self._require("rollout_gpus", self.rollout_gpus is None or 0 < self.rollout_gpus < self.gpus, split)
        self._require("batch", self.batch % self.samples == 0, f"whole groups: a multiple of --samples {self.samples}")

    def _require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ConfigError("--" + name.replace("_", "-"), getattr(self, name), expected)

    @property
    def groups(self) -> int:
        """Returns the number of groups of a batch."""
        return self.batch // self.samples

    @property
    def generation(self) -> float:
        """Returns g: GPU-seconds of generation a step, at the throughput of busy GPUs."""
        return self.batch * self.capped_mean / (self.saturation * self.token_rate)

    @property
    def train(self) -> float:
        """Returns h: GPU-seconds of training a step."""
        return self.training * self.generation

    @property
    def split(self) -> int:
        """Returns the number of GPUs that generate: unless given, the part g/(g + h) of all, rounded."""
        if self.rollout_gpus is not None:
            return self.rollout_gpus
        return min(max(1, round(self.gpus / (1 + self.training))), self.gpus - 1)

    @property
    def train_seconds(self) -> float:
        """Returns the seconds that the trainer's GPUs take for a step."""
        return self.train / (self.gpus - self.split)

    @property
    def capped_mean(self) -> float:
        """Returns the tokens of the mean response, the cap applied."""
        if self.sigma == 0:
            return min(self.mean_tokens, self.longest)
        above = (math.log(self.cap) + self.sigma**2 / 2) / self.sigma  # the cap, in standard deviations of the length's logarithm
        return self.mean_tokens * _NORMAL.cdf(above - self.sigma) + self.longest * (1 - _NORMAL.cdf(above))

    @property
    def longest(self) -> float:
        """Returns the tokens of the longest response."""
        return self.cap * self.mean_tokens

    def prompts(self, rng: Generator, count: int) -> Floats:
        """Draws each prompt's share in the lengths of its responses, standard normal: float64 [count]."""
        return rng.normal(size=count)

    def lengths(self, rng: Generator, prompts: Floats, samples: int) -> Floats:
        """Draws response lengths in tokens: float64 [len(prompts), samples]."""
        own = rng.normal(size=(len(prompts), samples))
        logarithm = math.sqrt(self.correlation) * prompts[:, None] + math.sqrt(1 - self.correlation) * own
        drawn: Floats = numpy.minimum(self.mean_tokens * numpy.exp(self.sigma * logarithm - self.sigma**2 / 2), self.longest)
        return drawn

    def batches(self, rng: Generator, count: int) -> Floats:
        """Draws response lengths of whole batches in tokens: float64 [count, batch]."""
        return self.lengths(rng, self.prompts(rng, count * self.groups), self.samples).reshape(count, self.batch)

    @cached_property
    def edges(self) -> Floats:
        """Returns the lengths in tokens that divide the responses into `DECILES` parts of equal number: float64 [9]."""
        quantiles = [_NORMAL.inv_cdf(part / DECILES) for part in range(1, DECILES)]
        return self.mean_tokens * numpy.exp(self.sigma * numpy.array(quantiles) - self.sigma**2 / 2)

    def rate(self, running: int, gpus: int) -> float:
        """Returns the tokens per second of each of ``running`` responses on ``gpus``."""
        return self.token_rate * min(1.0, self.saturation * gpus / running) if running else self.token_rate
