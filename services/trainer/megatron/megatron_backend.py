"""Megatron-Core as the trainer's backend, its flags sorted into its dataclasses, and the choice of parameters that
train: all, those that patterns name, or LoRA's adapters.

Quantization-aware training: layers compute with the numbers that engines get, and the gradients of those move the weights themselves.
"""

import enum
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from services.trainer.backend import Backend, TrainerSettings
from services.trainer.megatron import lora, parallel_groups, passes
from services.trainer.megatron.expert_balance import Balancing, update_biases
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config, wrap_chunks
from services.trainer.megatron.hf_weights import LocalParameter, load_hf, parameters
from services.trainer.megatron.moe import GroupedExperts
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.megatron.packed_sequences import least_saved, obstacle
from services.trainer.megatron.spec import check_layers, named_spec
from services.trainer.parallel import runtime
from services.trainer.parallel.runtime import deadline, gather_json, together
from shared.config import flag_table
from shared.config.trainer_section import OptimizerState, TrainerSection
from shared.model import architecture_flags
from shared.model.architecture import Architecture
from shared.model.architecture_flags import is_own_module
from shared.model.families import read_architecture, with_drafts
from shared.model.parallel_layout import division_problems
from shared.model.quantization import Quantization, QuantizedFormat, quantization_in_engines
from shared.model.trainable_parameters import Freezing
from shared.runtime.errors import ConfigError
from shared.transfer.quantizer import FakeQuantized

FIELD = "trainer.quantization_aware"


class RoundedWeights(torch.nn.Module):
    """The mixin of a layer, or of a layer's experts, whose matrices are rounded while it computes.

    Attributes:
        rounded_format: of the engines' checkpoint. rounded: the linear layers.
    """

    rounded_format: QuantizedFormat
    rounded: list[torch.nn.Module]

    def forward(self, *given: Any, **options: Any) -> Any:
        with _rounded(self.rounded, self.rounded_format):
            return super().forward(*given, **options)


@contextmanager
def _rounded(layers: Sequence[torch.nn.Module], form: QuantizedFormat) -> Iterator[None]:
    held: list[Any] = [layer._parameters["weight"] for layer in layers]
    try:
        for layer, weight in zip(layers, held, strict=True):
            layer._parameters["weight"] = FakeQuantized.apply(weight, form)
        yield
    finally:
        for layer, weight in zip(layers, held, strict=True):
            layer._parameters["weight"] = weight


def quantize_aware(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, found: Quantization | None) -> None:
    """Has the layers compute with rounded weights whose matrices engines have quantized, as ``found`` says.

    Raises ConfigError: that has no groups of 4-bit integers; a part of a matrix that ranks divide, or a layer that fuses several, has no
        whole groups.
    """
    if found is None or found.format.bits == 8:
        raise ConfigError(FIELD, True, "false, or a model.hf_checkpoint in groups of 4-bit integers (`myxo convert --to int4`)")
    chosen = set(_quantized(chunks, config, architecture, found))
    for chunk in chunks:
        experts = [module for module in chunk.modules() if isinstance(module, GroupedExperts)]
        inner = {id(part) for module in experts for part in module.modules()}
        for module in [*experts, *(one for one in chunk.modules() if id(one) not in inner)]:
            parts = module.modules() if isinstance(module, GroupedExperts) else [module]
            layers = [part for part in parts if id(part._parameters.get("weight")) in chosen]
            if layers:
                kind: Any = type(module)
                module.__class__ = type(f"Rounded{kind.__name__}", (RoundedWeights, kind), {})
                module.rounded_format, module.__dict__["rounded"] = found.format, layers


def _quantized(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, found: Quantization) -> Iterator[int]:
    for local in parameters(chunks, config, architecture):
        weight: Tensor = local.parameter
        quantized = [name for name in local.recipe.names if name in found.names]
        if quantized and len(quantized) < len(local.recipe.names):
            raise ConfigError(FIELD, True, f"false: {local.name} fuses {quantized[0]} with a matrix that is not quantized")
        if quantized and weight.shape[-1] % found.format.columns:
            wanted = f"false, or fewer ranks: {weight.shape[-1]} columns of {local.name} are not whole groups of {found.format.columns}"
            raise ConfigError(FIELD, True, wanted)
        if quantized:
            yield id(weight)


