"""Conversion between a Hugging Face checkpoint and Megatron's distributed format (torch_dist), one bucket of tensors at a time;
and the gathering of a trained model's parameters under Hugging Face's names.

Both directions build the model in one process without initialising it: its parameters are reserved, never touched, so they
take addresses and no memory, and give the name and offset in the format of each of them. Every bucket is written when it is read.
A model may be larger than the machine's memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories, apply_factory_merges
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from services.trainer.backend import DTYPES
from services.trainer.megatron import parallel_groups
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config
from services.trainer.megatron.hf_weights import LocalParameter, parameter_of, parameters
from services.trainer.megatron.lora import attach
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import FORMAT, MARKER, METADATA, check_architecture, model_entries, policy_checkpoint
from services.trainer.parallel.export import copy_beside_weights, copy_vision, start_export, write_json
from services.trainer.parallel.gather_plan import Bucket, GatherPlan, GatherUnit
from services.trainer.parallel.joint_write import alone
from services.trainer.parallel.runtime import deadline, device, gather_json
from services.trainer.parallel.safetensors_reader import SafetensorsReader, reader_of
from services.trainer.parallel.staged_shards import CheckpointPart, StagedShards, read_parts
from shared.model.architecture import Architecture
from shared.model.families import read_architecture, with_found_drafts
from shared.model.parallel_layout import ParallelLayout
from shared.model.quantization import ENTRY
from shared.model.tensor_table import TensorSource, parameter_sources
from shared.model.trainable_parameters import Lora
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import fsync_tree, publish, scratch


class MegatronGatherPlan(GatherPlan):
    """The gathering of Megatron's parameters. All ranks construct it together.

    No rank ever holds more than one bucket besides its own shards: the ranks that share a parameter gather it on the first of them, which
    hands it to its destination. Parameters are read when an export runs, any number of times.

    Args:
        apart: gathers over groups of its own, for pushes beside the training.

    Attributes:
        local: what this rank holds, by the names of the units.
    """

    def __init__(self, model: MegatronModel, apart: bool = False) -> None:
        self.model: MegatronModel = model
        if apart:
            self.form_own_groups([parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()])
        held = list(parameters(model.modules, model.config, model.architecture))
        self._adapters = model.adapters
        adapters = [part for pair in self._adapters.values() for part in pair]
        self.local = {local.name: local for local in [*held, *adapters]}
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        shapes = dict(tensor for local in adapters for tensor in local.recipe.tensors)
        with deadline("the exchange of parameter names"):
            reported = gather_json([self.stage, [local.name for local in held], _frozen(held), shapes])
        self._stage_of = [stage for stage, _, _, _ in reported]
        self.holders = _holders(reported)
        self.source = self._stage_of.index(self.stage)
        self.units = gather_units(parameter_sources(model.architecture), [names for _, names, _, _ in reported])
        adapter_sources = {name: TensorSource(((name, tuple(shape)),)) for *_, each in reported for name, shape in each.items()}
        self.adapter_units = gather_units(adapter_sources, [list(each) for *_, each in reported])
        self.frozen = frozenset(name for _, _, names, _ in reported for name in names)

    def deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None = None
    ) -> list[Tensor] | None:
        if not unit.experts:
            return self._deliver(unit, destination, dtypes, targets)
        if targets is None and dist.get_rank() == destination:
            targets = _empty(unit, dtypes)
        for index, one in enumerate(unit.experts):
            self._deliver(one, destination, dtypes, None if targets is None else [target[index] for target in targets])
        return targets

    def _deliver(
        self, unit: GatherUnit, destination: int, dtypes: Sequence[torch.dtype], targets: list[Tensor] | None
    ) -> list[Tensor] | None:
        is_destination = dist.get_rank() == destination
        owner = destination if destination in self.holders[unit.name] else unit.owner
        parts = self.parts(unit, owner)
        if parts is None and is_destination:
            targets = _empty(unit, dtypes) if targets is None else targets
            for target in targets:
                dist.recv(target, src=owner, group=self.group())
        elif parts is not None and is_destination:
            if targets is None:
                return [part.reshape(shape).to(dtype) for part, (_, shape), dtype in zip(parts, unit.tensors, dtypes, strict=True)]
            for target, part in zip(targets, parts, strict=True):
                target.view(part.shape).copy_(part)
        elif parts is not None:
            for part, dtype in zip(parts, dtypes, strict=True):
                dist.send(part.to(dtype).contiguous(), dst=destination, group=self.group())
        return targets

    def parts(self, unit: GatherUnit, owner: int | None = None) -> list[Tensor] | None:
        local, owner = self.local.get(unit.name), unit.owner if owner is None else owner
        if local is None or owner not in dist.get_process_group_ranks(local.group):
            return None
        whole = self._whole(local, owner)
        parts = None if whole is None else local.recipe.parts(whole, self.model.architecture)
        for index, (name, shape) in enumerate(unit.tensors):
            if name in self._adapters:
                a, b = (self._whole(part, owner) for part in self._adapters[name])
                if parts is not None and a is not None and b is not None:  # all on the same rank; computed in float32, rounded once
                    weight, scale = parts[index].reshape(shape), self.model.lora.scale if self.model.lora else 0.0
                    parts[index] = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
        return parts

    def is_whole(self, unit: GatherUnit) -> bool:
        local = self.local.get(unit.name)
        if local is None or unit.experts or not local.recipe.is_view or any(name in self._adapters for name, _ in unit.tensors):
            return False
        return unit.owner == dist.get_rank() and local.split_dimension is None

    def _whole(self, local: LocalParameter, owner: int) -> Tensor | None:
        shard, dimension = local.parameter.detach(), local.split_dimension
        is_owner = dist.get_rank() == owner
        if dimension is None:
            return shard if is_owner else None
        group = self.group(local.group)
        shards = [torch.empty_like(shard) for _ in range(group.size())] if is_owner else None
        dist.gather(shard.contiguous(), shards, group=group, group_dst=dist.get_group_rank(group, owner))
        return local.recipe.unshard(shards, dimension) if shards is not None else None


def _empty(unit: GatherUnit, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device()) for (_, shape), dtype in zip(unit.tensors, dtypes, strict=True)]


def plan_of(model: MegatronModel, apart: bool) -> MegatronGatherPlan:
    """Returns the plan by which a model's parameters are gathered. ``apart``: over groups of its own."""
    return MegatronGatherPlan(model, apart)


