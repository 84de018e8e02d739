"""The run's [trainer] and [weights]: the parallel layout of the model, its training, and how its weights reach the engines."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from shared.config import environment_variables
from shared.config.section import LARGEST_SEED, MUTABLE, RECORDED, Rule, Section, Table, hook, read_where
from shared.hub import hub_names
from shared.runtime.errors import ConfigError, nearest
from shared.store.s3 import ObjectStoreLocation

TOKENS_PER_GPU, LOG_PROBS_TOKENS = 8192, 2048  # what `auto` is where no memory plan settles it

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # Bytes of an element

_DTYPES = {"main_params_dtype": ("fp32", "fp16"), "exp_avg_dtype": tuple(ELEMENT_BYTES), "exp_avg_sq_dtype": tuple(ELEMENT_BYTES)}
"""The flags of the state's dtypes, in the order main weights, first and second moments, and what they may be."""


@dataclass(frozen=True)
class OptimizerState:
    """The keeping of the optimizer's state.

    Args:
        dtypes: of main weights, first and second moments. main_grads: of the gradient buffers.
        offload_fraction: share of the elements whose state lies in host memory.
        overlap: whether it comes and goes while others are computed.
    """

    dtypes: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    main_grads: str = "fp32"
    offload_fraction: float = 0.0
    overlap: bool = False

    FLAGS: ClassVar[tuple[str, ...]] = (
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        *_DTYPES,
    )
    """The flags that this is read from."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "OptimizerState | None":
        """Returns what flags say, name → value; None where Megatron's plain optimizer is meant."""
        if not given.get("optimizer_cpu_offload") and not given.get("use_precision_aware_optimizer"):
            return None
        main, first, second = (str(given.get(name) or "fp32") for name in _DTYPES)
        fraction = float(given.get("optimizer_offload_fraction", 1.0)) if given.get("optimizer_cpu_offload") else 0.0
        overlap = bool(given.get("overlap_cpu_optimizer_d2h_h2d"))
        return cls((main, first, second), str(given.get("main_grads_dtype") or "fp32"), fraction, overlap)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of main weight and moments of an element."""
        return sum(ELEMENT_BYTES[name] for name in self.dtypes)

    @staticmethod
    def problems(given: Mapping[str, Any], train_dtype: str, distributed: bool) -> Iterator[ConfigError]:
        """Yields the flags of the optimizer's state that do not go together, or with the rest of [trainer]."""
        aware, offloads = given.get("use_precision_aware_optimizer"), given.get("optimizer_cpu_offload")
        for name in ("main_grads_dtype", *_DTYPES):
            if given.get(name, "fp32") != "fp32" and not aware:
                yield ConfigError(f"trainer.megatron.{name}", given[name], "fp32, or use_precision_aware_optimizer beside it")
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
            if given.get(name) and not offloads:
                yield ConfigError(f"trainer.megatron.{name}", given[name], "not given, or optimizer_cpu_offload beside it")
        fraction = given.get("optimizer_offload_fraction")
        if fraction is not None and not 0 <= fraction <= 1:
            yield ConfigError("trainer.megatron.optimizer_offload_fraction", fraction, "a share from 0 to 1")
        for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
            if given.get(name) and not distributed:
                yield ConfigError(f"trainer.megatron.{name}", True, "use_distributed_optimizer beside it")
            if given.get(name) and train_dtype != "bfloat16":
                yield ConfigError(
                    f"trainer.megatron.{name}", True, "train_dtype = bfloat16: in float32 the weights are the optimizer's own"
                )


DecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then decay from ``lr`` to ``min_lr``. Pure: the optimizer keeps the count of updates.

    Unlike Megatron's scheduler, which makes the first update of a warm-up with a learning rate of 0, the first of n
    warm-up updates uses ``lr / n`` and the n-th ``lr``.

    Args:
        lr: peak. min_lr: where the decay ends, and stays. warmup_steps: updates of the warm-up.
        decay_steps: update at which the decay reaches ``min_lr``, counted from 0, warm-up included; unused if constant.
        decay_style: ``constant``, ``linear`` or ``cosine``.

    Raises ConfigError where the decay does not fit its rates or its steps.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_style: DecayStyle = "constant"

    def __post_init__(self) -> None:
        if self.decay_style == "constant":
            return
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError("trainer.min_lr", self.min_lr, f"between 0 and lr, {self.lr:g}")
        if self.decay_steps <= self.warmup_steps:
            wanted = f"below the {self.decay_steps} optimizer steps at whose end the decay arrives"
            raise ConfigError("trainer.lr_warmup_iters", self.warmup_steps, wanted)

    def at(self, updates: int) -> float:
        """Returns the learning rate of the update that follows ``updates`` earlier ones."""
        if updates < self.warmup_steps:
            return self.lr * (updates + 1) / self.warmup_steps
        if self.decay_style == "constant":
            return self.lr
        done = min(1.0, (updates - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1.0 - done if self.decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + left * (self.lr - self.min_lr)


ALL_LINEAR = "all-linear"  # The target that stands for all matrices that can have adapters

RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""The modules of a layer that can be recomputed, as Megatron-Core 0.16 names them."""


_SPLITS = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")
"""Sizes of layouts that the torch backend does not have."""

_OF_MEGATRON = (
    *("enable_mtp_training", "sequence_parallel", "use_distributed_optimizer", "recompute_method", "make_vocab_size_divisible_by", "spec"),
    *("custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path", "megatron"),
)
"""What the torch backend does not have, besides those sizes."""

MEGATRON_LAYOUT = (
    *_SPLITS,
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "sequence_parallel"),
    *("use_distributed_optimizer", "recompute_method", "make_vocab_size_divisible_by", "spec", "megatron"),
)
"""How Megatron lays out a model, and how it describes it: without meaning for the torch backend where prompts show pictures."""


class TrainerSection(Section):
    """Megatron-Core: layout, batches, optimizer, checkpoints."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "virtual_pipeline_model_parallel_size",
            lambda trainer, given: given is not None and given > 1 and trainer.pipeline_model_parallel_size == 1,
            "none, or a pipeline_model_parallel_size above 1",
        ),
        *read_where(lambda t: not t.lr_warmup_iters, "none beside lr_warmup_iters = {0.lr_warmup_iters}", "lr_warmup_fraction"),
        Rule("log_probs_chunk_size", lambda _, given: given == 0, "tokens, or -1 for all of a micro-batch"),
        Rule(
            "recompute",
            lambda trainer, given: given and trainer.recompute_granularity == "selective",
            "false beside recompute_granularity = selective; it is short for full",
        ),
        *read_where(lambda t: t.recomputes_layers, "none, or recompute_granularity = full", "recompute_method", "recompute_num_layers"),
        *read_where(lambda t: t.recompute_granularity == "selective", "none, or recompute_granularity = selective", "recompute_modules"),
        Rule("spec", lambda _, given: len(given) not in (0, 2), "two words, a module and the name of the layers in it; or none"),
        Rule(
            ("only_train_params_name_list", "freeze_params_name_list", "enable_mtp_training"),
            lambda trainer, given: given and trainer.lora_rank is not None,
            "not given beside lora_rank, which trains adapters and nothing else",
        ),
        Rule(
            ("fsdp_shard_ranks", "fsdp_cpu_offload", "fsdp_compile", "fsdp_float8"),
            lambda trainer, given: given and trainer.trainer_backend != "torch",
            "not given, or trainer_backend = torch beside it",
        ),
        Rule(
            "fsdp_reshard_after_forward",
            lambda trainer, given: not given and (trainer.trainer_backend != "torch" or trainer.fsdp_cpu_offload),
            "true, or trainer_backend = torch beside it, without fsdp_cpu_offload",
        ),
        Rule(
            "fsdp_shard_ranks",
            lambda trainer, given: given and any(trainer.ranks(role) % given for role in ("actor", "critic")),
            "a divisor of the number of the actor's ranks, and of the critic's",
        ),
        Rule(
            "prefix_sharing",
            lambda trainer, given: given == "on" and trainer.enable_mtp_training,
            "auto or off beside enable_mtp_training: what a draft layer sees at a fork differs with the next token",
        ),
        Rule("target_modules", lambda _, given: ALL_LINEAR in given and len(given) > 1, "all-linear alone, or names of matrices"),
    )

    trainer_backend: Literal["megatron", "torch"] = Field(
        default="megatron",
        description="what trains: Megatron-Core, for the families of docs/models.md; or transformers' models under FSDP2, for every causal "
        "language model that transformers has",
    )
    fsdp_shard_ranks: int | None = Field(
        default=None,
        ge=1,
        description="torch backend: ranks that share the shards of one copy of the model (HSDP: a machine's ranks, say); default: all",
    )
    fsdp_cpu_offload: bool = Field(
        default=False, description="torch backend: keep parameters, gradients and Adam's moments in host memory, and update them there"
    )
    fsdp_reshard_after_forward: bool = Field(
        default=True,
        description="torch backend: gather a layer's weights anew for each pass over it; or once a step, all of which each GPU then holds",
    )
    fsdp_compile: bool = Field(default=False, description="torch backend: compile each layer (torch.compile), but for its attention")
    fsdp_float8: Literal["rowwise", "rowwise_with_gw_hp"] | None = Field(
        default=None,
        description="torch backend: the actor's linear layers, but for routers and experts, multiply 8-bit floats with a scale a row, "
        "as torchao does, which has to be installed; gw_hp: not weights' gradients. Slow without fsdp_compile. Weights stay as they are",
    )
    actor_num_nodes: int = Field(default=1, ge=1, description="machines of the trainer")
    actor_num_gpus_per_node: int = Field(default=1, ge=1, le=8, description="trainer ranks on a machine (processes on a CPU)")
    critic_num_nodes: int | None = Field(default=None, ge=1, description="machines of the critic (ppo); default: the actor's")
    critic_num_gpus_per_node: int | None = Field(default=None, ge=1, le=8, description="the critic's ranks (ppo); default: the actor's")
    critic_lr: float | None = Field(default=None, ge=0, description="the critic's learning rate; default: lr", **RECORDED)
    critic_load: Annotated[Path | None, AfterValidator(hub_names.checked_model)] = Field(
        default=None, description="HF checkpoint that the critic starts from, named as hf_checkpoint; default: that"
    )
    tensor_model_parallel_size: int = Field(default=1, ge=1, description="tensor parallel size")
    pipeline_model_parallel_size: int = Field(default=1, ge=1, description="pipeline stages")
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1, description="model chunks of each pipeline stage")
    context_parallel_size: int = Field(default=1, ge=1, description="ranks that share each sequence")
    expert_model_parallel_size: int = Field(default=1, ge=1, description="ranks that share the experts of a layer")
    expert_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="ranks that share each expert's matrices; default: 1 with expert parallelism, else the tensor's"
    )
    sequence_parallel: bool = Field(
        default=False, description="sequence parallelism inside the tensor-parallel group; nothing where that is one rank"
    )
    use_distributed_optimizer: bool = Field(default=True, description="shard the optimizer over data-parallel ranks")
    recompute: bool = Field(default=False, description="recompute every layer in the backward pass; short for full, uniform, 1")
    recompute_granularity: Literal["full", "selective"] | None = Field(default=None, description="recompute whole layers, or modules")
    recompute_method: Literal["uniform", "block"] | None = Field(default=None, description="full: every layer, or a stage's first ones")
    recompute_num_layers: int | None = Field(default=None, gt=0, description="full: layers of a unit (uniform), of a stage (block)")
    recompute_modules: list[str] = Field(default=[], description="selective: core_attn, mlp, moe, shared_experts, mla_up_proj, ...")
    make_vocab_size_divisible_by: int = Field(
        default=1,
        ge=1,
        description="rows are added to embedding and output layer until each tensor-parallel rank has a multiple of it; they are no tokens",
    )
    spec: list[str] = Field(
        default=[], description="module and name of a spec of the layers, or of a function that gives one; default: the family's own layers"
    )
    deterministic: bool = Field(default=False, description="the same bits in every run, at a price on GPUs")
    train_dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="parameter type in training")
    quantization_aware: bool = Field(
        default=False,
        description="passes compute with weights rounded as engines get them, to groups of 4-bit integers (straight-through gradients)",
    )
    max_tokens_per_gpu: Annotated[int, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description="tokens of a packed micro-batch, times context_parallel_size; auto: as many as the memory plan allows, 8192 on CPUs",
        **RECORDED,
    )
    log_probs_chunk_size: Annotated[int, Field(ge=-1)] | Literal["auto"] = Field(
        default="auto",
        description="tokens whose logits exist at a time; each has vocabulary-size x 2 bytes; -1: all of a micro-batch; auto: as many as "
        "the memory plan has room for, 2048 on CPUs",
        **RECORDED,
    )
    prefix_sharing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compute once what sequences of a micro-batch begin with alike: auto where that saves 10 % of the tokens, on wherever "
        "it saves any",
    )
    use_rollout_routing_replay: bool = Field(
        default=False, description="train each token through the experts that the engine chose for it (models with experts)"
    )
    use_routing_replay: bool = Field(
        default=False, description="train each token through the experts that its log-prob at batch start went through"
    )
    support_replay: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="with rollout_top_p, rollout_top_k or min_p, log-probs are over the tokens that the sampler kept: auto where known",
    )
    num_steps_per_rollout: int = Field(default=1, gt=0, description="optimizer steps over one rollout batch")
    global_batch_size: int | None = Field(
        default=None, gt=0, description="samples of an optimizer step; default: what rollout_batch_size, samples and steps make it"
    )
    lr: float = Field(default=1e-6, ge=0, description="learning rate; 0: everything is computed, and no weight moves", **RECORDED)
    min_lr: float = Field(default=0.0, ge=0, description="floor of the decay", **RECORDED)
    lr_warmup_iters: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    lr_warmup_fraction: float | None = Field(
        default=None, ge=0, lt=1, description="the warm-up as a share of the steps of the decay, in the place of lr_warmup_iters"
    )
    lr_decay_style: DecayStyle = Field(default="constant", description="learning rate decay over the run")
    lr_decay_iters: int | None = Field(
        default=None, gt=0, description="optimizer steps at whose end the decay arrives; default: the run's, num_critic_only_steps too"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay", **RECORDED)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam β1")
    adam_beta2: float = Field(default=0.98, ge=0, lt=1, description="Adam β2")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam ε")
    reset_optimizer_states: bool = Field(default=False, description="zero Adam's moments before each rollout batch", **RECORDED)
    clip_grad: float = Field(default=1.0, ge=0, description="gradient norm clip; 0 = off", **RECORDED)
    only_train_params_name_list: list[str] = Field(
        default=[],
        description="regular expressions: the actor's parameters in whose Megatron names (decoder.layers.7.mlp.linear_fc1.weight) none is "
        "found are frozen",
    )
    freeze_params_name_list: list[str] = Field(
        default=[], description="regular expressions: the actor's parameters in whose Megatron names one is found are frozen"
    )
    lora_rank: int | None = Field(
        default=None, gt=0, description="rank of low-rank adapters (LoRA), which then are all of the actor that trains; default: none"
    )
    lora_alpha: float = Field(default=16, gt=0, description="adapters are scaled by lora_alpha / lora_rank")
    target_modules: list[str] = Field(
        default=[ALL_LINEAR], min_length=1, description="matrices with adapters, by PEFT's names (q_proj, ..., down_proj), or all-linear"
    )
    enable_mtp_training: bool = Field(
        default=False, description="train the checkpoint's draft layers (multi-token prediction) beside the policy, detached from it"
    )
    mtp_num_layers: int | None = Field(default=None, ge=0, description="draft layers of the checkpoint; default: those that it has")
    mtp_loss_scaling_factor: float = Field(default=0.1, gt=0, description="weight of the draft layers' loss", **RECORDED)
    seed: int = Field(default=1234, ge=0, le=LARGEST_SEED, description="the trainer's random seed")
    save: Path | None = Field(
        default=None,
        description="where the trainer keeps what it writes (checkpoints, weights, exports, curves), in SAVE/NAME; default: DIR/NAME",
    )
    load: Path | None = Field(
        default=None,
        description="where slime looks for checkpoints. A run continues from its own, in SAVE/NAME; `myxo train` takes the name of the "
        "newest run there",
        **MUTABLE,
    )
    save_interval: int = Field(default=20, gt=0, description="steps between checkpoints", **MUTABLE)
    save_at_start: bool = Field(
        default=True,
        description="write a checkpoint before the first step; without it a trainer that ends before the next one begins anew from "
        "hf_checkpoint, and saves time and disk of a large model. After a warm start there is always one",
        **MUTABLE,
    )
    async_save: bool = Field(default=True, description="write checkpoints while the next steps train", **MUTABLE)
    keep_checkpoints: int = Field(default=2, gt=0, description="checkpoints kept", **MUTABLE)
    save_hf: Path | None = Field(
        default=None,
        description="directory, with {rollout_id} for the step, of the policy in Hugging Face's format, written every save_interval steps",
        **MUTABLE,
    )
    save_hf_interval: int | None = Field(
        default=None,
        gt=0,
        description="the first checkpoint at or after each multiple of so many steps is exported to save_hf, and the last; default: all",
        **MUTABLE,
    )
    save_final_hf: bool = Field(
        default=True, description="write the final policy in Hugging Face's format to hf in the run's directory", **MUTABLE
    )
    batch_timeout: float = Field(default=1800, gt=0, description="seconds the trainer waits for a batch", **MUTABLE)
    node_timeout: float = Field(
        default=1800, gt=0, description="several machines: seconds that one waits for those that are missing", **MUTABLE
    )
    collective_timeout: float = Field(default=600, gt=0, description="seconds for a collective among trainer ranks", **MUTABLE)
    train_device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the trainer runs")
    colocate: bool = Field(default=False, description="trainer and engines share the trainer's GPUs and compute alternately", **MUTABLE)
    offload_train: bool | None = Field(
        default=None,
        description="colocated: while engines generate, weights and optimizer lie in host memory; default: on CUDA yes, on a CPU no",
        **MUTABLE,
    )
    offload_rollout: bool | None = Field(
        default=None,
        description="colocated: while the trainer computes, engines give their GPU memory back; default: on CUDA; a CPU has none to give",
        **MUTABLE,
    )
    lend_gpus: bool = Field(
        default=False,
        description="while the trainer waits for a batch, more engines generate on its GPUs, beside the run's own on others",
        **MUTABLE,
    )
    lent_mem_fraction_static: float = Field(
        default=0.5, gt=0, lt=1, description="lend_gpus: mem_fraction_static of the engines on the trainer's GPUs", **MUTABLE
    )
    train_env_vars: dict[str, str] = Field(
        default={},
        description='environment variables of the trainer\'s ranks, as \'{"NAME": "value"}\'; no credentials, which belong into the '
        "environment that the trainer is started in",
        **MUTABLE,
    )
    torch_threads: int | None = Field(default=None, gt=0, description="CPU threads of a trainer rank", **MUTABLE)
    custom_megatron_init_path: str | None = hook("that every trainer rank calls before it builds the model")
    custom_megatron_before_log_prob_hook_path: str | None = hook("that is called before log-probs are computed")
    custom_megatron_before_train_step_hook_path: str | None = hook("that is called before each optimizer step")
    megatron_config_path: Path | None = Field(
        default=None, description="slime's YAML file of what actor and critic have of their own; becomes their fields"
    )
    megatron: Table = Field(
        default={}, description="Megatron's own flags, as moe_router_dtype = 'fp32'; `myxo flags` lists them, see docs/megatron-flags.md"
    )

    @property
    def rounded_by(self) -> str:
        """Returns the field by which training is quantization-aware, its own or the one with slime's variable; empty where it is not."""
        if self.quantization_aware:
            return "trainer.quantization_aware"
        return f"trainer.train_env_vars: {environment_variables.QAT}" if self.train_env_vars.get(environment_variables.QAT) == "1" else ""

    @property
    def recomputes_layers(self) -> bool:
        """Returns whether the backward pass recomputes whole layers."""
        return self.recompute_granularity == "full" or (self.recompute and self.recompute_granularity is None)

    @property
    def tokens_per_gpu(self) -> int:
        """Returns a rank's most tokens of a micro-batch; auto that no memory plan has settled: `TOKENS_PER_GPU`."""
        return TOKENS_PER_GPU if self.max_tokens_per_gpu == "auto" else self.max_tokens_per_gpu

    @property
    def log_probs_tokens(self) -> int:
        """Returns how many tokens have logits at a time, -1: all; auto that no memory plan has settled: `LOG_PROBS_TOKENS`."""
        return LOG_PROBS_TOKENS if self.log_probs_chunk_size == "auto" else self.log_probs_chunk_size

    @property
    def micro_batch_tokens(self) -> int:
        """Returns the most tokens of a micro-batch, and so of a sample: context-parallel ranks hold it together."""
        return self.tokens_per_gpu * self.context_parallel_size

    def torch_problems(self) -> Iterator[ConfigError]:
        """Yields what the torch backend does not take."""
        own = "with trainer_backend = torch"
        for name in (*_SPLITS, *_OF_MEGATRON):
            value, default = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
            if value != default and value is not None:
                reason = "FSDP2 shards the model over all ranks" if name in _SPLITS else "that is Megatron's"
                yield ConfigError(f"trainer.{name}", value, f"{default} {own}: {reason}")
        if field := self.rounded_by:
            yield ConfigError(field, True, f"false {own}: that is Megatron's")
        if self.prefix_sharing == "on":
            yield ConfigError("trainer.prefix_sharing", "on", f"auto or off {own}, which computes whole sequences")
        yield from self._sharing_problems(own)
        if self.recompute_granularity == "selective" or self.recompute_num_layers not in (None, 1):
            yield ConfigError(
                "trainer.recompute_granularity", self.recompute_granularity, f"full {own}, which recomputes every layer or none"
            )

    def _sharing_problems(self, own: str) -> Iterator[ConfigError]:
        alone = ("lora_rank", "fsdp_shard_ranks", "fsdp_compile", "fsdp_float8")
        shared = {"tensor_model_parallel_size": (*alone, "fsdp_cpu_offload"), "expert_model_parallel_size": alone}
        for name, apart in shared.items():
            size, others = getattr(self, name), (*apart, *(other for other in shared if other != name and getattr(self, other) > 1))
            if size > 1 and (beside := [other for other in others if getattr(self, other)]):
                yield ConfigError(f"trainer.{name}", size, f"1 {own} and {beside[0]} = {getattr(self, beside[0])}")
        if self.fsdp_float8 and self.lora_rank:
            yield ConfigError("trainer.fsdp_float8", self.fsdp_float8, f"none {own} and lora_rank = {self.lora_rank}")
        if self.fsdp_compile and (self.use_routing_replay or self.use_rollout_routing_replay):
            yield ConfigError("trainer.fsdp_compile", True, f"false {own} and replayed routing")

    def _misfits(self) -> Iterator[str]:
        if self.trainer_backend == "torch":
            yield from map(str, self.torch_problems())
        for field in ("only_train_params_name_list", "freeze_params_name_list"):
            for pattern in getattr(self, field):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"trainer.{field}: {pattern!r} is no regular expression ({error})"
        if self.megatron.get("fp32_residual_connection") and self.train_dtype == "bfloat16":
            yield "trainer.megatron.fp32_residual_connection: false, or train_dtype = float32: in bfloat16 no layer takes float32 residuals"
        for problem in environment_variables.problems(self.train_env_vars):
            yield f"trainer.train_env_vars: {problem}"
        for name in self.recompute_modules:
            if name not in RECOMPUTABLE:
                yield f"trainer.recompute_modules: {name!r} is no module of a layer; {nearest(name, list(RECOMPUTABLE))}"

    @property
    def lent(self) -> bool:
        """Returns whether this is the view that a lent engine has of the run (`shared.config.devices.as_lent`)."""
        return self.lend_gpus and self.colocate

    def nodes(self, role: str) -> int:
        """Returns how many machines a role of the trainer (actor or critic) has."""
        return (self.critic_num_nodes if role == "critic" else None) or self.actor_num_nodes

    def ranks_per_node(self, role: str) -> int:
        """Returns how many processes a role has on each of its machines."""
        return (self.critic_num_gpus_per_node if role == "critic" else None) or self.actor_num_gpus_per_node

    def ranks(self, role: str) -> int:
        """Returns how many processes a role has."""
        return self.nodes(role) * self.ranks_per_node(role)

    @property
    def decays_over_the_run(self) -> bool:
        """Returns whether the learning rate depends on the run's number of steps."""
        return self.lr_decay_iters is None and (self.lr_decay_style != "constant" or bool(self.lr_warmup_fraction))

    def warmup_steps(self, steps: int) -> int:
        """Returns the optimizer steps of the warm-up in a run of ``steps``."""
        return self.lr_warmup_iters if self.lr_warmup_fraction is None else int(self.lr_warmup_fraction * self.decay_steps(steps))

    def decay_steps(self, steps: int) -> int:
        """Returns the optimizer step at whose end the decay arrives, in a run of ``steps``."""
        return steps if self.lr_decay_iters is None else self.lr_decay_iters


