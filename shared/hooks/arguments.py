"""``args`` as hooks get it: the run's whole config, flat, under the flags' names, and slime's other attributes with this run's values."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from shared.config.environment_variables import ROUTERS_VARIABLE
from shared.config.eval_section import EVAL_LOOP
from shared.config.eval_views import EvalView, eval_views
from shared.config.reward_section import CUSTOM
from shared.config.run_config import RunConfig, field_sections
from shared.data.data_files import DataFile
from shared.hooks.slime import model_functions
from shared.model.families import read_architecture
from shared.rewards.names import GIVEN
from shared.runtime.errors import ConfigError, nearest


class EvalDatasetConfig(SimpleNamespace):
    """One set, under the names of slime's fields, with what it leaves to the run filled in."""

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """Returns a sample's metadata with what the set puts over it."""
        return {**(metadata if isinstance(metadata, dict) else {}), **self.metadata}


def eval_datasets(config: RunConfig) -> list[EvalDatasetConfig]:
    """Returns the sets in the order in which the run names them."""
    return [_dataset(view) for view in eval_views(config)]


def eval_prompt_data(config: RunConfig) -> list[str] | None:
    """Returns ``args.eval_prompt_data``: name, path, name, path …; None where there is no set."""
    return [word for view in eval_views(config) for word in (view.name, str(view.files[0]))] or None


def model_addresses() -> dict[str, tuple[str, int]]:
    """Returns the host and port at which this machine's functions ask each frozen model, by its name."""
    return {name: (host, port) for name, (host, port) in json.loads(os.environ.get(ROUTERS_VARIABLE) or "{}").items()}


def _dataset(view: EvalView) -> EvalDatasetConfig:
    rollout, data, files = view.config.rollout, view.config.data, [str(file) for file in view.files]
    left = {
        "path": files[0] if len(files) == 1 else files,
        "n_samples_per_eval_prompt": rollout.n_samples_per_prompt,
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "max_response_len": rollout.rollout_max_response_len,
        "max_prompt_len": rollout.rollout_max_prompt_len,
        "max_context_len": view.max_context_len,
        "stop": rollout.rollout_stop or None,
        "stop_token_ids": rollout.rollout_stop_token_ids or None,
        "min_new_tokens": view.min_new_tokens or None,
        "custom_rm_path": view.config.reward.custom_rm_path if view.config.reward.environment_of(None) == CUSTOM else None,
        "metadata_overrides": view.own.metadata_overrides or {},
        "metadata": view.metadata,
        "multimodal_keys": None,
    }
    keys = ("input_key", "label_key", "tool_key", "metadata_key", "apply_chat_template", "apply_chat_template_kwargs")
    return EvalDatasetConfig(**{**view.own.model_dump(), **{key: getattr(data, key) for key in keys}, **left})


NOT_SET = """
    custom_model_provider_path custom_update_weight_post_write_path http_proxy
    load_forge_rollout_data log_probs_max_tokens_per_gpu log_reward_category megatron_config_path model_name
    multimodal_keys opd_teacher_ckpt_step ref_ckpt_step rollout_buffer_url rollout_external_engine_addrs router_policy
    sglang_speculative_algorithm start_rollout_id tb_experiment_name tb_project_name
    update_weight_local_checkpoint_dir wandb_key wandb_run_id
"""

OFF = """
    allgather_cp balance_by_flops ci_disable_kl_checker ci_test get_mismatch_metrics keep_old_actor
    log_correct_samples offload release_train update_weight_disk_keep_files
    use_distributed_post use_fault_tolerance use_rollout_entropy use_stateless_adam use_tensorboard
    wandb_always_use_train_step
"""

ON = """
    balance_data compute_advantages_and_returns rollout_global_dataset
    use_dynamic_batch_size wandb_random_suffix
"""

OTHERS: dict[str, Any] = {
    "train_backend": "megatron",
    "rollout_function_path": EVAL_LOOP,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "rollout_task_type": "math",
    "fetch_trajectory_retry_times": -1,
    "min_batch_collection_ratio": 1,
    "loss_mask_type": "qwen",
    "sglang_dp_size": 1,
    "rollout_num_engines": 1,
}
"""``rollout_num_engines``: behind the address that a function gets there is one engine, its replica's."""

SLIME_CONCURRENCY = 512  # slime's own default of ``sglang_server_concurrency``, for runs whose concurrency follows the engine's load