# Kind of flag → the dataclasses whose fields flags of that kind are
GROUPS: dict[str, tuple[type, ...]] = {
    "transformer": (TransformerConfig, MLATransformerConfig),
    "optimizer": (OptimizerConfig,),
    "ddp": (DistributedDataParallelConfig,),
}


@dataclass(frozen=True)
class MegatronFlags:
    """The given flags by kind: fields of Megatron's dataclasses with values of their types, and the architecture's flags as given.

    Args:
        transformer: of TransformerConfig and MLATransformerConfig. optimizer: of OptimizerConfig. ddp: of DistributedDataParallelConfig.
        architecture: Megatron's flags, such as ``num_layers``; they change nothing and are compared with the checkpoint's.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)


def resolve(given: Mapping[str, Any]) -> MegatronFlags:
    """Sorts and types the flags of ``[trainer.megatron]``.

    Raises ConfigError: an unknown or refused flag, a wrong value, or one that needs Transformer Engine's layers where they are not.
    """
    flags, plain = MegatronFlags(), flag_table.canonical(given)
    for problem in flag_table.missing_engine(plain):
        raise problem
    ignored = {spelled for spelled, _ in flag_table.without_effect(plain)}
    for name, value in plain.items():
        flag = flag_table.catalogue()[name]
        for group in () if flag.command_line[0] in ignored else flag.groups:
            getattr(flags, group)[name] = value if group == "architecture" else converted(group, name, value)
    return flags


@cache
def _hints(group: str) -> dict[str, Any]:
    return {name: hint for model in GROUPS[group] for name, hint in typing.get_type_hints(model).items()}


def converted(group: str, name: str, value: Any) -> Any:
    """Returns plain data as a dataclass's field holds it: an enum's member by its name. Raises ConfigError where there is no such field."""
    hint = _hints(group).get(name)
    if hint is None:
        raise ConfigError(f"trainer.megatron.{name}", value, "leave it out: the Megatron on the path has no such field")
    return hint[value] if value is not None and isinstance(hint, type) and issubclass(hint, enum.Enum) else value


def check_architecture(flags: MegatronFlags, hf_dir: Path) -> None:
    """Compares Megatron's flags that describe a model with the one that a role starts from. Raises ConfigError where they differ."""
    if flags.architecture:
        architecture_flags.check(flags.architecture, read_architecture(hf_dir))


def buffer_fields(flags: MegatronFlags) -> dict[str, Any]:
    """Returns Megatron's fields about the gradients' buffers."""
    keeping = OptimizerState.of(flags.optimizer)
    narrow = keeping is not None and keeping.main_grads != "fp32"
    return {**flags.ddp, **({"grad_reduce_in_fp32": False} if narrow else {})}


def recomputation(trainer: TrainerSection) -> dict[str, Any]:
    """Returns Megatron's fields about recomputation in the backward pass."""
    if trainer.recomputes_layers:
        method, layers = trainer.recompute_method or "uniform", trainer.recompute_num_layers or 1
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    if trainer.recompute_granularity is None:
        return {}
    modules = {"recompute_modules": trainer.recompute_modules} if trainer.recompute_modules else {}
    return {"recompute_granularity": "selective", **modules}


def freeze(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing, lora: bool) -> None:
    """Freezes parameters that are not to train. This is a collective of all ranks, before gradients and optimizer are made.

    Args:
        lora: only adapters train.

    Raises:
        ConfigError: a pattern fits nothing, nothing is left to train, or Megatron could not compute the gradients; on every rank.
    """
    if lora:
        for parameter in [parameter for chunk in chunks for parameter in chunk.parameters()]:
            parameter.requires_grad_(getattr(parameter, "adapter", False))
    elif not freezing.nothing:
        _freeze_named(chunks, config, architecture, freezing)
    else:
        return
    for experts in [module for chunk in chunks for module in chunk.modules() if isinstance(module, GroupedExperts)]:
        experts.lay_together()
    if config.recompute_granularity is not None:
        for chunk in chunks:
            _let_gradients_begin(chunk)


