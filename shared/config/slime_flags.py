"""slime's flags that are no fields here, each with its replacement, or why it is not needed.

Names are slime's with underscores; those that Myxo takes under the same name are not listed, and Megatron's are in
`shared.config.megatron_flags`.
"""

_ALWAYS = {
    "balance_data": "batches are always balanced over the data-parallel ranks",
    "use_dynamic_batch_size": "micro-batches are always packed by tokens, see --max-tokens-per-gpu",
    "use_fault_tolerance": "engines and services that die are always started again",
    "use_tensorboard": "TensorBoard's files are always written, to RUN/tensorboard",
    "no_position_embedding": "positions are embedded as the checkpoint says",
    "loss_mask_type": "masks are made token by token, for every chat template",
    "data_pad_size_multiplier": "micro-batches are padded as their layout needs it",
    "rollout_skip_special_tokens": "what is trained on are the engine's token ids; the text beside them has no special tokens",
    "disable_compute_advantages_and_returns": "with --loss-type sft_loss none are computed",
    "start_rollout_id": "a run goes on after its last checkpoint by itself",
    "prefill_num_servers": "engines prefill and decode in one",
    "rollout_health_check_interval": "services are watched by their heartbeats",
    "rollout_health_check_first_wait": "engines are given --engine-start-timeout seconds to start",
    "rollout_max_context_len": "the model's own context length holds, with --rollout-max-prompt-len and --rollout-max-response-len",
    "async_buffer_size": "--max-staleness bounds what may lie ready",
}
"""Flags to leave out, and why."""

_INSTEAD = {
    "actor_num_nodes": "a trainer has one node: --actor-num-gpus-per-node says its ranks",
    "rollout_num_gpus": "use --rollout-replicas, each with --rollout-num-gpus-per-engine GPUs",
    "ref_load": "leave it out: the reference policy starts from --hf-checkpoint, see --ref-update-interval",
    "offload": "use --offload-train and --offload-rollout",
    "num_epoch": "use --num-rollout: prompts over --rollout-batch-size make the steps of an epoch",
    "partial_rollout": "use --staleness-policy continue, and --over-sampling-batch-size",
    "mask_offpolicy_in_partial_rollout": "use --staleness-policy mask",
    "keep_old_actor": "leave it out: log-probs before a step are computed where --off-policy asks for them",
    "eval_top_p": "evaluation has --rollout-top-p; --eval-temperature and --eval-max-response-len are its own",
    "eval_top_k": "evaluation has --rollout-top-k; --eval-temperature and --eval-max-response-len are its own",
    "eval_reward_key": "evaluation has --reward-key",
    "eval_config": "use --eval-prompt-data, --eval-interval and the other fields of [eval]",
    "data_source_path": "use --data-source package.module:function",
    "tb_project_name": "leave it out: TensorBoard's files lie in RUN/tensorboard",
    "tb_experiment_name": "leave it out: TensorBoard's files lie in RUN/tensorboard",
    "wandb_key": "give WANDB_API_KEY in the trainer's environment",
    "custom_config_path": "put the fields into the run's TOML file",
    "dump_details": "use --save-debug-rollout-data and --save-debug-train-data",
    "load_debug_rollout_data": "use `myxo replay CONFIG TEMPLATE`",
    "debug_train_only": "use `myxo replay CONFIG TEMPLATE` on what --save-debug-rollout-data has written",
    "log_probs_chunk_size": "lower --max-tokens-per-gpu where logits do not fit into memory",
    "update_weight_delta_checksum": "leave it out: every tensor of a push is checked",
    "rollout_health_check_timeout": "use --engine-start-timeout and --generate-timeout",
    "rollout_function_path": "use --custom-generate-function-path: the loop itself is split over the services (docs/hooks.md)",
    "custom_convert_samples_to_train_data_path": "see docs/hooks.md: --custom-reward-post-process-path, --custom-advantage-function-path",
    "rollout_data_postprocess_path": "use --custom-advantage-function-path (docs/hooks.md)",
    "model_name": "leave it out: the model's family is read from --hf-checkpoint",
    "reset_optimizer_states": "start a run of another name from the weights that --save-hf has written",
}
"""Flags with a replacement: what to do instead."""

_ABSENT = {
    "allgather_cp",
    "ci_test",
    "custom_eval_rollout_log_function_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_megatron_init_path",
    "custom_model_provider_path",
    "custom_rollout_log_function_path",
    "debug_rollout_only",
    "enable_experimental",
    "enable_mtp_training",
    "log_multi_turn",
    "memory_snapshot_dir",
    "multimodal_keys",
    "profile_target",
    "recompute_loss_function",
    "rollout_external_engine_addrs",
    "use_gated_attention",
    "use_rollout_routing_replay",
    "use_routing_replay",
}
"""Flags without an equivalent."""


def advice(name: str) -> str | None:
    """Returns what to do about a flag of slime's that Myxo has no field for; None for any other name, with dashes or underscores."""
    key = name.lstrip("-").replace("-", "_")
    if key in _ALWAYS:
        return f"a flag of slime's; leave it out: {_ALWAYS[key]}"
    if key in _INSTEAD:
        return f"a flag of slime's; {_INSTEAD[key]}"
    return "a flag of slime's that Myxo has nothing for" if key in _ABSENT else None
