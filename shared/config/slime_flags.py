"""slime's flags that are no fields of the config: what becomes of each, on the command line and as a key of TOML.

A flag of slime's is in one of four classes. It is *taken* if the config has a field of its name: nothing else says so, and whoever adds
the field deletes the flag from the tables here. The others stand in one of the tables: *renamed* (accepted, and set under a field's own
name), a *no-op* (accepted, without effect, for a reason), *refused* (for a reason, with what to do instead). What is renamed or a no-op
is told once, when the run starts. Flags of Megatron's have the same classes, in `shared.config.megatron_flags`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shared.config.megatron_flags import Flag

Fields = dict[str, Any]
"""Field of the config → value."""


@dataclass(frozen=True)
class Renamed:
    """A flag that is set under other names.

    Args:
        kind: of its value, as in `Flag`. fields: takes the value and returns the fields that it stands for. meaning: them in words.
        choices: of a text. variable: the environment variable that is set in the place of fields: what no config may hold.
        yields: whether what another such flag sets stands over it.
    """

    kind: str
    meaning: str
    fields: Callable[[Any], Fields] = lambda _: {}
    choices: tuple[str, ...] = ()
    variable: str = ""
    yields: bool = False


@dataclass(frozen=True)
class NoOp:
    """A flag without effect. kind, choices: of its value, as in `Flag`. reason: why it has none."""

    kind: str
    reason: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotTaken:
    """A flag that no value is taken of. reason: why, and what to do instead."""

    reason: str


Entry = Renamed | NoOp | NotTaken


@dataclass
class Translation:
    """What a flag of slime's comes to: values of fields, lines for the user, variables of the services' environment."""

    fields: Fields = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    yields: bool = False

    def over(self, fields: Fields) -> Fields:
        """Returns these fields laid over those of other flags, or under them."""
        return {**self.fields, **fields} if self.yields else {**fields, **self.fields}


OWN_SOURCES = {"slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source.RolloutDataSourceWithBuffer"}
"""slime's own sources of prompts, which read files as Myxo does."""

RENAMED: dict[str, Renamed] = {
    "offload": Renamed(
        "switch", "--offload-train --offload-rollout", lambda given: {"offload_train": True, "offload_rollout": True} if given else {}
    ),
    "partial_rollout": Renamed(
        "switch",
        "--staleness-policy continue: generation goes on under the next weights, up to --max-staleness; --off-policy corrects the loss",
        lambda given: {"staleness_policy": "continue"} if given else {},
        yields=True,
    ),
    "mask_offpolicy_in_partial_rollout": Renamed(
        "switch",
        "--staleness-policy mask: tokens older than --max-staleness versions leave the loss",
        lambda given: {"staleness_policy": "mask"} if given else {},
    ),
    "distributed_timeout_minutes": Renamed(
        "int", "--collective-timeout, in seconds", lambda minutes: {"collective_timeout": 60.0 * minutes}
    ),
    "num_gpus_per_node": Renamed("int", "--gpus-per-node, by which an engine's nodes are counted", lambda gpus: {"gpus_per_node": gpus}),
    "sglang_router_request_timeout_secs": Renamed("float", "--generate-timeout", lambda seconds: {"generate_timeout": seconds}),
    "update_weight_disk_keep_files": Renamed(
        "switch", "--keep-snapshots 1000000", lambda given: {"keep_snapshots": 1_000_000} if given else {}
    ),
    "data_source_path": Renamed(
        "text",
        "--data-source, and nothing where it is slime's own: prompts are read from --prompt-data",
        lambda given: {} if given.replace(":", ".") in OWN_SOURCES else {"data_source": given},
    ),
    "bf16": Renamed("switch", "--train-dtype bfloat16", lambda given: {"train_dtype": "bfloat16"} if given else {}),
    "wandb_key": Renamed("text", "WANDB_API_KEY in the trainer's environment; the config holds no secrets", variable="WANDB_API_KEY"),
    "deterministic_mode": Renamed("switch", "--deterministic", lambda given: {"deterministic": given}),
}
"""Flags of slime's, and of Megatron's, that are set under the name of a field."""

