"""Dumps of a step on disk: batches that can be trained again without the services of a run, and every tensor that a rank used.

The paths are templates as slime has them: ``{rollout_id}`` is the step, ``{rank}`` the rank. A file that ends in ``.pt`` has the format of
slime's own rollout dumps: torch's, with ``{"rollout_id", "samples": [{field: value}]}``. It is read without running what is pickled in it
(torch's ``weights_only``). A file that Myxo has written also holds what slime has no field for: ``version`` and ``mask_below`` of the
batch, and of each sample its group's id and the weight version of each response token; so it is read back to the very batch.
"""

import json
import operator
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from services.trainer.actor import StepResult
from services.trainer.batches import TrainBatch
from shared.config.run_config import RunConfig
from shared.config.service_sections import DUMPS, STEP
from shared.hooks import reward_values
from shared.runtime.errors import BadMessage, ConfigError, PayloadMissing
from shared.runtime.safe_files import replace_file, replacement
from shared.schema import codec
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.kept_tokens import Kept
from shared.schema.ledger import group_id, group_number
from shared.schema.messages import Batch, BatchGroup, Payload
from shared.schema.sample import Sample, segments_of
from shared.store.payload_store import BlockingStore

BLOB_BYTES = 1 << 20


@dataclass(frozen=True)
class DumpedGroup:
    """A group as a dump has it. ``rewards``: of its samples. ``removed``, ``stale``, ``parts``: as in `BatchGroup`."""

    name: str
    samples: Sequence[Sample]
    rewards: Sequence[float]
    removed: Sequence[int] = ()
    stale: Sequence[int] = ()
    parts: Sequence[dict[str, float]] = ()

    def part(self, kept: Sequence[int]) -> "DumpedGroup":
        """Returns the group with the samples at some positions only, ascending; they are renumbered."""
        return DumpedGroup(
            self.name,
            [replace(self.samples[position], index=index) for index, position in enumerate(kept)],
            [self.rewards[position] for position in kept],
            [index for index, position in enumerate(kept) if position in self.removed],
            [index for index, position in enumerate(kept) if position in self.stale],
            [self.parts[position] for position in kept] if self.parts else (),
        )


def subsampled(groups: Sequence[DumpedGroup], share: float) -> list[DumpedGroup]:
    """Returns the first and the last samples of a batch, half of ``share`` each, as slime takes them; groups without any are left out.

    Raises BadMessage where that is no sample at all.
    """
    count = sum(len(group.samples) for group in groups)
    wanted = int(count * share)
    if not wanted:
        raise BadMessage(f"load_debug_rollout_data_subsample = {share:g} leaves none of its {count} samples")
    first, last = wanted // 2, count + (-wanted // 2)  # of an odd number the last half has one more
    found, begin = [], 0
    for group in groups:
        kept = [position for position in range(len(group.samples)) if not first <= begin + position < last]
        found += [group.part(kept)] if kept else []
        begin += len(group.samples)
    return found


def batch_of(step: int, version: int, groups: Sequence[DumpedGroup], mask_below: int = 0) -> tuple[Batch, dict[str, bytes]]:
    """Returns a batch of these groups, and the blobs that its references name."""
    blobs: dict[str, bytes] = {}
    references = []
    for group in groups:
        own = {f"{group.name}.{part}": blob for part, blob in enumerate(sample_codec.encode(group.samples, BLOB_BYTES))}
        references.append(
            BatchGroup(
                group=group.name,
                payload=reference("", own, [sample.length for sample in group.samples]),
                rewards=list(group.rewards),
                removed=tuple(group.removed),
                stale=tuple(group.stale),
                parts=tuple(group.parts) if any(group.parts) else (),
            )
        )
        blobs |= own
    return Batch(step=step, version=version, mask_below=mask_below, groups=references), blobs


SUFFIX = ".pt"  # of files in slime's format
# Myxo's own keys of a sample: its group's id; whether all its tokens are too old for the loss; its named rewards; its `MORE_FIELDS`
GROUP, STALE, PARTS, MORE = "myxo_group", "myxo_stale", "myxo_parts", "myxo_fields"
NUCLEI = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"  # slime's names of the kept tokens
# Fields of a stored sample that slime's have no place for
MORE_FIELDS = {field.name for field in fields(Sample)} - {
    *("group", "index", "rollout", "prompt", "response", "log_probs", "mask", "segments", "finish"),
    *("text", "prompt_text", "label", "metadata", "kept", "pictures"),
}

Finish = Literal["stop", "length", "abort"]
_STATUS: dict[Finish, str] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
_FINISH: dict[Any, Finish] = {status: finish for finish, status in _STATUS.items()} | {"pending": "stop", "failed": "abort"}

