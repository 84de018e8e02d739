"""Conversion between a Hugging Face checkpoint and Megatron's distributed format (torch_dist), one bucket of tensors at a time.

Both directions build the model in one process without initialising it: its parameters are reserved, never touched, so they
take addresses and no memory, and give the name and offset in the format of each of them. Every bucket is written when it is read.
A model may be larger than the machine's memory.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as write_shards

from services.trainer.megatron import runtime
from services.trainer.megatron.adapters import DIRECTORY, Adapters, write
from services.trainer.megatron.checkpoint import FORMAT, MARKER, find_checkpoint, model_entries, sharded_modules
from services.trainer.megatron.checkpoint_reader import own_errors, read_tensors
from services.trainer.megatron.export import HfWriter, copy_beside_weights
from services.trainer.megatron.gather_plan import gather_units
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config
from services.trainer.megatron.hf_weights import LocalParameter, SafetensorsReader, parameters
from services.trainer.megatron.lora import attach
from services.trainer.megatron.quantized import BlockwiseReader, block_size
from shared.model.architecture import Architecture
from shared.model.families import read_architecture
from shared.model.hf_checkpoint import draft_prefixes
from shared.model.lora_targets import Lora
from shared.model.parallel_layout import ParallelLayout
from shared.model.tensor_table import hf_tensors
from shared.runtime.atomic_files import fsync_tree, publish, scratch
from shared.runtime.errors import ConfigError

Progress = Callable[[int, int], None]
"""A callback that is called with bytes done and bytes in all."""

BUCKET_BYTES = 2 * 1024**3
"""The bytes that are read from a distributed checkpoint at a time, and written to one safetensors file."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_HF_FILES = "hf"
"""The directory of a converted checkpoint for the files beside the weights: config.json, the tokenizer."""