def _holders(reported: Sequence[Sequence[Any]]) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for rank, (_, names, _, adapters) in enumerate(reported):
        for name in dict.fromkeys([*names, *adapters]):
            holders.setdefault(name, []).append(rank)
    return holders


def _frozen(held: Sequence[LocalParameter]) -> list[str]:
    return [local.name for local in held if isinstance(local.parameter, torch.nn.Parameter) and not local.parameter.requires_grad]


def gather_units(sources: Mapping[str, TensorSource], held: Sequence[Sequence[str]]) -> list[GatherUnit]:
    """Returns the units to be sent with their owners, in the order of ``sources``.

    Args:
        held: by rank, the global names of the parameters that it holds.
    """
    position = {name: index for index, name in enumerate(sources)}
    owners: dict[str, int] = {}
    chosen: dict[TensorSource, str] = {}
    for rank, names in enumerate(held):
        for name in names:
            if name not in owners:
                # the last pipeline stage's copy of a tied embedding becomes the same tensors as the first stage's
                chosen.setdefault(sources[name], name)
                owners[name] = rank
    units: dict[Any, list[GatherUnit]] = {}
    for made, name in sorted(chosen.items(), key=lambda item: position[item[1]]):
        if made.expert is None:
            units[name] = [GatherUnit(name, owners[name], made.tensors, made.float32)]
        else:
            part = tuple((tensor, shape[1:]) for tensor, shape in made.tensors)
            units.setdefault(made.tensors, []).append(GatherUnit(name, owners[name], part, made.float32))
    return [found[0] if isinstance(key, str) else replace(found[0], tensors=key, experts=tuple(found)) for key, found in units.items()]


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
        start_export(StoredModel(model, path, progress), hf, target, FILE_BYTES, copied=False).finish()
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
    state, parts = dict(shards), list[CheckpointPart]()
    factories, _ = extract_matching_values(state, lambda v: isinstance(v, ShardedTensorFactory), return_lists_as_dicts=True)
    apply_factories(state)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata

    def part(shard: ShardedTensor) -> Tensor:
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)  # one of a stack
        whole = getattr(stored.get(shard.key), "size", ()) if shard.allow_shape_mismatch else shard.global_shape  # a vocabulary is padded
        parts.append(CheckpointPart(shard.key, empty := torch.empty(shape, dtype=shard.dtype), tuple(shard.global_offset), tuple(whole)))
        return empty.view(shard.local_shape)

    found = dict_list_map_outplace(part, state)
    read_parts(parts, path)
    return apply_factory_merges(found, factories)


class StoredModel(MegatronGatherPlan):
    """Exports the weights of a checkpoint: each bucket is read into the model's parameters, which hold nothing before and after."""

    def __init__(self, model: MegatronModel, path: Path, progress: Progress) -> None:
        super().__init__(model)
        self._path, self._progress, self._done = path, progress, 0
        self._sharded = model.sharded_state()["model0"]

    def bucket(self, units: Sequence[GatherUnit], *options: Any, **named: Any) -> Bucket:
        base = [unit for unit in units if unit.name in self._sharded]  # the adapters have been read
        names = [one.name for unit in base for one in unit.parameters]
        read = _read_tensors(self._path, {name: self._sharded[name] for name in names}) if base else {}
        for name, tensor in read.items():
            self.local[name].parameter.data = tensor
        bucket = super().bucket(units, *options, **named)
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
        yield MegatronModel(architecture=architecture, layout=layout, chunks=chunks, dtype=dtype, lora=lora, config=config)
    finally:
        runtime.stop()


def _check_target(target: Path) -> None:
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
