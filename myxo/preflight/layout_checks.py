"""Whether ranks and engines can share the model as the config has it, and whether the trainer's settings go together."""

from __future__ import annotations

from collections.abc import Iterator

from myxo.preflight.inspection import Inspection, architecture_of
from shared.config.learning_rate import LearningRateSchedule
from shared.model import recomputation
from shared.model.architecture import Architecture
from shared.model.lora_targets import Lora
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.model.tensor_table import megatron_parameters
from shared.model.trainable_parameters import Freezing
from shared.runtime.errors import BadInput, ConfigError


def check_ranks(inspection: Inspection) -> Iterator[BadInput]:
    """Yields where the layout divides neither the ranks nor the models."""
    config, trainer, actor = inspection.config, inspection.config.trainer, inspection.architecture
    layout = ParallelLayout.of(trainer)  # raises ConfigError or Problems
    yield from layout.world_problems(trainer.ranks("actor"))
    if config.algorithm.has_critic and trainer.ranks("critic") != trainer.ranks("actor"):
        for problem in layout.world_problems(trainer.ranks("critic")):
            yield ConfigError(problem.field, problem.value, f"{problem.expected} (critic_num_gpus_per_node)")
    if isinstance(actor, Architecture):
        yield from division_problems(actor, layout, trainer.megatron)
    if config.algorithm.has_critic and trainer.critic_load is not None:
        critic = architecture_of(trainer.critic_load)
        if isinstance(critic, Architecture) and critic != actor:
            for problem in division_problems(critic, layout, trainer.megatron):
                yield ConfigError(problem.field, problem.value, f"{problem.expected} (critic_load)")


def check_engines(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields where an engine's GPUs cannot share the model's heads as SGLang does: it divides query heads, divides or copies the others."""
    gpus, model = inspection.config.rollout.rollout_num_gpus_per_engine, inspection.architecture
    if not isinstance(model, Architecture):
        return
    heads = {"attention heads": model.num_attention_heads}
    if model.latent is None and model.num_key_value_heads > gpus:
        heads["key/value heads"] = model.num_key_value_heads
    if undivided := [f"{count} {what}" for what, count in heads.items() if count % gpus]:
        yield ConfigError("rollout.rollout_num_gpus_per_engine", gpus, f"a divisor of the model's {', '.join(undivided)}")


def check_training(inspection: Inspection) -> Iterator[BadInput]:
    """Yields which settings of adapters, recomputation and learning rate do not go together."""
    config, trainer, actor = inspection.config, inspection.config.trainer, inspection.architecture
    try:
        recomputation.megatron_fields(trainer)
    except ConfigError as error:
        yield error
    steps = config.rollout.num_rollout * trainer.num_steps_per_rollout
    yield from _warm_start(inspection)
    rates = [trainer.lr] + ([trainer.critic_lr] if trainer.critic_lr is not None and config.algorithm.has_critic else [])
    for rate in rates:
        try:
            LearningRateSchedule(rate, trainer.min_lr, trainer.lr_warmup_iters, steps, trainer.lr_decay_style)
        except ConfigError as error:
            yield error
            break
    if not isinstance(actor, Architecture):
        return
    patterns = Freezing(tuple(trainer.only_train_params_name_list), tuple(trainer.freeze_params_name_list))
    if not patterns.nothing:
        try:
            patterns.check(megatron_parameters(actor, trainer.megatron.get("transformer_impl") == "transformer_engine"))
        except ConfigError as error:
            yield error
    if trainer.lora_rank is not None:
        lora = Lora(trainer.lora_rank, trainer.lora_alpha, tuple(trainer.target_modules))
        lora.check(actor, ParallelLayout.of(trainer), trainer.megatron)


def _warm_start(inspection: Inspection) -> Iterator[ConfigError]:
    sft = inspection.config.sft
    if sft.sft_data is None:
        return
    try:
        decay = sft.sft_steps if sft.sft_lr_decay_style != "constant" else 0
        LearningRateSchedule(sft.sft_lr, 0.0, sft.sft_warmup_iters, decay, sft.sft_lr_decay_style)
    except ConfigError as error:
        yield ConfigError(error.field.replace("trainer.lr_", "sft.sft_"), error.value, error.expected)
