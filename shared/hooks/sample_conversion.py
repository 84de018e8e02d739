"""Converts between samples as they lie in the store, as hooks have them, and as they travel to the process that runs the hook.

The weight versions of a sample that a hook made, in ``weight_versions``:

* one integer a response token (None where it is not known), as `HookSample.append_response_tokens` keeps them;
* spans ``(start, end, version)`` of response tokens, or the engine's own ``{"start", "end", "version"}``;
* anything else, for example slime's list of what the engine called itself at the end of each call: the oldest of them.

Where a version is not known, it is the one that was served when the rollout began; none is taken for newer than one that was served. So
staleness is never understated.

In a message a sample is a map that MessagePack takes. What a user's function sets may be of any type: arrays and tensors travel as lists;
an attribute that MessagePack does not carry, such as an open connection, stays behind, which the log says.
"""

import copy
import re
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from shared.hooks import hook_sample as engine_meta
from shared.hooks import reward_values
from shared.hooks.hook_sample import FINISHED, HookSample, Status, status_of
from shared.rewards.reference import label_text
from shared.runtime.errors import BadMessage
from shared.schema import codec
from shared.schema.kept_tokens import Kept
from shared.schema.ledger import is_evaluation
from shared.schema.sample import LOG_PROBS, Choices, ExpertChoices, SampleLimits, Score, TurnReward, segments_of
from shared.schema.sample import Sample as StoredSample

log = structlog.get_logger()

_FINISH: dict[Status | None, Literal["stop", "length", "abort"]] = {
    Status.COMPLETED: "stop",
    Status.TRUNCATED: "length",
    Status.PENDING: "stop",  # a function that says nothing of it is done, as with slime
    Status.ABORTED: "abort",
}

_UNKNOWN = -1

_COUNTERS: dict[str, Any] = {"spec_info": HookSample.SpecInfo, "prefix_cache_info": HookSample.PrefixCacheInfo}

_STORED = {
    "group_index", "prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask", "rollout_log_probs",
    "weight_versions", "remove_sample", "status", "metadata", "rollout_routed_experts", "turns", "turn_rewards",
    "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
}  # fmt: skip
"""Fields that a stored sample keeps in a form of its own."""

_BARE = vars(HookSample())  # What a sample has whose fields were not set


@dataclass(frozen=True)
class Served:
    """Weight versions while a rollout ran.

    begun: served when it began. newest: served at its end. late: versions whose first token was still drawn by the one before
    (`services.rollout.engine.generation`).
    """

    begun: int
    newest: int
    late: Set[int] = frozenset()


def group_index(group: str) -> int:
    """Returns the index in a group's id: that of its admission, or of its held-out prompt."""
    digits = re.search(r"(\d+)\Z", group)
    return int(digits[1]) if digits else 0


def from_stored(stored: StoredSample, score: Score | None = None, reward_key: str | None = None) -> HookSample:
    """Returns a stored sample as hooks have it, with its reward where it has been scored."""
    reward: float | dict[str, Any] | None = copy.copy(stored.given_reward)
    if score is not None:
        reward = {reward_key or "reward": score.reward, **score.parts} if score.parts else score.reward
    seen = HookSample(
        group_index=group_index(stored.group),
        index=stored.index,
        rollout_id=stored.rollout,
        session_id=f"{stored.group}.{stored.rollout}",
        prompt=stored.prompt_text,
        tokens=[*stored.prompt.tolist(), *stored.response.tolist()],
        response=stored.text,
        response_length=len(stored.response),
        label=stored.reference.value,
        reward=reward,
        loss_mask=stored.mask.tolist(),
        rollout_log_probs=None if stored.log_probs is None else stored.log_probs.tolist(),
        weight_versions=stored.versions().tolist(),
        remove_sample=False if score is None else score.removed,
        status=FINISHED[stored.finish],
        metadata=stored.metadata,
    )
    no_fields = {"turns": list(stored.turns or [stored.text]), "role": stored.role, "turn_rewards": list(stored.turn_rewards)}  # of slime's
    vars(seen).update({name: value for name, value in no_fields.items() if value})
    if stored.routed_experts is not None:
        seen.rollout_routed_experts = stored.routed_experts.astype(np.int32)
    if stored.kept is not None:
        seen.rollout_top_p_token_ids, seen.rollout_top_p_token_offsets = stored.kept
    for name, value in stored.attributes.items():
        counters = _COUNTERS.get(name)
        setattr(seen, name, value if counters is None else counters.from_dict(value))
    return seen


