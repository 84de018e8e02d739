"""A finished group as its producer sends it, in columns with one entry for each sample: read, checked, and made into samples. Pure.

What a sample is says `shared.schema.sample.Sample`; here each value is refused by its place in the body, before anything is done with it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from services.gateway.wire.request_body import AnyObject, RequestFields, read_body
from services.gateway.wire.turn_refused import TurnRefused
from shared.config.run_config import RunConfig
from shared.hooks import reward_values
from shared.runtime.errors import BadMessage
from shared.schema.message import LARGEST, MAX_PARTS, MAX_SAMPLES, ROLE, PartName, Reward
from shared.schema.sample import LOG_PROBS, Sample, SampleLimits, fitted, segments_of, turns_of
from shared.schema.versions import is_lost

LONGEST = 1 << 22
"""Tokens of a sample."""

Integer = Annotated[int, Field(ge=0, le=LARGEST)]
Integers = Annotated[list[Integer], Field(max_length=LONGEST, fail_fast=True)]
Score = Reward | Annotated[dict[PartName, Reward], Field(max_length=MAX_PARTS)]


Entry = TypeVar("Entry")
Column = Annotated[list[Entry], Field(min_length=1, max_length=MAX_SAMPLES, fail_fast=True)]
"""One entry for each sample."""


class GroupBody(RequestFields):
    """A group. ``id``: the producer's own; ``tokens``: prompt and response; ``masks``: 1 for tokens that are trained, else 0;
    ``sampled``: 1 for tokens that the model itself sampled, by default those that are trained: their text is what verifiers score;
    ``log_probs``: of each token, looked at where it is trained; ``versions``: of the whole group, of each sample, or of each token."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    tokens: Column[Integers]
    masks: Column[Annotated[list[Literal[0, 1]], Field(max_length=LONGEST, fail_fast=True)]]
    sampled: Column[Annotated[list[Literal[0, 1]], Field(max_length=LONGEST, fail_fast=True)]] | None = None
    log_probs: Column[Annotated[list[float], Field(max_length=LONGEST, fail_fast=True)]]
    versions: Integer | Column[Integer] | Column[Integers]
    scores: Column[Score] | None = None
    rollouts: Column[Integer] | None = None
    roles: Column[Annotated[str, Field(pattern=ROLE)]] | None = None
    finish: Column[Literal["stop", "length"]] | None = None
    texts: Column[str] | None = None
    environment: str | None = None
    label: str | None = None
    metadata: AnyObject = {}


@dataclass(frozen=True)
class GroupLimits:
    """What a run takes: token ids in [0, vocabulary), versions up to ``live``, and the rest by its config."""

    config: RunConfig
    vocabulary: int
    live: int


@dataclass(frozen=True)
class FinishedGroup:
    """A group that may be handed in. ``oldest``: the version of its oldest trained token. ``environment``: what scores it.

    ``samples``: under the producer's id.
    """

    id: str
    oldest: int
    environment: str
    samples: list[Sample]


def parse_group(body: bytes, limits: GroupLimits, decode: Callable[[NDArray[np.int32]], str], special: Sequence[str] = ()) -> FinishedGroup:
    """Returns the group in a body of JSON. Raises TurnRefused, which names the field.

    Args:
        decode: tokens to text, special tokens left out. special: the texts of these, which a producer's texts may have.
    """
    asked, _ = read_body(GroupBody, body)
    _check_columns(asked)
    tokens = [np.asarray(row, np.int32) for row in asked.tokens]
    masks = [np.asarray(row, np.uint8) for row in asked.masks]
    for index, (row, mask) in enumerate(zip(tokens, masks, strict=True)):
        _check_sample(asked, index, row, mask, limits.vocabulary)
    versions = [_versions(asked, index, mask) for index, mask in enumerate(masks)]
    oldest = _check_versions(versions, masks, limits)
    _check_rollouts(asked, limits.config)
    environment = _environment(asked, limits.config)
    _check_scores(asked, limits.config)

    samples = [_sample(asked, index, *arrays, decode, special) for index, arrays in enumerate(zip(tokens, masks, versions, strict=True))]
    try:
        for sample in samples:
            sample.check(SampleLimits(limits.vocabulary, limits.live))
            sample.meta()
        samples = fitted(samples, limits.config.longest_sample, limits.config.rollout.overlong_samples)
    except BadMessage as error:
        raise _wrong("tokens", str(error)) from None
    return FinishedGroup(asked.id, oldest, environment, samples)


def _check_columns(asked: GroupBody) -> None:
    """Raises TurnRefused where a column has not one entry for each sample."""
    count = len(asked.tokens)
    for name in ("masks", "sampled", "log_probs", "versions", "scores", "rollouts", "roles", "finish", "texts"):
        column = getattr(asked, name)
        if isinstance(column, list) and len(column) != count:
            raise _wrong(name, f"{len(column)} entries for {count} samples")


def _check_sample(asked: GroupBody, index: int, tokens: NDArray[np.int32], mask: NDArray[np.uint8], vocabulary: int) -> None:
    for name in ("masks", "sampled", "log_probs", "versions"):
        column = getattr(asked, name)
        if isinstance(column, list) and isinstance(row := column[index], list) and len(row) != len(tokens):
            raise _wrong(f"{name}[{index}]", f"{len(row)} entries for {len(tokens)} tokens")
    if (beyond := tokens >= vocabulary).any():
        position = int(beyond.argmax())
        raise _wrong(f"tokens[{index}][{position}]", f"{tokens[position]} is not in [0, {vocabulary})")
    if not mask.any():
        raise _wrong(f"masks[{index}]", "no token is trained")
    if mask[0]:
        raise _wrong(f"masks[{index}][0]", "the first token cannot be trained: nothing comes before it")
    least, most = LOG_PROBS
    log_probs = np.asarray(asked.log_probs[index], np.float64)
    if (wrong := mask.astype(bool) & ~((log_probs >= least) & (log_probs <= most))).any():
        position = int(wrong.argmax())
        raise _wrong(
            f"log_probs[{index}][{position}]", f"{log_probs[position]:g} of a trained token; expected a number from {least:g} to 0"
        )


