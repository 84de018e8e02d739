"""Samples as they lie in the store: tokens, log-probs, mask and version segments, kept aligned in one place.

A group's samples are encoded into one or more blobs (MessagePack, arrays as raw bytes); a reference lists the keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema.limits import MAX_KEYS, Parts, Reward
from shared.schema.messages import SampleMeta

SCHEMA = 1
"""Version of the payload's schema."""

_ARRAYS: dict[str, tuple[str, np.dtype[Any]]] = {
    "prompt": ("iu", np.dtype("<i4")),
    "response": ("iu", np.dtype("<i4")),
    "log_probs": ("f", np.dtype("<f4")),
    "mask": ("bu", np.dtype("|u1")),
}
"""numpy's kinds that a sample's arrays may be of, and the type that they travel as."""


@dataclass
class Sample:
    """One trajectory: the form that rollout makes, the store keeps and trainer, reward and buffer read.

    prompt: int32 [P], P at least 1; response: int32 [R]; log_probs: float32 [R], the engine's for exactly those tokens; mask: uint8 [R],
    1 where the token is trained; segments: (start, end, version) spans that tile [0, R) in order; text: the decoded response; rollout:
    the index of the group's rollout that it comes from, by default its own ``index``; samples that fan out of one rollout share it.
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
    rollout: int = -1

    def __post_init__(self) -> None:
        if self.rollout < 0:
            self.rollout = self.index

    @property
    def name(self) -> str:
        """Returns the name of this sample in errors: its group's id, and its index in the group."""
        return f"{self.group}/{self.index}"

    @property
    def length(self) -> int:
        """Returns the number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    def check(self) -> None:
        """Raises BadMessage, naming field and numbers, where the parts do not fit together.

        It is called where a sample crosses a trust boundary: made of an engine's answer or by a hook, or decoded from the store.
        """
        problem = self._array_problem() or self._length_problem() or self._segment_problem()
        if problem is not None:
            raise BadMessage(f"sample {self.name}: {problem}")

    def _array_problem(self) -> str | None:
        for name, (kinds, _) in _ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
                return f"{name} is not a one-dimensional array of {'floats' if kinds == 'f' else 'integers'}"
        if not isinstance(self.rollout, int):
            return f"rollout is {self.rollout!r}, not an integer"
        return None if len(self.prompt) else "prompt is empty; the first response token needs a predecessor"

    def _length_problem(self) -> str | None:
        length = len(self.response)
        for name in ("log_probs", "mask"):
            if len(getattr(self, name)) != length:
                return f"{name} has {len(getattr(self, name))} entries for {length} response tokens"
        if length and np.maximum.reduce(self.mask) > 1:
            return f"mask holds {self.mask.max()}; expected 0 and 1"
        # all of them at once first: what is masked out need not be finite, but nearly always is
        finite = np.isfinite(self.log_probs)
        if np.count_nonzero(finite) < length and not finite[self.mask.astype(bool)].all():
            return "log_probs holds values that are not finite"
        return None

    def _segment_problem(self) -> str | None:
        length, tiled = len(self.response), 0
        for start, end, version in self.segments:
            if start != tiled or end <= start or version < 0:
                return f"segments {self.segments} do not tile the {length} response tokens"
            tiled = end
        return None if tiled == length else f"segments end at {tiled}, the response at {length}"

    def versions(self) -> NDArray[np.int32]:
        """Returns the weight version of each response token: int32 [R]."""
        out = np.empty(len(self.response), dtype=np.int32)
        for start, end, version in self.segments:
            out[start:end] = version
        return out

    def meta(self) -> SampleMeta:
        """Returns the metadata for references: the response's length, and the versions of its oldest and newest trained token."""
        versions = [version for _, _, version in self.segments]
        if len(versions) > 1:
            versions = [version for start, end, version in self.segments if self.mask[start:end].any()] or versions
        return SampleMeta(tokens=len(self.response), oldest=min(versions, default=0), newest=max(versions, default=0), finish=self.finish)


@pydantic.dataclasses.dataclass(slots=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class Score:
    """The reward of one sample, within `shared.schema.limits`; ``parts`` holds named rewards where the environment gives several.

    ``removed``: a sample filter took the sample out of the loss; its reward still counts in the group.
    """

    reward: Reward
    parts: Parts = field(default_factory=dict)
    removed: bool = False


def rollouts(samples: Iterable[Sample]) -> tuple[int, ...]:
    """Returns which rollout each sample of a group comes from; empty if each rollout gave one sample."""
    indices = tuple(sample.rollout for sample in samples)
    return indices if len(set(indices)) < len(indices) else ()


def encode(samples: Sequence[Sample], blob_bytes: int) -> list[bytes]:
    """Returns blobs of about ``blob_bytes`` each, `MAX_KEYS` at most, in sample order. The caller has checked the samples."""
    batches: list[list[dict[str, Any]]] = [[]]
    size, fewest = 0, -(-len(samples) // MAX_KEYS)
    for sample in samples:
        if size >= blob_bytes and len(batches[-1]) >= fewest:
            batches.append([])
            size = 0
        arrays = {name: codec.array(getattr(sample, name), dtype) for name, (_, dtype) in _ARRAYS.items()}
        batches[-1].append(vars(sample) | arrays)
        size += len(sample.prompt) * 4 + len(sample.response) * 9 + len(sample.text) + 200
    return [codec.pack({"schema": SCHEMA, "samples": batch}) for batch in batches]


def decode(blobs: Iterable[bytes]) -> list[Sample]:
    """Reads `encode`'s blobs back, and checks the samples; arrays are read-only views of the blobs. Raises BadMessage."""
    samples = []
    for blob in blobs:
        content = codec.unpack(blob)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise BadMessage(f"payload of schema {schema!r}; this side reads {SCHEMA}")
        try:
            for entry in content["samples"]:
                entry["segments"] = [_segment(*segment) for segment in entry["segments"]]
            read = [Sample(**entry) for entry in content["samples"]]
        except (TypeError, KeyError) as error:
            raise BadMessage(f"payload sample with unexpected fields: {error}") from error
        for sample in read:
            sample.check()
        samples += read
    return samples


def _segment(start: int, end: int, version: int) -> tuple[int, int, int]:
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(version, int)):
        raise TypeError(f"segment ({start!r}, {end!r}, {version!r})")
    return start, end, version