def to_stored(
    given: HookSample, group: str, index: int, rollout: int, served: Served, limits: SampleLimits, unfinished: bool = False
) -> StoredSample:
    """Returns what a hook generated in the form that goes into the store, checked.

    Args:
        index: of the sample in its group. rollout: which rollout it comes from. limits: those of the run's samples.
        unfinished: it may be ABORTED, to be continued.

    Raises BadMessage, naming the field and what would be right.
    """
    where = f"sample {group}/{index}"
    tokens, length = _tokens(given, limits.vocabulary, where), given.response_length
    mask = _mask(given, where)
    log_probs = _log_probs(given, mask, where)
    if log_probs is None and is_evaluation(group):  # nothing of it is trained
        mask = np.zeros(length, np.uint8)
    if log_probs is None and limits.log_probs_reader is not None and mask.any():
        raise BadMessage(
            f"{where}: rollout_log_probs is missing, the log-probs of tokens as the engine sampled them; {limits.log_probs_reader}"
        )
    found: dict[str, Any] = {}
    for name, value in vars(given).items():
        if name in _STORED or value is None or (name in _BARE and value == _BARE[name]):
            continue
        value = value.to_dict() if name in _COUNTERS else engine_meta.listed(value) if hasattr(value, "tolist") else value
        try:
            found[name] = codec.unpack(codec.pack(value))
        except (TypeError, ValueError, OverflowError, BadMessage):
            log.info("attribute_not_stored", attribute=name, type=type(value).__name__)
    stored = StoredSample(
        group=group,
        index=index,
        rollout=rollout,
        prompt=tokens[: len(tokens) - length],
        response=tokens[len(tokens) - length :],
        log_probs=log_probs,
        mask=mask,
        segments=segments_of(_versions(given.weight_versions, mask, served, where)),
        attributes=found,
        routed_experts=_routed_experts(given, limits.choices, where),
        turn_rewards=_turn_rewards(given, where),
        kept=_kept(given, limits, where),
        **_described(given, where, unfinished),
    )
    stored.check(limits if stored.finish != "abort" else replace(limits, choices=None))
    return stored


def _described(given: HookSample, where: str, unfinished: bool) -> dict[str, Any]:
    """Returns the fields of a stored sample that are no arrays: its end, texts, label, metadata and reward. Raises BadMessage."""
    status = status_of(given.status)
    if status not in _FINISH or (status is Status.ABORTED and not unfinished):
        raise BadMessage(f"{where}: status is {given.status}; expected COMPLETED or TRUNCATED")
    if not isinstance(given.response, str) or not isinstance(given.metadata, dict):
        raise BadMessage(f"{where}: response is text, metadata is a dict")
    try:
        label, label_json = label_text(given.label)
        codec.unpack(codec.pack([given.prompt, given.response, label, given.metadata]))
    except (TypeError, ValueError, OverflowError, BadMessage) as error:
        raise BadMessage(f"{where}: prompt, response, label or metadata does not travel in a message: {error}") from None
    try:
        reward = None if given.reward is None else reward_values.plain(given.reward)
    except ValueError as error:
        raise BadMessage(f"{where}: reward: {error}") from None
    return {
        "finish": _FINISH[status],
        "text": given.response,
        "prompt_text": given.prompt,
        "label": label,
        "label_json": label_json,
        "metadata": copy.deepcopy(given.metadata),
        "given_reward": reward,
    }