NO_OPS: dict[str, NoOp] = {
    "train_backend": NoOp("text", "the trainer is Megatron-Core", ("megatron",)),
    "use_dynamic_batch_size": NoOp("switch", "micro-batches are always packed by tokens, up to --max-tokens-per-gpu"),
    "log_probs_max_tokens_per_gpu": NoOp("int", "log-probs are computed on the micro-batches of --max-tokens-per-gpu"),
    "ref_micro_batch_size": NoOp("int", "log-probs are computed on the micro-batches of --max-tokens-per-gpu"),
    "recompute_loss_function": NoOp("switch", "it saves memory and changes no value; lower --max-tokens-per-gpu where memory is short"),
    "balance_data": NoOp("switch", "batches are always balanced over the data-parallel ranks"),
    "balance_by_flops": NoOp("switch", "batches are always balanced over the data-parallel ranks, by operations"),
    "data_pad_size_multiplier": NoOp("int", "micro-batches are padded as their layout needs it; padding is in no loss"),
    "loss_mask_type": NoOp("text", "the assistant's turns are trained, by any template", ("qwen", "qwen3", "qwen3_5", "distill_qwen")),
    "no_position_embedding": NoOp("switch", "positions are embedded as the checkpoint says"),
    "enable_experimental": NoOp("switch", "nothing here waits for it"),
    "model_name": NoOp("text", "the model's family is read from --hf-checkpoint"),
    "qwen_gdn_backend": NoOp("text", "kernels follow from the machine", ("fla", "flashqla")),
    "allgather_cp": NoOp("switch", "context parallelism splits packed sequences in its own way; the values are the same"),
    "use_fault_tolerance": NoOp("switch", "engines and services that die are always started again"),
    "rollout_health_check_interval": NoOp("float", "services are watched by their heartbeats, see --registry-ttl"),
    "rollout_health_check_timeout": NoOp("float", "an engine's answers have the deadline --generate-timeout"),
    "rollout_health_check_first_wait": NoOp("float", "engines are given --engine-start-timeout seconds to start"),
    "prefill_num_servers": NoOp("int", "every engine prefills and decodes; the samples are the same"),
    "rollout_data_transport": NoOp("text", "trainer ranks fetch samples from the run's store", ("object-store", "nixl")),
    "use_distributed_post": NoOp("switch", "each rollout service talks to its own engine"),
    "disable_compute_advantages_and_returns": NoOp("switch", "--loss-type sft_loss uses none; other losses need them"),
    "update_weight_delta_checksum": NoOp("text", "every tensor of a push is checked by its digest", ("xxh3-128", "blake3", "adler32")),
    "update_weight_local_checkpoint_dir": NoOp("text", "engines read snapshots, whole or deltas, from where the trainer writes them"),
    "use_tensorboard": NoOp("switch", "TensorBoard's files are always written, to RUN/tensorboard"),
    "tb_project_name": NoOp("text", "TensorBoard's files lie in RUN/tensorboard"),
    "tb_experiment_name": NoOp("text", "TensorBoard's files lie in RUN/tensorboard"),
    "disable_wandb_random_suffix": NoOp("switch", "a run's name in W&B is its own name, without a suffix"),
    "wandb_always_use_train_step": NoOp("switch", "the step of every curve is the rollout batch's, whatever --num-steps-per-rollout is"),
    "http_proxy": NoOp("text", "services talk over the run's bus, engines over private sockets: nothing goes through a proxy"),
}
"""Flags of slime's without effect."""

