"""What the measured samples hold: values that differ from sample to sample, and that both ends know without telling each other.

Every array of a sample is a window into a pool of random numbers; where it begins follows from the group's number and the sample's place
in it. So the producer has its arrays as an engine's client would, at no cost of their own, and the consumer can compare every value.
"""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.schema.ledger import group_number
from shared.schema.sample import Sample

PROMPT = 256
"""Tokens of a prompt; a sample of L tokens has a response of L - PROMPT."""

SAMPLES = 8
"""Of a group."""

POOL = 1 << 16
_STRIDE = 7919  # prime: neighbours begin far from each other


def array_bytes(length: int) -> int:
    """Bytes of a sample's arrays: tokens int32, and of the response log-probs float32 and mask uint8."""
    return PROMPT * 4 + (length - PROMPT) * 9


class Pool:
    """Responses of ``length`` - PROMPT tokens."""

    def __init__(self, length: int) -> None:
        self._response = length - PROMPT
        random = np.random.default_rng(20261121)
        self._tokens = random.integers(0, 150_000, POOL + length, dtype=np.int32)
        self._log_probs = -random.random(POOL + length, dtype=np.float32)
        self._mask = np.ones(POOL + length, dtype=np.uint8)
        self._mask[::97] = 0
        self._written = [array.tobytes() for array in (self._tokens, self._log_probs, self._mask)]

    def sample(self, group: str, index: int, prompt: NDArray[np.int32], version: int, text: str, label: str | None) -> Sample:
        """The sample at place ``index`` of a group, generated under ``version``."""
        span = self._span(group, index)
        return Sample(
            group=group,
            index=index,
            prompt=prompt,
            response=self._tokens[span],
            log_probs=self._log_probs[span],
            mask=self._mask[span],
            segments=[(0, self._response, version)],
            finish="length",
            text="",
            prompt_text=text,
            label=label,
        )

    def check(self, group: str, index: int, sample: Sample) -> None:
        """Compares every bit of the response. Raises AssertionError."""
        span = self._span(group, index)
        same = (sample.group, sample.index, len(sample.prompt)) == (group, index, PROMPT)
        assert sample.log_probs is not None
        arrays: list[NDArray[Any]] = [sample.response, sample.log_probs, sample.mask]
        for read, written, size in zip(arrays, self._written, (4, 4, 1), strict=True):
            same = same and read.itemsize == size and read.tobytes() == written[span.start * size : span.stop * size]
        if not same:
            raise AssertionError(f"sample {index} of {group} is not what was written")

    def _span(self, group: str, index: int) -> slice:
        begin = (group_number(group) * SAMPLES + index) * _STRIDE % POOL
        return slice(begin, begin + self._response)


class Prompts:
    """The prompt file's texts: PROMPT characters each, of an alphabet whose tokenizer has a token a character."""

    ALPHABET = "abcdefghijklmnopqrstuvwxyz"
    COUNT = 256

    @cached_property
    def texts(self) -> list[str]:
        random = np.random.default_rng(1)
        rows = random.integers(0, len(self.ALPHABET), (self.COUNT, PROMPT))
        return ["".join(self.ALPHABET[column] for column in row) for row in rows]

    @cached_property
    def tokens(self) -> dict[str, bytes]:
        """The tokens of each text, int32, for the consumer's comparison."""
        return {text: np.array([self.ALPHABET.index(letter) for letter in text], dtype=np.int32).tobytes() for text in self.texts}