class WeightsSection(Section):
    """Pushing weights from the trainer to the engines."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "join_from",
            lambda weights, given: given == "trainer" and weights.update_weight_transport != "nccl",
            "there are no pushes with update_weight_transport = {0.update_weight_transport}; use auto, peer or disk",
        ),
        Rule(
            "snapshot_interval",
            lambda weights, given: not given and (weights.update_weight_transport, weights.join_from) == ("nccl", "disk"),
            "join_from = disk needs snapshots; give how many versions lie between two",
        ),
        Rule(
            "update_weight_engine_dir",
            lambda weights, given: given is not None and (weights.update_weight_disk_dir is None or not given.is_absolute()),
            "an absolute path, beside update_weight_disk_dir, in whose place it is on engines' machines",
        ),
        Rule(
            "object_store_url",
            lambda weights, given: (given is None) == (weights.update_weight_transport == "s3"),
            "https://HOST/BUCKET[/PREFIX] with update_weight_transport = s3, else none",
        ),
    )

    def _misfits(self) -> Iterator[str]:
        if self.object_store_url is not None:
            try:
                self.objects("run")
            except ConfigError as error:
                yield f"{error.field}: {error.expected}"

    def objects(self, run: str) -> ObjectStoreLocation:
        """Returns where a run's objects lie. Raises ConfigError."""
        assert self.object_store_url is not None  # by a rule
        url, allow = self.object_store_url.rstrip("/"), self.object_store_allow_http
        ObjectStoreLocation.parse(url, self.object_store_region, allow_http=allow)  # without the run's name, for the error
        return ObjectStoreLocation.parse(f"{url}/{run}", self.object_store_region, allow_http=allow)

    update_weights_interval: int = Field(default=1, gt=0, description="training steps between pushes")
    update_weight_buffer_size: int = Field(default=536870912, gt=0, description="bytes of a bucket")
    update_weight_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="type of the tensors on the wire; default: as the trainer has them"
    )
    check_weight_update_equal: bool = Field(
        default=False, description="after every push, send everything again and compare it with what the engines hold", **MUTABLE
    )
    skip_unchanged: bool = Field(default=False, description="do not send frozen parameters to a replica that has them", **MUTABLE)
    push_timeout: float = Field(default=120, gt=0, description="seconds for one push to all replicas", **MUTABLE)
    update_weight_transport: Literal["nccl", "disk", "s3"] = Field(
        default="nccl",
        description="how versions reach the engines: pushed over process groups (gloo on CPUs), read by every engine from disk, or "
        "downloaded from an object store, which replicas of other sites reach, too",
    )
    object_store_url: str | None = Field(
        default=None, description="with s3: https://HOST[:PORT]/BUCKET[/PREFIX]; objects lie below it, under the run's name"
    )
    object_store_region: str = Field(default="us-east-1", min_length=1, description="the bucket's region, which signatures name")
    object_store_allow_http: bool = Field(
        default=False, description="take an object store without TLS on another machine; weights and signatures cross the network in clear"
    )
    object_store_connections: int = Field(
        default=16, ge=1, le=256, description="uploads of the trainer, and downloads of a replica, at a time", **MUTABLE
    )
    object_store_url_timeout: int = Field(
        default=300,
        ge=10,
        le=604800,
        description="seconds for which a pre-signed URL holds: a replica that has left can download no longer",
        **MUTABLE,
    )
    update_weight_engine_dir: Path | None = Field(
        default=None,
        description="where the machines of external engines find update_weight_disk_dir; default: under the same path",
        **MUTABLE,
    )
    external_group_backend: Literal["auto", "nccl", "gloo"] = Field(
        default="auto",
        description="of the groups over which external engines get weights, with nccl; auto: nccl if both sides have GPUs",
        **MUTABLE,
    )
    update_weight_mode: Literal["full", "delta"] = Field(
        default="full", description="snapshots on disk: whole checkpoints, or what changed since the one before", **MUTABLE
    )
    update_weight_disk_dir: Path | None = Field(
        default=None,
        description="where snapshots lie, below the run's name, for trainer and engines alike; default: weights in the run's directory",
    )
    update_weight_delta_encoding: Literal["auto", "xor", "overwrite", "magnitude"] = Field(
        default="auto",
        description="a delta's tensors: old xor new; positions and values of the elements that changed; or positions among those of one "
        "magnitude, and steps; auto: magnitude for elements of one or two bytes, else xor",
        **MUTABLE,
    )
    update_weight_full_interval: int = Field(default=10, gt=0, description="with delta: every so many snapshots one is whole", **MUTABLE)
    snapshot_interval: int = Field(
        default=20, ge=0, description="with nccl: versions between snapshots, which joiners read; 0 = none", **MUTABLE
    )
    keep_snapshots: int = Field(default=2, gt=0, description="snapshots kept, with all that they are made of", **MUTABLE)
    join_from: Literal["auto", "peer", "disk", "trainer"] = Field(
        default="auto",
        description="where a replica that comes late takes its weights: a serving replica, the newest snapshot, the trainer's next push; "
        "auto: the first of them that has the live version",
        **MUTABLE,
    )
