"""A batch in the format of slime's own rollout dumps: a file of torch's with ``{"rollout_id", "samples": [{field: value}]}``.

Files are read without running what is pickled in them (torch's ``weights_only``). A file that Myxo has written also holds what slime has no
field for: ``version`` and ``mask_below`` of the batch, and of each sample its group's id and the weight version of each response token; so
it is read back to the very batch.
"""

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.dumped_groups import DumpedGroup
from shared.runtime.errors import BadMessage
from shared.runtime.safe_files import replacement
from shared.schema.ledger import group_id, group_number
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import Sample, segments_of

SUFFIX = ".pt"
"""The end of the names of files in slime's format."""

Finish = Literal["stop", "length", "abort"]

GROUP = "myxo_group"
"""The key of a sample with its group's id, in files that Myxo has written."""

STALE = "myxo_stale"
"""The key of a sample that leaves the loss because all its tokens are too old."""

PARTS = "myxo_parts"
"""The key of a sample with its named rewards."""

MORE = "myxo_fields"
"""The key of a sample with what else Myxo keeps of it."""

_FIELDS = {"group", "index", "rollout", "prompt", "response", "log_probs", "mask", "segments", "finish"} | {
    *("text", "prompt_text", "label", "metadata")
}
"""Fields of a stored sample that slime's have a place for."""

MORE_FIELDS = {field.name for field in fields(Sample)} - _FIELDS
"""The others."""

_STATUS: dict[Finish, str] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
_FINISH: dict[Any, Finish] = {status: finish for finish, status in _STATUS.items()} | {"pending": "stop", "failed": "abort"}

_BLOB_BYTES = 1 << 20

