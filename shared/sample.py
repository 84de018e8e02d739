"""Samples as they lie in the store: tokens, log-probs, mask and version segments, kept aligned in one place.

A group's samples are encoded into one or more blobs (MessagePack, arrays as raw bytes); a reference lists the keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shared import codec
from shared.errors import BadMessage
from shared.messages import SampleMeta

SCHEMA = 1
"""Version of the payload's schema."""

_KINDS = {"prompt": "iu", "response": "iu", "log_probs": "f", "mask": "biu"}
"""numpy's kinds that a sample's arrays may be of; they travel as int32, int32, float32, uint8."""


@dataclass
class Sample:
    """One trajectory.

    prompt: int32 [P]; response: int32 [R]; log_probs: float32 [R], the engine's for exactly those tokens; mask: uint8 [R], 1 where
    the token is trained; segments: (start, end, version) spans that tile [0, R) in order; text: the decoded response.
    """

    group: str
    index: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    segments: list[tuple[int, int, int]]
    finish: Literal["stop", "length", "abort"]
    text: str
    prompt_text: Any = ""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises BadMessage, naming field and numbers, where the parts do not fit together."""
        where = f"sample {self.group}/{self.index}"
        for name, kinds in _KINDS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
                raise BadMessage(f"{where}: {name} is not a one-dimensional array of {'floats' if kinds == 'f' else 'integers'}")
        length = len(self.response)
        for name, array in (("log_probs", self.log_probs), ("mask", self.mask)):
            if len(array) != length:
                raise BadMessage(f"{where}: {name} has {len(array)} entries for {length} response tokens")
        if length and not np.isfinite(self.log_probs[self.mask.astype(bool)]).all():
            raise BadMessage(f"{where}: log_probs holds values that are not finite")
        at = 0
        for start, end, version in self.segments:
            if start != at or end <= start or version < 0:
                raise BadMessage(f"{where}: segments {self.segments} do not tile the {length} response tokens")
            at = end
        if at != length:
            raise BadMessage(f"{where}: segments end at {at}, the response at {length}")

    def versions(self) -> NDArray[np.int32]:
        """Weight version of each response token: int32 [R]."""
        out = np.empty(len(self.response), dtype=np.int32)
        for start, end, version in self.segments:
            out[start:end] = version
        return out

    def meta(self) -> SampleMeta:
        """What travels in references: length and the versions of its oldest and newest trained token."""
        trained = self.versions()[self.mask.astype(bool)]
        every = trained if len(trained) else self.versions()
        oldest, newest = (int(every.min()), int(every.max())) if len(every) else (0, 0)
        return SampleMeta(tokens=len(self.response), oldest=oldest, newest=newest, finish=self.finish)


def encode(samples: Iterable[Sample], blob_bytes: int) -> list[bytes]:
    """Blobs of about ``blob_bytes`` each, in sample order. Raises BadMessage for a sample that does not fit together."""
    blobs: list[bytes] = []
    batch: list[dict[str, Any]] = []
    size = 0
    for sample in samples:
        sample.check()
        batch.append(_to_map(sample))
        size += len(sample.prompt) * 4 + len(sample.response) * 9 + len(sample.text) + 200
        if size >= blob_bytes:
            blobs.append(codec.pack({"schema": SCHEMA, "samples": batch}))
            batch, size = [], 0
    if batch or not blobs:
        blobs.append(codec.pack({"schema": SCHEMA, "samples": batch}))
    return blobs


def decode(blobs: Iterable[bytes]) -> list[Sample]:
    """Reads `encode`'s blobs back; arrays are read-only views of them. Raises BadMessage."""
    samples = []
    for blob in blobs:
        content = codec.unpack(blob)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise BadMessage(f"payload of schema {schema!r}; this side reads {SCHEMA}")
        try:
            read = [Sample(**{**entry, "segments": [_segment(*segment) for segment in entry["segments"]]}) for entry in content["samples"]]
        except (TypeError, KeyError) as error:
            raise BadMessage(f"payload sample with unexpected fields: {error}") from error
        for sample in read:
            sample.check()
        samples += read
    return samples


def _segment(start: int, end: int, version: int) -> tuple[int, int, int]:
    if not all(isinstance(value, int) for value in (start, end, version)):
        raise TypeError(f"segment ({start!r}, {end!r}, {version!r})")
    return start, end, version


def _to_map(sample: Sample) -> dict[str, Any]:
    return {
        "group": sample.group,
        "index": sample.index,
        "prompt": sample.prompt.astype(np.int32, copy=False),
        "response": sample.response.astype(np.int32, copy=False),
        "log_probs": sample.log_probs.astype(np.float32, copy=False),
        "mask": sample.mask.astype(np.uint8, copy=False),
        "segments": [list(segment) for segment in sample.segments],
        "finish": sample.finish,
        "text": sample.text,
        "prompt_text": sample.prompt_text,
        "label": sample.label,
        "metadata": sample.metadata,
    }
