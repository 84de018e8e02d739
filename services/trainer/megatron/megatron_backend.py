"""Megatron-Core as the trainer's backend, and the choice of parameters that train: all, those that patterns name, or LoRA's adapters."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from services.trainer.backend import Backend
from services.trainer.megatron import lora, parallel_groups, passes, quantization_aware
from services.trainer.megatron.expert_balance import Balancing, update_biases
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config, wrap_chunks
from services.trainer.megatron.hf_weights import LocalParameter, load_hf, parameters
from services.trainer.megatron.megatron_flags import buffer_fields, check_architecture, recomputation, resolve
from services.trainer.megatron.moe import GroupedExperts
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.megatron.packed_sequences import least_saved, obstacle
from services.trainer.megatron.spec import check_layers, named_spec
from services.trainer.parallel import runtime
from services.trainer.parallel.runtime import deadline, gather_json, together
from services.trainer.trainer_settings import TrainerSettings
from shared.model.architecture import Architecture
from shared.model.families import read_architecture, with_drafts
from shared.model.named_layers import is_own_module
from shared.model.parallel_layout import division_problems
from shared.model.quantization import quantization_in_engines
from shared.model.trainable_parameters import Freezing


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
    held = {_name(local, architecture): local for local in parameters(chunks, config, architecture) if _is_trained(local.parameter)}
    with deadline("the exchange of parameter names"):
        everywhere = gather_json(list(held))
    freezing.check(list(dict.fromkeys(name for each in everywhere for name in each)))
    for name, local in held.items():
        local.parameter.requires_grad_(freezing.trains(name))


def _name(local: LocalParameter, architecture: Architecture) -> str:
    """Returns a parameter's name; the last stage's copy of a tied embedding has the embedding's: they train together or not at all."""
    tied_copy = local.name == "output_layer.weight" and architecture.tied_embeddings
    return "embedding.word_embeddings.weight" if tied_copy else local.name


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)  # routers' biases are not among them: no gradient moves them


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
    # a draft layer's input at a fork differs with what comes next
    least = None if architecture.trained_drafts else least_saved(trainer.prefix_sharing, megatron)
    layers = partial(named_spec, trainer.spec, architecture, megatron, trainer.megatron) if named else None
    chunks = build_chunks(architecture, megatron, settings.layout, settings.value_head, layers)
    if named:
        check_layers(trainer.spec, chunks, architecture)
    if settings.lora is not None:
        lora.attach(chunks, megatron, architecture, settings.lora, trainer.seed)
    if not settings.value_head:
        freeze(chunks, megatron, architecture, settings.freezing, settings.lora is not None)
    if trainer.rounds_weights and not settings.value_head:
        quantization_aware.attach(chunks, megatron, architecture, quantization_in_engines(hf_dir, settings.precision))
    if not random:
        with together(f"loading {hf_dir}"):
            load_hf(chunks, megatron, architecture, hf_dir)
    wrapped = wrap_chunks(chunks, megatron, trainer.use_distributed_optimizer, buffer_fields(flags))
    model = MegatronModel(
        architecture,
        megatron,
        settings.layout,
        wrapped,
        settings.value_head,
        settings.lora,
        settings.freezing,
        least,
        chunk_size=trainer.log_probs_tokens,
        balancing=balancing,
        draft_scale=trainer.mtp_loss_scaling_factor,
    )
    with deadline("the making of the optimizer"):
        optimizer = Optimizer(model, trainer, settings.schedule, flags.optimizer)
    return Backend(
        model,
        optimizer,
        passes,
        obstacle(megatron),
        settings.layout.expert == 1,
        lambda balanced: update_biases(model.modules, balanced),
    )
