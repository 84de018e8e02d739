"""Megatron-Core as the trainer's backend."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.trainer.backend import Backend
from services.trainer.megatron import lora, parallel_groups, passes
from services.trainer.megatron.expert_balance import Balancing, update_biases
from services.trainer.megatron.freezing import freeze
from services.trainer.megatron.gpt_model import MegatronModel, build_chunks, transformer_config, wrap_chunks
from services.trainer.megatron.hf_weights import load_hf
from services.trainer.megatron.megatron_flags import buffer_fields, check_architecture, recomputation, resolve
from services.trainer.megatron.optimizer import Optimizer
from services.trainer.megatron.packed_sequences import least_saved, obstacle
from services.trainer.megatron.spec import check_layers, named_spec
from services.trainer.parallel import runtime
from services.trainer.parallel.runtime import deadline, together
from services.trainer.trainer_settings import TrainerSettings
from shared.model.families import read_architecture, with_drafts
from shared.model.named_layers import is_own_module
from shared.model.parallel_layout import division_problems


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
        chunk_size=trainer.log_probs_chunk_size,
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