FOLLOWING: dict[str, Callable[[RunConfig], Any]] = {
    "num_gpus_per_node": lambda config: config.rollout.gpus_per_node or 8,
    "partial_rollout": lambda config: config.rollout.staleness_policy in ("continue", "mask"),
    "mask_offpolicy_in_partial_rollout": lambda config: config.rollout.staleness_policy == "mask",
    "rewards_normalization": lambda config: not config.algorithm.disable_rewards_normalization,
    "grpo_std_normalization": lambda config: not config.algorithm.disable_grpo_std_normalization,
    "rollout_num_gpus": lambda config: config.rollout.all_gpus,
    "kept_top_k": lambda config: config.kept_top_k,
    "sglang_model_routers": lambda config: model_addresses() or None,
    "sglang_server_concurrency": lambda config: config.rollout.rollout_concurrency or SLIME_CONCURRENCY,
    "eval_datasets": eval_datasets,
    "eval_function_path": lambda config: config.rollout.rollout_function_path or EVAL_LOOP,
    "eval_prompt_data": eval_prompt_data,
    "eval_max_context_len": lambda config: config.rollout.rollout_max_context_len,
    "save": lambda config: str(config.run.root / "checkpoints"),
    "load": lambda config: str(config.run.root / "checkpoints"),
}
"""What follows from fields of other names."""

SAID_OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "eval_prompt_data": lambda _: None,  # it follows from all sets
    "rm_type": lambda given: None if given == GIVEN else given,
    "rollout_skip_special_tokens": lambda given: bool(given),
    "rollout_stop": lambda given: given or None,
    "rollout_stop_token_ids": lambda given: given or None,
}
"""Fields that slime's functions expect in another form: nothing as None."""


def attributes(config: RunConfig) -> dict[str, Any]:
    """Returns them by name."""
    fixed = {**dict.fromkeys(NOT_SET.split()), **dict.fromkeys(OFF.split(), False), **dict.fromkeys(ON.split(), True), **OTHERS}
    return {**fixed, **{name: value(config) for name, value in FOLLOWING.items()}, **_model_shape(config.model.hf_checkpoint)}


def as_given(name: str, value: Any) -> Any:
    """Returns the value of a field as slime's functions know it: paths and files as text, one file alone."""
    if name in SAID_OTHERWISE:
        return SAID_OTHERWISE[name](value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(item, DataFile) for item in value):
        return str(value[0]) if len(value) == 1 else [str(item) for item in value]
    return value


def _model_shape(checkpoint: Path) -> dict[str, Any]:
    """Returns the model's shape under Megatron's names; nothing where it cannot be read."""
    try:
        shape = read_architecture(checkpoint, backend="torch")
    except (ConfigError, OSError):
        return {}
    experts = {} if shape.experts is None else {"num_experts": shape.experts.count, "moe_router_topk": shape.experts.per_token}
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    return {**{name: getattr(shape, name) for name in names}, "num_query_groups": shape.num_key_value_heads, **experts}


class Arguments(Namespace):
    """Every field of the config (``args.rollout_batch_size``), slime's other flags with the value that this run has, Megatron's that are
    given, and SGLang's with their prefix (``args.sglang_mem_fraction_static``).

    It may be written: each process has its own, and nothing of the run follows what is set there.

    Args:
        more: what only the caller knows, for example the address of an engine.

    An attribute that is not there raises AttributeError with the nearest that is.
    """

    def __init__(self, config: RunConfig, **more: Any) -> None:
        fields = {field: getattr(getattr(config, section), field) for field, section in field_sections().items()}
        fields |= {"max_tokens_per_gpu": config.trainer.tokens_per_gpu, "log_probs_chunk_size": config.trainer.log_probs_tokens}  # not auto
        shown = {field: as_given(field, value) for field, value in fields.items()}
        engine = {f"sglang_{flag.replace('-', '_')}": value for flag, value in config.rollout.engine_flags.items()}
        engine["sglang_enable_deterministic_inference"] = config.rollout.seeded
        others = attributes(config)
        unset = {name: others[name] for name, value in shown.items() if value is None and name in others}
        model_functions.RUN["trust_remote_code"] = config.model.trust_remote_code
        super().__init__(**{**config.run.custom_args, **others, **shown, **unset, **config.trainer.megatron, **engine, **more})

    def point_at(self, host: str, port: int) -> None:
        """Names the policy's address: ``sglang_router_ip`` and ``_port``, and under its name beside those of frozen models."""
        self.sglang_router_ip, self.sglang_router_port = host, port
        if self.sglang_model_routers:
            self.sglang_model_routers[self.policy_name] = (host, port)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args has no {name}; {nearest(name, list(self.__dict__))}")