def _versions(asked: GroupBody, index: int, mask: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Returns the versions of a sample's tokens, int32 [T]: where none is trained that of the last trained token before, or the first."""
    given = asked.versions if isinstance(asked.versions, int) else asked.versions[index]
    if isinstance(given, int):
        return np.full(len(mask), given, np.int32)
    trained = np.where(mask, np.arange(len(mask)), mask.argmax())
    return np.asarray(given, np.int32)[np.maximum.accumulate(trained)]


def _check_versions(versions: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.uint8]], limits: GroupLimits) -> int:
    """Returns the oldest version of the trained tokens. Raises TurnRefused for one that there is not yet, and for a group that is stale."""
    newest = max(int(row.max()) for row in versions)
    if newest > limits.live:
        raise _wrong("versions", f"version {newest}; the newest that is served is {limits.live}")
    trained = [row[mask.astype(bool)] for row, mask in zip(versions, masks, strict=True)]
    oldest, rollout = min(int(row.min()) for row in trained), limits.config.rollout
    if is_lost(oldest, limits.live, rollout.max_staleness, rollout.staleness_policy):
        raise _stale(oldest, limits.live - rollout.max_staleness)
    if max(int(row.max()) for row in trained) < limits.live - rollout.max_staleness:
        raise _stale(oldest, limits.live - rollout.max_staleness)
    return oldest


def _stale(oldest: int, bound: int) -> TurnRefused:
    """Returns the refusal of a group that the run would not train any more."""
    message = f"its oldest trained token is of version {oldest}; the run trains none before {bound} any more"
    return TurnRefused(409, message, field="versions", code="stale_group")


def _check_rollouts(asked: GroupBody, config: RunConfig) -> None:
    """Raises TurnRefused where the samples are not of as many rollouts as a group of the run has."""
    rollouts = asked.rollouts or list(range(len(asked.tokens)))
    found, most, fewest = len(set(rollouts)), config.rollout.n_samples_per_prompt, config.rollout.fewest_rollouts
    if not fewest <= found <= most:
        expected = f"{most}" if fewest == most else f"{fewest} to {most}"
        raise _wrong("rollouts" if asked.rollouts else "tokens", f"samples of {found} rollouts; a group of this run has {expected}")
    if max(rollouts) >= most:
        raise _wrong("rollouts", f"rollout {max(rollouts)}; they are counted from 0 to {most - 1}")


def _environment(asked: GroupBody, config: RunConfig) -> str:
    names = config.reward.environment_names()
    if asked.environment is not None:
        if asked.environment not in names:
            raise _wrong("environment", f"the run has no such environment; it has {', '.join(names)}")
        return asked.environment
    if asked.scores is None:
        raise _wrong("scores", "required where no environment is named that scores the group")
    own = config.reward.environment_of(None)
    return own if own in names else names[0]


def _check_scores(asked: GroupBody, config: RunConfig) -> None:
    """Raises TurnRefused for named scores without the one that counts, where nobody else scores the group."""
    for index, score in enumerate([] if config.reward.group_rm else asked.scores or []):
        try:
            reward_values.read(score, config.reward.reward_key)
        except ValueError as error:
            raise _wrong(f"scores[{index}]", str(error)) from None


def _sample(
    asked: GroupBody,
    index: int,
    tokens: NDArray[np.int32],
    mask: NDArray[np.uint8],
    versions: NDArray[np.int32],
    decode: Callable[[NDArray[np.int32]], str],
    special: Sequence[str],
) -> Sample:
    """Returns a sample: what comes before the first trained token is its prompt."""
    begin = int(mask.argmax())
    own, decoded = mask != 0 if asked.sampled is None else np.asarray(asked.sampled[index], np.bool_), decode(tokens[begin:])
    text = asked.texts[index] if asked.texts else decoded
    stated = asked.sampled is None and _bare(text, special) != _bare(decoded, special)  # what is scored is the producer's statement
    return Sample(
        group=asked.id,
        index=index,
        prompt=tokens[:begin],
        response=tokens[begin:],
        log_probs=np.asarray(asked.log_probs[index][begin:], np.float32),
        mask=mask[begin:],
        segments=segments_of(versions[begin:]),
        finish=asked.finish[index] if asked.finish else "stop",
        text=text,
        prompt_text=decode(tokens[:begin]),
        label=asked.label,
        metadata={**asked.metadata, "ingested": asked.id},
        rollout=asked.rollouts[index] if asked.rollouts else index,
        role=asked.roles[index] if asked.roles else "",
        given_reward=None if asked.scores is None else asked.scores[index],
        turns=[] if stated else turns_of(own[begin:], tokens[begin:], decode),
    )


def _bare(text: str, special: Sequence[str]) -> str:
    """Returns a text without white space and special tokens."""
    return re.sub("|".join([r"\s", *map(re.escape, special)]), "", text)


def _wrong(field: str, message: str) -> TurnRefused:
    return TurnRefused(400, message, field=field, code="invalid_value")
