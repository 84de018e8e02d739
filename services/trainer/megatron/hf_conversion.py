"""Conversion between a Hugging Face checkpoint and Megatron's distributed format (torch_dist), one bucket of tensors at a time.

Both directions build the model in one process without initialising it: its parameters are reserved, never touched, so they
take addresses and no memory, and give the name and offset in the format of each of them. Every bucket is written when it is read.
A model may be larger than the machine's memory.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories, apply_factory_merges
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as read_shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from services.trainer.megatron import parallel_groups
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config
from services.trainer.megatron.hf_weights import parameter_of, parameters
from services.trainer.megatron.lora import attach
from services.trainer.megatron.parameter_gathering import MegatronGatherPlan
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import (
    FORMAT,
    check_architecture,
    model_entries,
    policy_checkpoint,
)
from services.trainer.parallel.checkpoint_parts import MARKER, METADATA
from services.trainer.parallel.export import copy_beside_weights, copy_vision, save_hf, write_json
from services.trainer.parallel.gather_plan import Bucket, GatherUnit
from services.trainer.parallel.joint_write import alone
from services.trainer.parallel.safetensors_reader import SafetensorsReader, reader_of
from services.trainer.parallel.staged_shards import StagedShards
from services.trainer.trainer_settings import DTYPES
from shared.model.architecture import Architecture
from shared.model.families import read_architecture, with_found_drafts
from shared.model.parallel_layout import ParallelLayout
from shared.model.quantization import ENTRY
from shared.model.trainable_parameters import Lora
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import fsync_tree, publish, scratch

Progress = Callable[[int, int], None]  # A callback that is called with bytes done and bytes in all
FILE_BYTES = 2 * 1024**3  # the bytes that are read from a distributed checkpoint at a time, and written to one safetensors file
_HF_FILES = "hf"  # The directory of a converted checkpoint for the files beside the weights: config.json, the tokenizer


def to_torch_dist(source: Path, target: Path, dtype: str | None, progress: Progress) -> Path:
    """Converts a Hugging Face checkpoint into a checkpoint directory of the trainer, with weights only.

    Args:
        source: its weights may be 8-bit or MXFP4 ones, which become bfloat16, or float32 where asked for.
        target: must not exist; it appears complete or not at all, and holds one checkpoint, of step 0.
        dtype: ``float32`` or ``bfloat16``; None for that of the source.

    Returns:
        The checkpoint below ``target``.

    Raises:
        ConfigError: the source is not what its config says, or of an unknown family, or the target exists.
    """
    _check_target(target)
    reader = reader_of(source)
    architecture = with_found_drafts(read_architecture(source, quantized=True), reader.names())
    reader.check(architecture)
    found = json.loads((source / "config.json").read_text())
    quantized = found.get(ENTRY) is not None
    name = dtype or found.get("dtype") or found.get("torch_dtype") or ("bfloat16" if quantized else None)
    if name not in DTYPES:
        raise ConfigError("--dtype", name, f"one of {', '.join(DTYPES)}, where config.json says neither")
    with _skeleton(architecture, DTYPES[name]) as model:
        partial = scratch(target)
        step = partial / "step_00000000"
        step.mkdir()
        shards = _StreamedShards(model, reader, progress)
        model.stage_state(model.sharded_state(), None, shards, step)
        (step / METADATA).write_bytes(shards.index([shards.write()], 0))
        kept = step / _HF_FILES
        kept.mkdir()
        copy_beside_weights(source, kept)
        copy_vision(source, kept)
        if quantized:
            config = json.loads((kept / "config.json").read_text())
            del config[ENTRY]
            write_json(kept / "config.json", config)
        entries = {"format": FORMAT, "step": 0, **model_entries(model), "weights_only": True, "extra": {}}
        write_json(step / MARKER, entries)
        fsync_tree(partial)
        publish(partial, target)
    return target / step.name


def to_hf(source: Path, target: Path, hf: Path | None, step: int | None, progress: Progress) -> Path:
    """Converts a checkpoint of the trainer, or one made by :func:`to_torch_dist`, into a Hugging Face checkpoint.

    Args:
        source: a directory of checkpoints, or one of them. step: which; None for the newest.
        target: must not exist; it appears complete or not at all.
        hf: where config and tokenizer come from; None for the files that a converted checkpoint keeps.

    Raises:
        CheckpointMissing: there is none. ConfigError: it is a critic's, or of another model than ``hf``; or the target exists.
    """
    path, marker = policy_checkpoint(source, step)
    if hf is None and not (path / _HF_FILES).is_dir():
        raise ConfigError("--hf", None, f"the Hugging Face checkpoint that {path} was trained from, for config and tokenizer")
    hf = hf or path / _HF_FILES
    architecture = replace(read_architecture(hf), trained_drafts=marker["architecture"].get("trained_drafts", 0))
    check_architecture(path, marker, architecture)
    _check_target(target)
    adapted = marker.get("lora")
    lora = Lora(adapted["rank"], adapted["alpha"], tuple(adapted["targets"])) if adapted else None
    with _skeleton(architecture, DTYPES[marker["dtype"]], lora) as model:
        _read_adapters(path, model)
        save_hf(StoredModel(model, path, progress), hf, target, FILE_BYTES)
    return target


@torch.no_grad()
def _read_adapters(path: Path, model: MegatronModel) -> None:
    sharded = model.sharded_state()["model0"]
    held = {name: tensor for name, tensor in model.modules[0].named_parameters() if getattr(tensor, "adapter", False)}
    for name, tensor in _read_tensors(path, {name: sharded[name] for name in held}).items() if held else ():
        held[name].copy_(tensor)


def _read_tensors(path: Path, shards: dict[str, Any]) -> dict[str, Tensor]:
    """Reads tensors into new memory, each by its offset in the whole. Megatron reads all layers that are stacked under one name, or none.

    Args:
        path: a checkpoint. shards: Megatron's ShardedTensors, or factories of them, by any name; their data is not touched.

    Returns:
        By the same names, whole tensors of the shards' shapes.

    Raises:
        ConfigError: the checkpoint does not hold one of them.
    """
    state, reader = dict(shards), CachedMetadataFileSystemReader(path)
    factories, _ = extract_matching_values(state, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True)
    apply_factories(state)
    stored, parts = reader.read_metadata().state_dict_metadata, dict[str, list[Tensor]]()

    def part(shard: ShardedTensor) -> Tensor:
        if shard.key not in stored:
            raise ConfigError(str(path), shard.key, "a parameter of the model; the checkpoint does not hold it")
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)  # one of a stack
        whole = stored[shard.key].size if shard.allow_shape_mismatch else shard.global_shape  # a vocabulary is padded
        empty = torch.empty(shape, dtype=shard.dtype)
        made = replace(shard, data=empty, local_shape=shape, global_shape=tuple(whole), prepend_axis_num=0)
        parts.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(made))
        return empty.view(shard.local_shape)

    found = dict_list_map_outplace(part, state)
    targets: dict[str, Any] = {key: LocalShardsContainer(held) for key, held in parts.items()}
    try:
        read_shards(targets, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    except CheckpointException as error:  # gathers the errors of all ranks, here of one
        for cause, _ in error.failures.values():
            raise cause from None
        raise
    return apply_factory_merges(found, factories)


class StoredModel(MegatronGatherPlan):
    """Exports the weights of a checkpoint: each bucket is read into the model's parameters, which hold nothing before and after."""

    def __init__(self, model: MegatronModel, path: Path, progress: Progress) -> None:
        super().__init__(model)
        self._path, self._progress, self._done = path, progress, 0
        self._sharded = model.sharded_state()["model0"]

    def bucket(self, units: Sequence[GatherUnit], dtype: torch.dtype | None = None, destination: int = 0) -> Bucket:
        base = [unit for unit in units if unit.name in self._sharded]  # the adapters have been read
        names = [one.name for unit in base for one in unit.parameters]
        read = _read_tensors(self._path, {name: self._sharded[name] for name in names}) if base else {}
        for name, tensor in read.items():
            self.local[name].parameter.data = tensor
        bucket = super().bucket(units, dtype, destination)
        for name, tensor in read.items():
            self.local[name].parameter.data = tensor.new_empty(0)
        model_dtype = self.model.config.params_dtype
        self._done += sum(unit.nbytes(model_dtype) for unit in base)
        self._progress(self._done, sum(unit.nbytes(model_dtype) for unit in self.units))
        return bucket