def _tokens(given: HookSample, vocabulary: int, where: str) -> NDArray[np.int32]:
    length = given.response_length
    if not isinstance(length, int) or length < 0:
        raise BadMessage(f"{where}: response_length is {length!r}; expected how many of tokens are the response")
    ids = _array(given.tokens, "iu", f"{where}: tokens", "token ids")
    if len(ids) <= length:
        raise BadMessage(f"{where}: {len(ids)} tokens with a response_length of {length}; expected a prompt's tokens, then the response's")
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if outside.size:
        raise BadMessage(f"{where}: token {ids[outside[0]]} at {outside[0]} is not in [0, {vocabulary})")
    return ids.astype(np.int32)


def _mask(given: HookSample, where: str) -> NDArray[np.uint8]:
    length = given.response_length
    if given.remove_sample:
        return np.zeros(length, np.uint8)
    if given.loss_mask is None:
        return np.ones(length, np.uint8)
    mask = _array(given.loss_mask, "biu", f"{where}: loss_mask", "0 and 1")
    if len(mask) != length:
        raise BadMessage(f"{where}: loss_mask has {len(mask)} entries for {length} response tokens")
    if not np.isin(mask, (0, 1)).all():
        raise BadMessage(f"{where}: loss_mask holds {mask.max() if mask.max() > 1 else mask.min()}; expected 0 and 1")
    return mask.astype(np.uint8)


def _routed_experts(given: HookSample, choices: ExpertChoices | None, where: str) -> Choices | None:
    """Returns the experts of its tokens, where training replays them and the function has kept some."""
    if choices is None or given.rollout_routed_experts is None:
        return None
    try:
        values = np.asarray(given.rollout_routed_experts)
        if values.ndim != 3 or values.dtype.kind not in "iu":
            raise ValueError(f"{values.dtype} {list(values.shape)}; expected integers [tokens but the last, layers, experts a token]")
        return choices.taken(values.reshape(-1), len(values))
    except ValueError as error:
        raise BadMessage(f"{where}: rollout_routed_experts: {error}") from None


def _kept(given: HookSample, limits: SampleLimits, where: str) -> Kept | None:
    ids, offsets = given.rollout_top_p_token_ids, given.rollout_top_p_token_offsets
    if not limits.kept or ids is None or offsets is None:
        return None
    return Kept(*(_array(values, "iu", f"{where}: rollout_top_p_token_ids", "integers").astype(np.int32) for values in (ids, offsets)))


def _turn_rewards(given: HookSample, where: str) -> list[TurnReward]:
    try:
        return [tuple(turn) for turn in getattr(given, "turn_rewards", None) or []]
    except TypeError:
        raise BadMessage(f"{where}: turn_rewards is no list of turns (start, end, reward)") from None


def _log_probs(given: HookSample, mask: NDArray[np.uint8], where: str) -> NDArray[np.float32] | None:
    """Returns float32 [R], 0 where a token has none or one that is none; None where the function has not kept them."""
    if given.rollout_log_probs is None:
        return None
    values = _array(given.rollout_log_probs, "fiu", f"{where}: rollout_log_probs", "numbers").astype(np.float32)
    if len(values) != len(mask):
        raise BadMessage(f"{where}: rollout_log_probs has {len(values)} entries for {len(mask)} response tokens")
    bad = np.flatnonzero(mask.astype(bool) & ~np.isfinite(values))
    if bad.size:
        raise BadMessage(f"{where}: rollout_log_probs is {values[bad[0]]} at {bad[0]}, a trained token; expected a finite number")
    least, most = LOG_PROBS
    return np.where(mask.astype(bool) | ((values >= least) & (values <= most)), values, np.float32(0))


def _array(values: object, kinds: str, name: str, content: str) -> NDArray[Any]:
    try:
        array = np.asarray(values) if len(values) else np.empty(0, np.int64)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise BadMessage(f"{name} is not a list of {content}")
    return array


