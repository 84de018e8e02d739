"""The responses of a run on disk: ``rollouts/`` in its directory, one JSON object a line for each group that has ended.

The buffer writes them (`services.buffer.rollout_keeper`) before the store's payload is freed; `myxo samples` reads them. Files are
numbered, and only the newest grows; a buffer that starts continues in a new one. So a line that is cut off is the last of its file, and a
group that was written by two buffers is told by its id and attempt.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.rewards.reference import label_text
from shared.runtime.safe_files import parse_json
from shared.schema.sample import Sample, TurnReward

DIRECTORY = "rollouts"  # The directory of the files in a run's directory

TRAINED, DROPPED, DEAD, EVALUATED, FAILED = "trained", "dropped", "dead", "evaluated", "failed"
"""The ends of a group; the last two are those of held-out prompts."""

_FILE = re.compile(r"([0-9]{6,12})\.jsonl\Z")
_AFTER_HEAD = b',"mask_below":'  # The key behind a record's first fields: most lines are passed over without reading the text behind


class RolloutSample(BaseModel):
    """One sample of a group.

    reward: None where it has none; parts: named rewards. removed: a filter took it out of the loss; stale: so did its age.
    prompt_length, length: tokens of prompt and response. segments: (start, end, weight version) spans of the response's tokens.
    rollout: which of the group's rollouts it comes from, None where that is its index; role: who of several it is of.
    turn_rewards: (start, end, reward) of its turns, where any has one.
    prompt, label, metadata: where they are not the group's. prompt_ids, response_ids: int [P], [R]; log_probs, mask: [R]; kept only with
    ``keep_rollouts_tokens``.
    """

    model_config = ConfigDict(extra="ignore")

    index: int
    reward: float | None = None
    parts: Mapping[str, float | None] = {}
    removed: bool = False
    stale: bool = False
    finish: Literal["stop", "length", "abort"]
    prompt_length: int
    length: int
    segments: list[tuple[int, int, int]] = []
    response: str
    rollout: int | None = None
    role: str | None = None
    turn_rewards: list[TurnReward] | None = None
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    log_probs: list[float | None] | None = None
    mask: list[int] | None = None


class RolloutRecord(BaseModel):
    """One group that has ended.

    dataset: the held-out set's name, None for a training group. step: of the batch that it was trained in. version: of the weights that
    it was trained on, or that it evaluates. reason: why it was dropped, dead or failed. at: when it ended, seconds since the epoch.
    """

    model_config = ConfigDict(extra="ignore")

    group: str
    attempt: int
    status: str
    dataset: str | None = None
    step: int | None = None
    version: int | None = None
    mask_below: int = 0
    reason: str = ""
    at: float
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] = {}
    samples: list[RolloutSample] = []

    def line(self) -> bytes:
        """Returns the record as a line of a file. Values that JSON does not have become text, and numbers that are not finite null."""
        plain = dict(self)
        plain["samples"] = [{key: value for key, value in sample if value is not None} for sample in self.samples]
        return pydantic_core.to_json(plain, inf_nan_mode="null", fallback=json_value) + b"\n"

    def decoded(self) -> list[Sample]:
        """Returns the samples as the store had them; without their token ids the arrays are empty, and only text and segments are there."""
        return [self._decoded(sample) for sample in self.samples]

    def _decoded(self, sample: RolloutSample) -> Sample:
        label, label_json = label_text(self.label if sample.label is None else sample.label)
        return Sample(
            group=self.group,
            index=sample.index,
            prompt=np.asarray(sample.prompt_ids or (), np.int32),
            response=np.asarray(sample.response_ids or (), np.int32),
            log_probs=None if sample.log_probs is None else np.asarray(sample.log_probs, np.float32),  # nan where there is none
            mask=np.asarray(sample.mask or (), np.uint8),
            segments=sample.segments,
            finish=sample.finish,
            text=sample.response,
            prompt_text=self.prompt if sample.prompt is None else sample.prompt,
            label=label,
            label_json=label_json,
            metadata=self.metadata if sample.metadata is None else sample.metadata,
            rollout=-1 if sample.rollout is None else sample.rollout,
            role=sample.role or "",
            turn_rewards=(sample.turn_rewards or []) if sample.response_ids else [],
        )


class KeptLine(NamedTuple):
    """One line of a file and its place. head: what comes before `_AFTER_HEAD`; None where the line is no record."""

    start: int
    line: bytes
    head: RolloutRecord | None


def kept_lines(path: Path, start: int = 0) -> Iterator[KeptLine]:
    """Yields the lines of a file from byte ``start`` on; nothing where it was removed. The last may be cut off, and still grow."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # removed since, to make room
        return
    with file:
        file.seek(start)
        for line in file:
            yield KeptLine(start, line, _head(line))
            start += len(line)