class _StreamedShards(StagedShards):
    """Shards that are read from a Hugging Face checkpoint as they are written, in the place of parameters that hold nothing."""

    def __init__(self, model: MegatronModel, reader: SafetensorsReader, progress: Progress) -> None:
        super().__init__(copied=False, places=alone())
        self._reader, self._architecture, self._progress, self._done = reader, model.architecture, progress, 0
        held = parameters(model.modules, model.config, model.architecture)
        self._by_storage = {local.parameter.untyped_storage().data_ptr(): local for local in held}
        self._bytes = sum(local.parameter.nbytes for local in self._by_storage.values())
        self._last: tuple[str, Tensor] | None = None

    def resolve_data(self, write_item: Any) -> Any:
        target = super().resolve_data(write_item)
        if not isinstance(target, Tensor):
            return target
        self._done += target.nbytes
        self._progress(self._done, self._bytes)
        local = self._by_storage[target.untyped_storage().data_ptr()]
        if self._last is None or self._last[0] != local.name:  # the halves of a gated MLP are asked for one by one
            self._last = None
            made = parameter_of(self._reader, local, self._architecture)
            self._last = local.name, made.to(local.parameter.dtype).contiguous()
        made = self._last[1]
        return made.as_strided(target.size(), target.stride(), made.storage_offset() + target.storage_offset())


@contextmanager
def _skeleton(architecture: Architecture, dtype: torch.dtype, lora: Lora | None = None) -> Iterator[MegatronModel]:
    """Yields the model in a world of one, its parameters reserved and not initialised, but for the adapters of ``lora``."""
    layout = ParallelLayout()
    runtime.start(layout, 0, 600.0, parallel_groups)
    try:
        config = transformer_config(architecture, layout, dtype, {"perform_initialization": False})
        built = build_chunks(architecture, config, layout)
        if lora is not None:
            attach(built, config, architecture, lora, seed=0)
        chunks: Any = [SimpleNamespace(module=chunk) for chunk in built]
        yield MegatronModel(architecture, config, layout, chunks, lora=lora)
    finally:
        runtime.stop()


def _check_target(target: Path) -> None:
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
