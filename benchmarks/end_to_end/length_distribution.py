"""Response lengths that are drawn from a distribution: ``geometric:MEAN``, ``lognormal:MEAN:SIGMA``, or ``file:PATH``, recorded ones.

Geometric lengths need nothing but sampling: where a share 1/MEAN of the vocabulary are stop tokens, a model with random weights draws one
after MEAN tokens in the mean, at every token with the same probability. The others are told to a generate function beside the prompt
(`benchmarks.end_to_end.drawn_length`). All are cut at a cap.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

DRAWN = 100_000
"""Lengths that are drawn for what has no formula here."""


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths in tokens. ``mean``: before the cap; ``sigma``: of a lognormal one's logarithm; ``recorded``: those that are drawn from."""

    spec: str
    cap: int
    mean: float
    sigma: float = 0.0
    recorded: tuple[int, ...] = ()

    @classmethod
    def parse(cls, spec: str, cap: int) -> "LengthDistribution":
        """Returns what a command line names. Raises ValueError."""
        kind, _, rest = spec.partition(":")
        if kind == "geometric":
            return cls(spec, cap, _positive(rest))
        if kind == "lognormal":
            mean, _, sigma = rest.partition(":")
            return cls(spec, cap, _positive(mean), _positive(sigma or "1"))
        if kind == "file":
            recorded = tuple(int(length) for length in json.loads(Path(rest).read_text()))
            if not recorded or min(recorded) < 1:
                raise ValueError(f"{rest}: expected a JSON list of lengths, at least one token each")
            return cls(spec, cap, float(np.mean(recorded)), recorded=recorded)
        raise ValueError(f"{spec}: expected geometric:MEAN, lognormal:MEAN:SIGMA or file:PATH")

    @property
    def by_stop_tokens(self) -> bool:
        """Returns whether stop tokens make them."""
        return not self.sigma and not self.recorded

    def stop_tokens(self, vocabulary: int, first: int) -> list[int]:
        """Returns the ids that end a response, as many as make its mean, spread over the ids from ``first`` on."""
        count = max(1, round(vocabulary / self.mean))
        return np.linspace(first, vocabulary - 1, count).astype(int).tolist()

    def draw(self, rng: Generator, count: int) -> Lengths:
        """Draws lengths: int64 [count]."""
        if self.recorded:
            drawn = rng.choice(np.array(self.recorded), count)
        elif self.sigma:
            drawn = np.rint(self.mean * np.exp(self.sigma * rng.normal(size=count) - self.sigma**2 / 2))
        else:
            drawn = rng.geometric(1 / self.mean, count)
        return np.clip(drawn, 1, self.cap).astype(np.int64)

    @property
    def capped_mean(self) -> float:
        """Returns the mean of what is drawn, the cap applied."""
        if self.by_stop_tokens:
            return self.mean * (1 - (1 - 1 / self.mean) ** self.cap)
        if self.recorded:
            return float(np.minimum(self.recorded, self.cap).mean())
        above = (math.log(self.cap / self.mean) + self.sigma**2 / 2) / self.sigma
        return self.mean * _below(above - self.sigma) + self.cap * (1 - _below(above))

    def mean_context(self, prompt_tokens: int) -> float:
        """Returns how many tokens the context of a request that runs has in the mean, over all of its decoding steps."""
        drawn = self.draw(np.random.default_rng(0), DRAWN).astype(np.float64)
        return prompt_tokens + float((drawn**2).mean() / (2 * drawn.mean()))


def _below(deviations: float) -> float:
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def _positive(text: str) -> float:
    if not (value := float(text)) > 0 or not math.isfinite(value):
        raise ValueError(f"{text}: expected a positive number")
    return value


def rows(lengths: LengthDistribution, prompts: int, samples: int, prompt_tokens: int, vocabulary: int, seed: int) -> Iterable[str]:
    """Yields the lines of a file of prompts: words of the vocabulary, and in metadata.lengths the tokens of each of a prompt's samples."""
    rng = np.random.default_rng(seed)
    for _ in range(prompts):
        words = " ".join(f"w{token}" for token in rng.integers(0, vocabulary, prompt_tokens))
        metadata = {} if lengths.by_stop_tokens else {"lengths": lengths.draw(rng, samples).tolist()}
        yield json.dumps({"prompt": words, "label": "0", "metadata": metadata}) + "\n"