def read_record(path: Path, start: int, size: int) -> RolloutRecord | None:
    """Returns the record that lies there; None where the file was removed, or holds another line by now."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return RolloutRecord.model_validate_json(file.read(size))
    except (FileNotFoundError, ValidationError):
        return None


def heads(directory: Path) -> Iterator[RolloutRecord]:
    """Yields a run's records, oldest first, repeats included; of each only what comes before `_AFTER_HEAD` is read. There need be none."""
    for path in files(directory):
        yield from (line.head for line in kept_lines(path) if line.head is not None)


def _head(line: bytes) -> RolloutRecord | None:
    with contextlib.suppress(ValueError):
        if line.endswith(b"\n"):
            return RolloutRecord.model_validate({"at": 0.0, **parse_json(line[: line.index(_AFTER_HEAD)] + b"}")})
    return None


def files(directory: Path) -> list[Path]:
    """Returns the files of a run's responses, oldest first; none without the directory. Raises OSError where it cannot be read."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _FILE.match(path.name)), key=lambda path: int(path.stem))


def trained_groups(directory: Path) -> int | None:
    """Returns of how many trained groups the responses are there; None without the directory, and where its oldest files were removed."""
    paths = files(directory)
    if not paths or int(paths[0].stem):
        return None
    last = {head.group: head.status for head in heads(directory)}
    return sum(status == TRAINED for status in last.values())


def path_of(directory: Path, index: int) -> Path:
    """Returns the path of the file with a number, from 0."""
    return directory / f"{index:06d}.jsonl"


def sample_of(
    sample: Sample, group: Sample, reward: float | None, parts: Mapping[str, float], *, removed: bool, stale: bool, tokens: bool
) -> RolloutSample:
    """Returns the part of a sample that is kept. Nothing is validated: it comes from the store, and is checked when it is read.

    Args:
        group: the group's first sample, whose prompt, label and metadata the record has. tokens: whether token ids, log-probs and mask
            are kept, too.
    """

    def other(name: str) -> Any:
        value = getattr(sample, name)
        return None if sample is group or _same(value, getattr(group, name)) else value

    arrays: dict[str, Any] = {}
    if tokens:
        arrays = {"prompt_ids": sample.prompt.tolist(), "response_ids": sample.response.tolist(), "mask": sample.mask.tolist()}
        if sample.log_probs is not None:  # float32 has no more digits, and would be written with 17
            arrays["log_probs"] = sample.log_probs.astype(np.float64).round(6).tolist()
    return RolloutSample.model_construct(
        index=sample.index,
        reward=reward,
        parts=parts,
        removed=removed,
        stale=stale,
        finish=sample.finish,
        prompt_length=len(sample.prompt),
        length=len(sample.response),
        segments=sample.segments,
        response=sample.text,
        rollout=None if sample.rollout == sample.index else sample.rollout,
        role=sample.role or None,
        turn_rewards=sample.turn_rewards if any(reward for *_, reward in sample.turn_rewards) else None,
        prompt=other("prompt_text"),
        label=None if (sample.label, sample.label_json) == (group.label, group.label_json) else sample.reference.value,
        metadata=other("metadata"),
        **arrays,
    )


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays somewhere inside: they have no single truth
        return False


def json_value(value: Any) -> Any:
    """Returns what JSON does not know as what it does: lists of arrays, text of all else."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