_REASONS = {
    "keep_old_actor": "slime then takes the ratio to the weights that made the samples, by the trainer; --use-rollout-logprobs takes it to "
    "them by the engine's own log-probs",
    "get_mismatch_metrics": "slime then calls --custom-tis-function-path, and what it makes of the loss counts; --use-tis calls it here. "
    "Leave it out otherwise: the distance of trainer and rollout is always measured",
    "load_forge_rollout_data": "use `myxo replay CONFIG TEMPLATE` on batches that --save-debug-rollout-data has written",
    "release_train": "use --offload-train: a trainer that gives its memory back stays alive",
    "custom_update_weight_post_write_path": "snapshots lie on a file system that trainer and engines see alike",
    "custom_model_provider_path": "the model is built from --hf-checkpoint; docs/models.md lists the families",
    "ref_ckpt_step": "the reference policy starts from --hf-checkpoint, or from an HF checkpoint in --ref-load",
    "opd_teacher_ckpt_step": "the teacher is the checkpoint of --opd-teacher-load",
    "start_rollout_id": "a run goes on after its last checkpoint by itself",
    "use_stateless_adam": "Adam keeps its moments",
    "disable_rollout_global_dataset": "prompts come from --prompt-data or --data-source",
    "rollout_sample_hook_path": "do it at the end of --custom-generate-function-path",
    "rollout_external_engine_addrs": "start a rollout service where the engine is to be: it joins the run (docs/deployment.md)",
    "sglang_router_ip": "MYXO_ROUTER_URL in the environment opens the engines to a router",
    "sglang_router_port": "MYXO_ROUTER_URL in the environment opens the engines to a router",
    "ci_test": "it is for slime's own tests; see --check-weight-update-equal and --logprob-alarm",
    "ci_disable_kl_checker": "it is for slime's own tests",
    "ci_train_rollout_logprob_abs_diff_threshold": "use --logprob-alarm, which warns",
    "ci_save_grad_norm": "the gradient's norm is logged as train/grad_norm",
    "ci_load_grad_norm": "the gradient's norm is logged as train/grad_norm",
    "enable_mtp_training": "layers that predict several tokens are not trained; leave it out",
    "fetch_trajectory_retry_times": "there is no server of trajectories; use --rollout-function-path or --custom-generate-function-path",
    "freeze_indexer": "no model family of Myxo has an indexer; use --freeze-params-name-list for other parameters",
    "log_correct_samples": "`myxo samples RUN` filters samples by their reward",
    "log_reward_category": "give named rewards: each is logged under its name",
    "megatron_deepgemm_forward_layers": "training computes in train_dtype, by torch or Transformer Engine",
    "megatron_deepgemm_forward_modules": "training computes in train_dtype, by torch or Transformer Engine",
    "megatron_deepgemm_moe_forward_layers": "training computes in train_dtype, by torch or Transformer Engine",
    "megatron_deepgemm_moe_forward_modules": "training computes in train_dtype, by torch or Transformer Engine",
    "min_batch_collection_ratio": "a batch has rollout_batch_size groups always",
    "multimodal_keys": "prompts are text",
    "rollout_buffer_url": "there is no server of trajectories; use --rollout-function-path or --custom-generate-function-path",
    "rollout_task_type": "it is for a server of trajectories; rm_type says how a task is scored",
    "use_rollout_entropy": "entropy is computed where entropy_coef asks for it",
    "wandb_run_id": "a run's id in W&B is its name: give --name",
}

REFUSED: dict[str, NotTaken] = {name: NotTaken(reason) for name, reason in _REASONS.items()}
"""Flags of slime's that no value is taken of."""

ROUTER = "router_"
"""What the flags of slime's router begin with, behind ``sglang_`` or alone."""

ANYTHING = "anythings"
"""The kind of a flag whose value nobody looks at: any number of words."""

_OF_THE_ROUTER = NoOp(ANYTHING, "there is no router: rollout services take their work from the run's queues")


@cache
def entries() -> dict[str, Entry]:
    """Returns every flag of the tables by its name, with underscores."""
    return {**RENAMED, **NO_OPS, **REFUSED}


def find(name: str) -> Entry | None:
    """Returns the entry of a flag, its name with underscores; None for any other."""
    return entries().get(name, _OF_THE_ROUTER if name.removeprefix("sglang_").startswith(ROUTER) else None)


def takes_several(entry: Entry) -> bool:
    """Returns whether several words may follow a flag."""
    return isinstance(entry, NotTaken) or entry.kind.endswith("s")


def is_switch(entry: Entry) -> bool:
    """Returns whether a flag stands without a value."""
    return not isinstance(entry, NotTaken) and entry.kind == "switch"


def translate(name: str, entry: Entry, value: Any) -> Translation:
    """Returns what a flag with its value comes to. ``value``: words of a command line, or TOML's.

    Raises ValueError: the flag is refused, or the value is none of its kind.
    """
    if isinstance(entry, NotTaken):
        raise ValueError(f"a flag of slime's; {entry.reason}")
    typed = value if entry.kind == ANYTHING else Flag(name, entry.kind, choices=entry.choices).typed(value)
    spelled = "--" + name.replace("_", "-")
    if isinstance(entry, NoOp):
        return Translation(notes=[f"{spelled} changes nothing: {entry.reason}"])
    variables = {entry.variable: str(typed)} if entry.variable else {}
    return Translation(entry.fields(typed), [f"{spelled} is {entry.meaning}"], variables, entry.yields)