_NUMPY: list[Any] = [
    *[(np._core.multiarray._reconstruct, f"{module}.multiarray._reconstruct") for module in ("numpy.core", "numpy._core")],  # type: ignore[attr-defined]
    *[(np._core.multiarray.scalar, f"{module}.multiarray.scalar") for module in ("numpy.core", "numpy._core")],  # type: ignore[attr-defined]
    *[np.ndarray, np.dtype],
    *[type(np.dtype(name)) for name in ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")],
]
"""What arrays and numbers of numpy's are pickled as; none of it runs code of the file's."""


def entries(batch: Batch, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Returns the content of a batch's file. ``samples``: by group, in the order of their reference."""
    found = [_entry(sample, group, position, batch.step) for group in batch.groups for position, sample in enumerate(samples[group.group])]
    return {"rollout_id": batch.step, "samples": found, "version": batch.version, "mask_below": batch.mask_below}


def _entry(sample: Sample, group: BatchGroup, position: int, step: int) -> dict[str, Any]:
    number, width = group_number(group.group), len(group.rewards)
    more = {name: getattr(sample, name) for name in MORE_FIELDS}
    return {
        "group_index": number,
        "index": number * width + position,
        "rollout_id": number * width + sample.rollout,
        "session_id": f"{group.group}.{sample.rollout}",
        "prompt": sample.prompt_text,
        "tokens": [*sample.prompt.tolist(), *sample.response.tolist()],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": sample.text,
        "response_length": len(sample.response),
        "label": sample.label,
        "reward": group.rewards[position],
        "loss_mask": sample.mask.tolist(),
        "weight_versions": sample.versions().tolist(),
        "rollout_log_probs": None if sample.log_probs is None else sample.log_probs.tolist(),
        "remove_sample": position in group.removed,
        "status": _STATUS[sample.finish],
        "metadata": sample.metadata,
        "train_metadata": None,
        "non_generation_time": 0.0,
        "spec_info": {},
        "prefix_cache_info": {},
        GROUP: group.group,
        STALE: position in group.stale,
        PARTS: group.parts[position] if group.parts else {},
        MORE: {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in more.items()},
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that slime's tools and `read` take. It appears complete or not at all. Raises OSError."""
    with replacement(path) as file:
        torch.save(dict(content), file)


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a file in slime's format. Raises BadMessage for one that is none, or that would have to be unpickled."""
    try:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([name for name in _NUMPY if name not in known]):  # it forgets at its end what it is given
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadMessage(f"{path} is no dump of numbers, text and tensors: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list) or not content["samples"]:
        raise BadMessage(f"{path} holds no list of samples; expected what --save-debug-rollout-data writes")
    return content


@dataclass(frozen=True)
class Reading:
    """What the config says about samples that do not say it themselves.

    version: of the weights that a step is trained on, and by which samples without versions were generated. group_size: samples of a group,
    where they name none. reward_key: which of several named rewards counts. log_probs_reader: as in `SampleLimits`.
    own: whether the file is Myxo's, whose samples say the version of each token.
    """

    version: int
    group_size: int
    reward_key: str | None = None
    log_probs_reader: str | None = None
    own: bool = False


def groups_of(content: Mapping[str, Any], path: Path, step: int, reading: Reading) -> list[DumpedGroup]:
    """Returns the groups of a file's samples, in the order of their first samples. Raises BadMessage, naming file, sample and field."""
    members: dict[Any, list[Mapping[str, Any]]] = {}
    for position, entry in enumerate(content["samples"]):
        if not isinstance(entry, Mapping):
            raise BadMessage(f"{path}: sample {position} is a {type(entry).__name__}; expected a dict of its fields")
        index = entry.get("group_index")
        members.setdefault(position // reading.group_size if index is None else index, []).append(entry)
    names = [str(entries[0].get(GROUP, group_id(step * len(members) + at))) for at, entries in enumerate(members.values())]
    return [_group(entries, name, path, reading) for entries, name in zip(members.values(), names, strict=True)]


def _group(entries: Sequence[Mapping[str, Any]], name: str, path: Path, reading: Reading) -> DumpedGroup:
    rollouts: dict[Any, int] = {}
    for position, entry in enumerate(entries):
        rollouts.setdefault(position if entry.get("rollout_id") is None else ("rollout", entry["rollout_id"]), len(rollouts))
    samples, rewards, parts = [], [], []
    for position, entry in enumerate(entries):
        where = f"{path}: sample {entry.get('index', position)} of group {name}"
        rollout = rollouts[position if entry.get("rollout_id") is None else ("rollout", entry["rollout_id"])]
        try:
            samples.append(_sample(entry, name, position, rollout, reading))
            rewards.append(_reward(entry.get("reward"), reading.reward_key))
            parts.append(_parts(entry))
        except (BadMessage, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BadMessage(f"{where}: {what}") from None
    removed = [position for position, entry in enumerate(entries) if entry.get("remove_sample")]
    stale = [position for position, entry in enumerate(entries) if entry.get(STALE)]
    return DumpedGroup(name, samples, rewards, removed, stale, parts)


def _sample(entry: Mapping[str, Any], group: str, index: int, rollout: int, reading: Reading) -> Sample:
    if entry.get("multimodal_train_inputs"):
        raise BadMessage("multimodal_train_inputs: pictures are not trained here")
    tokens, length = _array(entry["tokens"], np.int32), int(entry["response_length"])
    if not 0 <= length < len(tokens):
        raise BadMessage(f"response_length is {length}, of {len(tokens)} tokens")
    mask, log_probs = _mask_and_log_probs(entry, length, reading)
    sample = Sample(
        group=group,
        index=index,
        prompt=tokens[: len(tokens) - length],
        response=tokens[len(tokens) - length :],
        log_probs=log_probs,
        mask=mask,
        segments=segments_of(_array(entry["weight_versions"], np.int32) if reading.own else np.full(length, reading.version, np.int32)),
        finish=_FINISH.get(entry.get("status", "completed"), "stop"),
        text=entry.get("response") or "",
        prompt_text=entry.get("prompt") or "",
        label=None if entry.get("label") is None else str(entry["label"]),
        metadata=entry.get("metadata") or {},
        rollout=rollout,
    )
    for name, value in entry.get(MORE, {}).items():
        if name in MORE_FIELDS:
            setattr(sample, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    sample.check()
    return sample


def _mask_and_log_probs(entry: Mapping[str, Any], length: int, reading: Reading) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
    """Returns them for a response of ``length`` tokens: all are trained where no mask says otherwise."""
    given, drawn = entry.get("loss_mask"), entry.get("rollout_log_probs")
    mask = np.ones(length, np.uint8) if given is None else _array(given, np.uint8)
    if drawn is None and reading.log_probs_reader is not None and mask.any():
        raise BadMessage(f"rollout_log_probs is missing: {reading.log_probs_reader}")
    return mask, None if drawn is None else _array(drawn, np.float32)


def _array(values: Any, kind: type[np.generic]) -> NDArray[Any]:
    array = np.asarray(values.numpy() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, kind, "same_kind") and array.dtype.kind not in "iu"):
        raise BadMessage(f"{str(values)[:60]} is no list of {np.dtype(kind).name}")
    cast = array.astype(kind)
    if array.dtype.kind in "iub" and not np.array_equal(cast, array):
        raise BadMessage(f"a number among {str(values)[:60]} does not fit into {np.dtype(kind).name}")
    return cast


def _reward(given: Any, key: str | None) -> float:
    if isinstance(given, Mapping):
        if key is None or key not in given:
            raise BadMessage(f"reward is named {', '.join(map(str, given))}; give reward.reward_key, the one that counts")
        given = given[key]
    if given is None:
        raise BadMessage("it has no reward")
    return float(given)


def _parts(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns a sample's named rewards: Myxo's own, or those of a reward that is several by name, as slime stores it."""
    given = entry.get(PARTS, entry.get("reward"))
    named = given.items() if isinstance(given, Mapping) else ()
    return {str(name): float(value) for name, value in named if isinstance(value, int | float) and math.isfinite(value)}