def to_torch_dist(source: Path, target: Path, dtype: str | None, progress: Progress) -> Path:
    """Converts a Hugging Face checkpoint into a checkpoint directory of the trainer, with weights only.

    Args:
        source: its weights may be 8-bit ones (see :mod:`.quantized`), which become bfloat16, or float32 where asked for.
        target: must not exist; it appears complete or not at all, and holds one checkpoint, of step 0.
        dtype: ``float32`` or ``bfloat16``; None for that of the source.

    Returns:
        The checkpoint below ``target``.

    Raises:
        ConfigError: the source is not what its config says, or of an unknown family, or the target exists.
    """
    architecture = read_architecture(source, quantized=True)
    block = block_size(source)
    _check_target(target)
    reading = SafetensorsReader(source) if block is None else BlockwiseReader(source, block)
    with _skeleton(architecture, _dtype(source, dtype)) as model, reading as reader:
        reader.check(hf_tensors(architecture), draft_prefixes(architecture))
        partial = scratch(target)
        step = partial / "step_00000000"
        step.mkdir()
        dist_checkpointing.save(sharded_modules(model), str(step), _Streamed(_Source(model, reader), progress))
        kept = step / _HF_FILES
        kept.mkdir()
        copy_beside_weights(source, kept)
        if block is not None:
            config = json.loads((kept / "config.json").read_text())
            del config["quantization_config"]
            (kept / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        entries = {"format": FORMAT, "step": 0, **model_entries(model), "weights_only": True, "extra": {}}
        (step / MARKER).write_text(json.dumps(entries, indent=2) + "\n")
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
    path, marker = _policy_checkpoint(source, step)
    if hf is None and not (path / _HF_FILES).is_dir():
        raise ConfigError("--hf", None, f"the Hugging Face checkpoint that {path} was trained from, for config and tokenizer")
    hf = hf or path / _HF_FILES
    architecture = read_architecture(hf)
    _check_same(path, marker["architecture"], architecture)
    _check_target(target)
    adapted = marker.get("lora")
    lora = Lora(adapted["rank"], adapted["alpha"], tuple(adapted["targets"])) if adapted else None
    with _skeleton(architecture, DTYPES[marker["dtype"]], lora) as model:
        group, adapters = parallel_state.get_tensor_model_parallel_group(), Adapters(model)
        _read_adapters(path, model, adapters)
        writer = HfWriter(hf, target)
        writer.begin()
        for tensors in _converted(path, model, adapters, progress):
            writer.add(tensors)
        if lora is not None and (whole := adapters.collect(group)) is not None:
            write(writer.scratch / DIRECTORY, whole, lora, hf)
        writer.finish(model.config.params_dtype)
    return target


def _policy_checkpoint(source: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Returns the checkpoint to convert and its marker. Raises as `to_hf`."""
    if (source / MARKER).is_file():
        path, marker = source, json.loads((source / MARKER).read_text())
    else:
        path, marker = find_checkpoint(source, step)
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{path}:format", marker.get("format"), f"{FORMAT}; written by another version of Myxo")
    if marker["value_head"]:
        raise ConfigError(f"{path}:value_head", True, "a policy's checkpoint; a critic has no output layer")
    return path, marker


@torch.no_grad()
def _read_adapters(path: Path, model: MegatronModel, adapters: Adapters) -> None:
    sharded, held = sharded_modules(model)["model0"], adapters.parameters()
    for name, tensor in read_tensors(path, {name: sharded[name] for name in held}).items():
        held[name].copy_(tensor)


def _converted(path: Path, model: MegatronModel, adapters: Adapters, progress: Progress) -> Iterator[dict[str, Tensor]]:
    """Yields the checkpoint's tensors under their Hugging Face names, bucket by bucket, with the adapters merged into them."""
    architecture, group = model.architecture, parallel_state.get_tensor_model_parallel_group()
    local = {p.name: p for p in parameters(model.modules, model.config, architecture)}
    sharded = sharded_modules(model)["model0"]
    total, done = sum(p.parameter.nbytes for p in local.values()), 0
    for names in _buckets([unit.name for unit in gather_units(architecture, [list(local)])], local):
        read = read_tensors(path, {name: sharded[name] for name in names})
        tensors: dict[str, Tensor] = {}
        for name in names:
            recipe = local[name].recipe
            made = recipe.unfuse(read[name], architecture)
            shapes = [(hf_name, tuple(t.shape)) for hf_name, t in zip(recipe.hf_names, made, strict=True)]
            tensors.update(zip(recipe.hf_names, adapters.merged(shapes, made, group) or [], strict=True))
        yield tensors
        done += sum(local[name].parameter.nbytes for name in names)
        progress(done, total)


class _Source:
    """The tensors of a Hugging Face checkpoint, for views of parameters that hold nothing yet."""

    def __init__(self, model: MegatronModel, reader: SafetensorsReader) -> None:
        self._reader, self._architecture = reader, model.architecture
        self._by_storage = {
            p.parameter.untyped_storage().data_ptr(): p for p in parameters(model.modules, model.config, model.architecture)
        }
        self.bytes = sum(p.parameter.nbytes for p in self._by_storage.values())
        self._last: tuple[str, Tensor] | None = None

    def tensor(self, target: Tensor) -> Tensor:
        """Returns what belongs into a parameter, or into the view ``target`` of it."""
        local = self._by_storage[target.untyped_storage().data_ptr()]
        if self._last is None or self._last[0] != local.name:  # the halves of a gated MLP are asked for one by one
            self._last = None
            made = local.recipe.fuse(
                [self._reader.read(name) for name in local.recipe.hf_names], self._architecture, local.parameter.size(0)
            )
            self._last = local.name, made.to(local.parameter.dtype).contiguous()
        return self._last[1].as_strided(target.size(), target.stride(), target.storage_offset())


class _Filling(MCoreSavePlanner):
    """Hands the file writer each tensor when it writes it."""

    def __init__(self, source: _Source, progress: Progress) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._source, self._progress, self._done = source, progress, 0

    def resolve_data(self, write_item: Any) -> Any:
        held = super().resolve_data(write_item)
        if not isinstance(held, Tensor):
            return held
        self._done += held.nbytes
        self._progress(self._done, self._source.bytes)
        return self._source.tensor(held)


class _Streamed(TorchDistSaveShardedStrategy):
    """torch_dist's shards in one file, written as they are read."""

    def __init__(self, source: _Source, progress: Progress) -> None:
        super().__init__("torch_dist", 1)
        self._planner = _Filling(source, progress)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = FileSystemWriter(checkpoint_dir, single_file_per_rank=True, thread_count=1, sync_files=True)
        with own_errors():
            write_shards(mcore_to_pyt_state_dict(flat, False), storage_writer=writer, planner=self._planner)


@contextmanager
def _skeleton(architecture: Architecture, dtype: torch.dtype, lora: Lora | None = None) -> Iterator[MegatronModel]:
    """Yields the model in a world of one, its parameters reserved and not initialised, but for the adapters of ``lora``."""
    layout = ParallelLayout()
    runtime.start(layout, 0, 600.0)
    try:
        config = transformer_config(architecture, layout, dtype, {"perform_initialization": False})
        built = build_chunks(architecture, config, layout)
        if lora is not None:
            attach(built, config, architecture, lora, seed=0)
        chunks: Any = [SimpleNamespace(module=chunk) for chunk in built]
        yield MegatronModel(architecture, config, layout, chunks, lora=lora)
    finally:
        runtime.stop()


def _buckets(names: list[str], local: dict[str, LocalParameter]) -> Iterator[list[str]]:
    bucket: list[str] = []
    size = 0
    for name in names:
        if bucket and size + local[name].parameter.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += local[name].parameter.nbytes
    yield bucket


def _dtype(source: Path, given: str | None) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    name = given or config.get("dtype") or config.get("torch_dtype")
    if name not in DTYPES:
        raise ConfigError("--dtype", name, f"one of {', '.join(DTYPES)}, where config.json says neither")
    return DTYPES[name]


def _check_target(target: Path) -> None:
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")


def _check_same(path: Path, saved: dict[str, Any], architecture: Architecture) -> None:
    mine = json.loads(json.dumps(architecture.as_json()))
    for key in sorted((mine.keys() | saved.keys()) - {"draft_layers"}):
        if mine.get(key) != saved.get(key):
            raise ConfigError(f"{path}:{key}", saved.get(key), f"{mine.get(key)!r}, as in the config.json given for it")