def _versions(given: Sequence[Any], mask: NDArray[np.uint8], served: Served, where: str) -> NDArray[np.int32]:
    """Returns the version of each response token, int32 [R], by the module's rules."""
    versions = _named(list(given), len(mask), served, where)
    if versions.size and versions.max() > served.newest:
        raise BadMessage(f"{where}: weight_versions names {versions.max()}; the newest that this replica served is {served.newest}")
    versions[versions == _UNKNOWN] = served.begun
    trained = np.flatnonzero(mask)
    for late in sorted(served.late, reverse=True):
        first = trained[versions[trained] == late][:1]
        if late > served.begun and first.size:
            before = trained[trained < first[0]]
            versions[first[0]] = versions[before[-1]] if before.size else served.begun
    # between trained tokens a version means nothing: that of the token before keeps the segments few
    for at in np.flatnonzero(mask == 0):
        if at:
            versions[at] = versions[at - 1]
    return versions


def _named(given: list[Any], length: int, served: Served, where: str) -> NDArray[np.int32]:
    """Returns the versions that the hook names itself, int32 [R]; `_UNKNOWN` where it names none."""
    try:
        if len(given) == length and all(entry is None or isinstance(entry, int | np.integer) for entry in given):
            versions = np.array([_UNKNOWN if entry is None else int(entry) for entry in given], np.int32)
        elif all(isinstance(entry, dict | tuple | list) for entry in given):
            versions = _of_spans(given, length, where)
        else:
            versions = np.full(length, min([served.begun, *(int(entry) for entry in given if entry is not None)]), np.int32)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise BadMessage(f"{where}: weight_versions is {str(given)[:80]}: {type(error).__name__}: {error}") from None
    if versions.size and versions.min() < _UNKNOWN:
        raise BadMessage(f"{where}: weight_versions names {versions.min()}; versions count from 0")
    return versions


def _of_spans(spans: list[Any], length: int, where: str) -> NDArray[np.int32]:
    versions = np.full(length, _UNKNOWN, np.int32)
    for span in spans:
        start, end, version = (span["start"], span["end"], span["version"]) if isinstance(span, dict) else span
        if not 0 <= start <= end <= length:
            raise BadMessage(f"{where}: weight_versions has a span {start} to {end} of {length} response tokens")
        versions[start:end] = int(version)
    return versions


def packed(sample: HookSample) -> dict[str, Any]:
    """Returns the sample as a map. Raises BadMessage for a field of slime's that does not travel."""
    fields: dict[str, Any] = {"status": getattr(status_of(sample.status), "value", str(sample.status))}
    for name, value in vars(sample).items():
        if name == "status" or (name in _BARE and type(value) is type(_BARE[name]) and value == _BARE[name]):
            continue
        plain = value.to_dict() if name in ("spec_info", "prefix_cache_info") else _plain(value)
        if _travels(plain):
            fields[name] = plain
        elif name in _BARE:
            raise BadMessage(f"{name} does not travel in a message: it is {str(value)[:80]}")
        else:
            print(f"sample.{name}, a {type(value).__name__}, stays in this process", file=sys.stderr)
    return fields


def unpacked(fields: dict[str, Any]) -> HookSample:
    """Returns the sample of `packed`. A status of no enum's stays text."""
    status = status_of(fields["status"])
    sample = HookSample.from_dict({**fields, "status": "pending"})
    sample.status = fields["status"] if status is None else status
    return sample


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        dimensions = getattr(value, "ndim", 1)
        return value.item() if dimensions == 0 else engine_meta.listed(value) if dimensions == 1 else np.asarray(value)
    return value


def _travels(value: Any) -> bool:
    try:
        codec.unpack(codec.pack(value))
    except (TypeError, ValueError, OverflowError, BadMessage, RecursionError):
        return False
    return True