# What arrays and numbers of numpy's are pickled as; none of it runs code of the file's
_NUMPY: list[Any] = [
    *[(np._core.multiarray._reconstruct, f"{module}.multiarray._reconstruct") for module in ("numpy.core", "numpy._core")],  # type: ignore[attr-defined]
    *[(np._core.multiarray.scalar, f"{module}.multiarray.scalar") for module in ("numpy.core", "numpy._core")],  # type: ignore[attr-defined]
    *[np.ndarray, np.dtype],
    *[type(np.dtype(name)) for name in ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")],
]


def entries(batch: Batch, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Returns the content of a batch's file. ``samples``: by group, in the order of their reference."""
    found = [_entry(sample, group, position, batch.step) for group in batch.groups for position, sample in enumerate(samples[group.group])]
    return {"rollout_id": batch.step, "samples": found, "version": batch.version, "mask_below": batch.mask_below}


def _entry(sample: Sample, group: BatchGroup, position: int, step: int) -> dict[str, Any]:
    number, width = group_number(group.group), len(group.rewards)
    if sample.pictures:
        raise BadMessage(f"sample {sample.name} shows pictures, which files of batches do not hold")
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
        **(dict.fromkeys(NUCLEI) if sample.kept is None else dict(zip(NUCLEI, map(np.ndarray.tolist, sample.kept), strict=True))),
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


def read_slime_dump(path: Path) -> dict[str, Any]:
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


def groups_of(content: Mapping[str, Any], path: Path, step: int, config: RunConfig, version: int) -> list[DumpedGroup]:
    """Returns the groups of a file's samples, in the order of their first samples. Raises BadMessage, naming file, sample and field.

    Args:
        version: of all tokens, unless Myxo has written the file.
    """
    members: dict[Any, list[Mapping[str, Any]]] = {}
    for position, entry in enumerate(content["samples"]):
        if not isinstance(entry, Mapping):
            raise BadMessage(f"{path}: sample {position} is a {type(entry).__name__}; expected a dict of its fields")
        index = entry.get("group_index")
        members.setdefault(position // config.rollout.n_samples_per_prompt if index is None else index, []).append(entry)
    names = [str(entries[0].get(GROUP, group_id(step * len(members) + at))) for at, entries in enumerate(members.values())]
    same = None if "version" in content else version
    return [_slime_group(entries, name, path, config, same) for entries, name in zip(members.values(), names, strict=True)]


def _slime_group(entries: Sequence[Mapping[str, Any]], name: str, path: Path, config: RunConfig, version: int | None) -> DumpedGroup:
    rollouts: dict[Any, int] = {}
    samples, rewards, parts = [], [], []
    for position, entry in enumerate(entries):
        where = f"{path}: sample {entry.get('index', position)} of group {name}"
        rollout = rollouts.setdefault(position if (given := entry.get("rollout_id")) is None else ("rollout", given), len(rollouts))
        try:
            samples.append(_slime_sample(entry, name, position, rollout, config, version))
            score = reward_values.read(entry.get("reward"), config.reward.reward_key)
            rewards.append(score.reward)
            parts.append(score.parts if PARTS not in entry else reward_values.named(entry[PARTS]))
        except (BadMessage, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BadMessage(f"{where}: {what}") from None
    removed = [position for position, entry in enumerate(entries) if entry.get("remove_sample")]
    stale = [position for position, entry in enumerate(entries) if entry.get(STALE)]
    return DumpedGroup(name, samples, rewards, removed, stale, parts)


def _slime_sample(entry: Mapping[str, Any], group: str, index: int, rollout: int, config: RunConfig, version: int | None) -> Sample:
    tokens, length = _array(entry["tokens"], np.int32), operator.index(entry["response_length"])
    if not 0 <= length < len(tokens):
        raise BadMessage(f"response_length is {length}, of {len(tokens)} tokens")
    masked, sampled = entry.get("loss_mask"), entry.get("rollout_log_probs")
    mask = np.ones(length, np.uint8) if masked is None else _array(masked, np.uint8)  # without one, all tokens are trained
    if sampled is None and config.log_probs_reader is not None and mask.any():
        raise BadMessage(f"rollout_log_probs is missing: {config.log_probs_reader}")
    sample = Sample(
        group=group,
        index=index,
        prompt=tokens[: len(tokens) - length],
        response=tokens[len(tokens) - length :],
        log_probs=None if sampled is None else _array(sampled, np.float32),
        mask=mask,
        segments=segments_of(_array(entry["weight_versions"], np.int32) if version is None else np.full(length, version, np.int32)),
        finish=_finish(entry),
        text=entry.get("response") or "",
        prompt_text=entry.get("prompt") or "",
        label=None if entry.get("label") is None else str(entry["label"]),
        metadata=entry.get("metadata") or {},
        rollout=rollout,
        kept=_kept(entry),
    )
    for name, value in entry.get(MORE, {}).items():
        if name in MORE_FIELDS:
            setattr(sample, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    sample.check()
    return sample


def _finish(entry: Mapping[str, Any]) -> Finish:
    """Returns how a sample without pictures ended. Raises BadMessage."""
    for field in ("multimodal_inputs", "multimodal_train_inputs"):  # of a text alone {"images": None}
        if any(value is not None and len(value) for value in (entry.get(field) or {}).values()):
            raise BadMessage(f"{field}: pictures are not trained here")
    if (status := entry.get("status", "completed")) not in _FINISH:
        raise BadMessage(f"status is {status!r}; expected one of {', '.join(_FINISH)}")
    return _FINISH[status]


def _kept(entry: Mapping[str, Any]) -> Kept | None:
    nuclei = [entry.get(name) for name in NUCLEI]
    return None if any(values is None for values in nuclei) else Kept(*(_array(values, np.int32) for values in nuclei))


def _array(values: Any, kind: type[np.generic]) -> NDArray[Any]:
    array = np.asarray(values.numpy() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, kind, "same_kind") and array.dtype.kind not in "iu"):
        raise BadMessage(f"{str(values)[:60]} is no list of {np.dtype(kind).name}")
    cast = array.astype(kind)
    if array.dtype.kind in "iub" and not np.array_equal(cast, array):
        raise BadMessage(f"a number among {str(values)[:60]} does not fit into {np.dtype(kind).name}")
    return cast


SCHEMA = 1


def write_batch(template: str, batch: Batch, store: BlockingStore) -> Path:
    """Writes a batch to one file: in slime's format where the path ends in ``.pt``, else its references and payloads as they are in the
    store, as MessagePack. Returns the path.

    Raises PayloadMissing, BadMessage, DeadlineExceeded, StoreRefused; OSError.
    """
    payloads = [group.payload for group in batch.groups]
    stored = list(zip(batch.groups, store.stream(payloads), strict=True))
    path = Path(filled(template, batch.step, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == SUFFIX:
        content = entries(batch, {group.group: sample_codec.decode(blobs) for group, blobs in stored})
        with replacement(path) as file:
            torch.save(content, file)
        return path
    by_key = {key: blob for group, blobs in stored for key, blob in zip(group.payload.keys, blobs, strict=True)}
    replace_file(path, codec.pack({"schema": SCHEMA, "batch": batch.encode(), "blobs": by_key}))
    return path


def write_tensors(template: str, batch: TrainBatch, results: Sequence[StepResult], rank: int) -> Path:
    """Writes all tensors that a rank's optimizer steps of a batch read, as safetensors: ``step.micro_batch.name``.

    Per-token fields are aligned to the labels, so that engine's and trainer's log-probs of a token have the same index. The file's metadata
    holds the samples of each micro-batch and what each optimizer step gave. Returns the path.
    """
    tensors, samples = {}, {}
    for step_index, step in enumerate(batch.steps):
        for index, micro_batch in enumerate(step):
            name, packed = f"{step_index}.{index}", micro_batch.packed
            samples[name] = [batch.partition.name(sample) for sample in micro_batch.indices]
            plain = {"tokens": packed.tokens, "labels": packed.labels, "loss_mask": packed.loss_mask, "cu_seqlens": packed.cu_seqlens}
            replayed = {} if packed.experts is None else {"experts": packed.experts}
            if packed.kept is not None:
                replayed |= {"kept_ids": torch.from_numpy(packed.kept.ids), "kept_offsets": torch.from_numpy(packed.kept.offsets)}
            tensors.update({f"{name}.{field}": tensor.contiguous().cpu() for field, tensor in (plain | replayed | packed.fields).items()})
    path = Path(filled(template, batch.step, rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"step": batch.step, "version": batch.version, "samples": samples, "results": [asdict(result) for result in results]}
    save_file(tensors, path, metadata={"myxo": json.dumps(described)})
    return path


def filled(template: str, step: int, rank: int) -> str:
    """Returns the path for one step and rank."""
    return template.replace("{rollout_id}", str(step)).replace("{rank}", str(rank))


STORED = 3  # batches that stay in memory: the one that is trained, the next one, which is read ahead, and one more
# the first bytes of files that torch has written: an archive, or a pickle in its old format, which is refused with a reason
_TORCH = b"PK\x03\x04", b"\x80"


class DumpedBatches:
    """The batches in the files of ``load_debug_rollout_data``; every rank reads them itself.

    A path without ``{rollout_id}`` is one file that every step trains.
    """

    def __init__(self, config: RunConfig) -> None:
        debug = config.debug
        template = debug.load_debug_rollout_data or ""  # a run without steps has no batches
        self._config, self._template, self._share = config, template, debug.load_debug_rollout_data_subsample
        self._read: OrderedDict[int, tuple[Batch, dict[str, bytes]]] = OrderedDict()
        self._lock = threading.Lock()  # shards are read ahead in a thread

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step. Raises ConfigError for a file that is missing, or is none that can be trained."""
        return self._step(step)[0]

    def stream(self, payloads: Sequence[Payload], deadline: float = 60.0) -> Iterator[list[bytes]]:
        """Yields the blobs of each payload in order, as `BlockingStore.stream` does. Raises PayloadMissing."""
        yield from map(self.read, payloads)

    def read(self, payload: Payload, deadline: float = 60.0) -> list[bytes]:
        """Returns the blobs of a payload, as `BlockingStore.read` does. Raises PayloadMissing."""
        step = int(payload.keys[0].partition(":")[0])
        _, blobs = self._step(step)
        if missing := [key for key in payload.keys if key not in blobs]:
            raise PayloadMissing(f"the file of step {step} does not hold the blob {missing[0]}")
        return [blobs[key] for key in payload.keys]

    def close(self) -> None:
        with self._lock:
            self._read.clear()

    def _step(self, step: int) -> tuple[Batch, dict[str, bytes]]:
        with self._lock:
            if step not in self._read:
                path = Path(filled(self._template, step, 0))
                try:
                    batch, blobs = self._loaded(path, step)
                except (BadMessage, LookupError, TypeError, ValueError) as error:
                    raise ConfigError(DUMPS, str(path), f"a batch that can be trained; {error}") from None
                except OSError as error:
                    raise ConfigError(DUMPS, str(path), f"a file that can be read; {error.strerror or error}") from None
                groups = []  # every file that is read has keys of its own, which name the step
                for group in batch.groups:
                    payload = group.payload.model_copy(update={"keys": [f"{step}:{key}" for key in group.payload.keys]})
                    groups.append(group.model_copy(update={"payload": payload}))
                batch = batch.model_copy(update={"step": step, "groups": groups})
                self._read[step] = batch, {f"{step}:{key}": blob for key, blob in blobs.items()}
                while len(self._read) > STORED:
                    self._read.popitem(last=False)
            return self._read[step]

    def _loaded(self, path: Path, step: int) -> tuple[Batch, dict[str, bytes]]:
        with path.open("rb") as file:
            of_torch = file.read(4).startswith(_TORCH)
        if of_torch:
            content = read_slime_dump(path)
            version = content.get("version", step // self._config.weights.update_weights_interval)
            groups = groups_of(content, path, step, self._config, version)
            return batch_of(step, version, groups if self._share is None else subsampled(groups, self._share), content.get("mask_below", 0))
        content = codec.unpack(path.read_bytes())
        if not (isinstance(content, dict) and codec.is_schema(content.get("schema"), SCHEMA)):
            raise BadMessage(f"it is no batch of schema {SCHEMA}")
        batch, blobs = Batch.decode(content["batch"]), content["blobs"]
        if self._share is None:
            return batch, blobs
        groups = []
        for group in batch.groups:
            samples = sample_codec.decode(blobs[key] for key in group.payload.keys)
            groups.append(DumpedGroup(group.group, samples, group.rewards, group.removed, group.stale, group.parts))
        return batch_of(step, batch.version, subsampled(groups, self._share), batch.mask_below)


def dumped_steps(template: str) -> list[int]:
    """Returns the steps that there are files of, ascending. Raises ConfigError where there are none, or the path names no step."""
    path = Path(template)
    if STEP not in path.name:
        raise ConfigError(DUMPS, template, f"{STEP} in the file's name, for the step")
    pattern = re.compile(re.escape(path.name).replace(re.escape(STEP), r"(\d+)") + r"\Z")
    found = [matched for entry in (path.parent.glob("*") if path.parent.is_dir() else ()) if (matched := pattern.match(entry.name))]
    if not found:
        raise ConfigError(DUMPS, template, f"files that save_debug_rollout_data has written, {STEP} for the step")
    return sorted(int(matched[1]) for matched in found)