def _freeze_named(chunks: Sequence[GPTModel], config: TransformerConfig, architecture: Architecture, freezing: Freezing) -> None:
    trained = (local for local in parameters(chunks, config, architecture) if isinstance(local.parameter, torch.nn.Parameter))
    held = {_name(local, architecture): local for local in trained}  # routers' biases are not among them: no gradient moves them
    with deadline("the exchange of parameter names"):
        everywhere = gather_json(list(held))
    freezing.check(list(dict.fromkeys(name for each in everywhere for name in each)))
    for name, local in held.items():
        local.parameter.requires_grad_(freezing.trains(name))


def _name(local: LocalParameter, architecture: Architecture) -> str:
    """Returns a parameter's name; the last stage's copy of a tied embedding has the embedding's: they train together or not at all."""
    tied_copy = local.name == "output_layer.weight" and architecture.tied_embeddings
    return "embedding.word_embeddings.weight" if tied_copy else local.name


def _let_gradients_begin(chunk: GPTModel) -> None:
    """Lets inputs ask for gradients: a recomputed layer gets none unless its input asks for one, which the output of a frozen
    embedding does not, and then no adapter of the stage would train."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is None or any(parameter.requires_grad for parameter in embedding.parameters()):
        return

    def ask(module: torch.nn.Module, given: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()

    embedding.register_forward_hook(ask)


def create(settings: TrainerSettings, hf_dir: Path, random: bool, initialized: Callable[[], None] | None) -> Backend:
    """Makes this rank's part of a model; the arguments are those of `services.trainer.actor.Actor.create`."""
    flags = resolve(settings.trainer.megatron)
    check_architecture(flags, hf_dir)
    architecture = with_drafts(read_architecture(hf_dir), settings.trainer, settings.value_head)
    trainer = settings.trainer
    overrides = {**recomputation(trainer), **flags.transformer}
    if trainer.deterministic:
        overrides["deterministic_mode"] = True
    for problem in division_problems(architecture, settings.layout, overrides):
        raise problem
    if settings.lora is not None:
        settings.lora.check(architecture, settings.layout, overrides)
    named = is_own_module(trainer.spec, architecture.model_type, trainer.megatron)
    runtime.start(settings.layout, trainer.seed, trainer.collective_timeout, parallel_groups)
    if initialized is not None:
        initialized()
    megatron = transformer_config(architecture, settings.layout, settings.dtype, overrides)
    balancing = Balancing.of(megatron, adapted=settings.lora is not None)
    drafts = architecture.trained_drafts > 0
    least = least_saved(trainer.prefix_sharing, megatron, drafts)
    layers = partial(named_spec, trainer.spec, architecture, megatron, trainer.megatron) if named else None
    chunks = build_chunks(architecture, megatron, settings.layout, settings.value_head, layers)
    if named:
        check_layers(trainer.spec, chunks, architecture)
    if settings.lora is not None:
        lora.attach(chunks, megatron, architecture, settings.lora, trainer.seed)
    if not settings.value_head:
        freeze(chunks, megatron, architecture, settings.freezing, settings.lora is not None)
    if trainer.rounded_by and not settings.value_head:
        quantize_aware(chunks, megatron, architecture, quantization_in_engines(hf_dir, settings.precision))
    if not random:
        with together(f"loading {hf_dir}"):
            load_hf(chunks, megatron, architecture, hf_dir)
    model = MegatronModel(
        architecture=architecture,
        layout=settings.layout,
        chunks=wrap_chunks(chunks, megatron, trainer.use_distributed_optimizer, buffer_fields(flags)),
        dtype=settings.dtype,
        value_head=settings.value_head,
        lora=settings.lora,
        freezing=settings.freezing,
        least_saved=least,
        chunk_size=trainer.log_probs_tokens,
        config=megatron,
        balancing=balancing,
        draft_scale=trainer.mtp_loss_scaling_factor,
    )
    with deadline("the making of the optimizer"):
        optimizer = Optimizer(model, trainer, settings.schedule, flags.optimizer)
    unshared, independent = obstacle(megatron, drafts), settings.layout.expert == 1
    return Backend(model, optimizer, passes, unshared, independent, lambda balanced: update_biases(model.modules, balanced))
