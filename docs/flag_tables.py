"""What Myxo makes of Megatron's flags: which describe the architecture, which it sets itself, which have no effect or mean nothing here,
and other spellings. slime's own flags are in `shared.config.flag_table`.

Names are those of Megatron's command line with underscores. What stands in no table is a field of one of Megatron's
dataclasses and goes there as given.
"""

from typing import Any

ARCHITECTURE: dict[str, tuple[str, Any]] = {
    # name: (kind, Megatron's default); compared with the checkpoint, never laid over it
    "num_layers": ("int", None),
    "hidden_size": ("int", None),
    "ffn_hidden_size": ("int", None),
    "num_attention_heads": ("int", None),
    "group_query_attention": ("switch", False),
    "num_query_groups": ("int", None),
    "kv_channels": ("int", None),
    "normalization": ("text", "LayerNorm"),
    "norm_epsilon": ("float", 1e-5),
    "apply_layernorm_1p": ("switch", False),
    "qk_layernorm": ("switch", False),
    "post_self_attn_layernorm": ("switch", False),
    "post_mlp_layernorm": ("switch", False),
    "add_qkv_bias": ("switch", False),
    "disable_bias_linear": ("switch", False),
    "swiglu": ("switch", False),
    "quick_geglu": ("switch", False),
    "glu_linear_offset": ("float", 0.0),
    "activation_func_clamp_value": ("float", None),
    "softmax_type": ("text", "vanilla"),
    "window_size": ("ints", None),
    "window_attn_skip_freq": ("int or ints", None),
    "vocab_size": ("int", None),
    "max_position_embeddings": ("int", None),
    "untie_embeddings_and_output_weights": ("switch", False),
    "position_embedding_type": ("text", "learned_absolute"),
    "use_rotary_position_embeddings": ("switch", False),
    "rotary_base": ("float", 10000.0),
    "rotary_percent": ("float", 1.0),
    "rotary_interleaved": ("switch", False),
    "use_rope_scaling": ("switch", False),
    "rope_scaling_factor": ("float", 8.0),
    "rope_type": ("text", None),
    "rotary_scaling_factor": ("float", 1.0),
    "original_max_position_embeddings": ("int", 4096),
    "beta_fast": ("float", 32.0),
    "beta_slow": ("float", 1.0),
    "mscale": ("float", 1.0),
    "mscale_all_dim": ("float", 0.0),
    "multi_latent_attention": ("switch", False),
    "q_lora_rank": ("int", None),
    "kv_lora_rank": ("int", None),
    "qk_head_dim": ("int", None),
    "qk_pos_emb_head_dim": ("int", None),
    "v_head_dim": ("int", None),
    "dsa_indexer_n_heads": ("int", None),
    "dsa_indexer_head_dim": ("int", None),
    "dsa_indexer_topk": ("int", None),
    "attention_output_gate": ("switch", False),
    "experimental_attention_variant": ("text", None),
    "linear_attention_freq": ("int or ints", None),
    "linear_conv_kernel_dim": ("int", 4),
    "linear_key_head_dim": ("int", 128),
    "linear_value_head_dim": ("int", 128),
    "linear_num_key_heads": ("int", 16),
    "linear_num_value_heads": ("int", 32),
    "num_experts": ("int", None),
    "moe_layer_freq": ("int or ints", 1),
    "moe_ffn_hidden_size": ("int", None),
    "moe_shared_expert_intermediate_size": ("int", None),
    "moe_shared_expert_gate": ("switch", False),
    "moe_router_topk": ("int", 2),
    "moe_router_num_groups": ("int", None),
    "moe_router_group_topk": ("int", None),
    "moe_router_pre_softmax": ("switch", False),
    "moe_router_score_function": ("text", "softmax"),
    "moe_router_topk_scaling_factor": ("float", None),
    "moe_router_enable_expert_bias": ("switch", False),
}

CHOICES: dict[str, list[str]] = {
    "normalization": ["LayerNorm", "RMSNorm"],
    "position_embedding_type": ["learned_absolute", "rope", "yarn", "mrope", "relative", "none"],
    "softmax_type": ["vanilla", "off-by-one", "learnable"],
    "rope_type": ["rope", "yarn"],
    "moe_router_score_function": ["softmax", "sigmoid"],
    "transformer_impl": ["local", "transformer_engine"],
    "moe_router_load_balancing_type": ["none", "aux_loss", "seq_aux_loss", "global_aux_loss"],
    "main_grads_dtype": ["fp32", "bf16"],
    "main_params_dtype": ["fp32", "fp16"],
    "exp_avg_dtype": ["fp32", "bf16", "fp16", "fp8"],
    "exp_avg_sq_dtype": ["fp32", "bf16", "fp16", "fp8"],
}

SPELLINGS: dict[str, tuple[str, Any]] = {
    # other spelling: (name, the value of a bare switch; None where the flag takes a value)
    "use_gated_attention": ("attention_output_gate", True),
    "layernorm_epsilon": ("norm_epsilon", None),
    "layernorm_zero_centered_gamma": ("apply_layernorm_1p", True),
    "add_bias_linear": ("disable_bias_linear", False),
    "gated_linear_unit": ("swiglu", True),
    "num_moe_experts": ("num_experts", None),
    "no_rope_fusion": ("apply_rope_fusion", False),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
    "no_bias_gelu_fusion": ("bias_activation_fusion", False),
    "no_bias_swiglu_fusion": ("bias_activation_fusion", False),
    "bias_swiglu_fusion": ("bias_activation_fusion", True),
    "no_bias_dropout_fusion": ("bias_dropout_fusion", False),
    "no_persist_layer_norm": ("persist_layer_norm", False),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
    "check_for_nan_in_loss_and_grad": ("check_for_nan_in_grad", True),
    "ddp_bucket_size": ("bucket_size", None),
    "ddp_average_in_collective": ("average_in_collective", True),
    "ddp_pad_buckets_for_high_nccl_busbw": ("pad_buckets_for_high_nccl_busbw", True),
    "ddp_reduce_scatter_with_fp32_accumulation": ("reduce_scatter_with_fp32_accumulation", True),
    "decoder_first_pipeline_num_layers": ("num_layers_in_first_pipeline_stage", None),
    "decoder_last_pipeline_num_layers": ("num_layers_in_last_pipeline_stage", None),
    "overlap_p2p_communication": ("overlap_p2p_comm", True),
    "batch_p2p_communication": ("batch_p2p_comm", True),
}

DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_bias_update_rate": 0.0,
    "bias_activation_fusion": "true on GPUs",
    "optimizer_offload_fraction": 1.0,
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
}
"""Fields that Myxo sets to something else than Megatron, unless a flag is given."""

FIXED: dict[str, tuple[Any, str]] = {
    # name: (the only value, why)
    "calculate_per_token_loss": (True, "losses and gradients are summed over micro-batches and ranks, weighted by the objective"),
    "variable_seq_lengths": (True, "micro-batches are packed, each to its own length"),
    "hidden_dropout": (0.0, "log-probs must be those of the policy that the engine samples from"),
    "attention_dropout": (0.0, "log-probs must be those of the policy that the engine samples from"),
    "attention_softmax_in_fp32": (True, "attention's softmax is taken in float32 always"),
    "apply_query_key_layer_scaling": (False, "attention's softmax is taken in float32 always"),
    "masked_softmax_fusion": (False, "attention runs on packed sequences, without a mask"),
    "grad_reduce_in_fp32": (True, "gradients are float32 always"),
    "check_for_nan_in_grad": (False, "a step whose gradient is not finite is skipped and counted, not aborted"),
    "check_for_large_grads": (False, "clip_grad bounds the gradient"),
    "overlap_param_gather": (False, "parameters are gathered in the optimizer step: they may be pushed right after it"),
    "align_param_gather": (False, "parameters are gathered in the optimizer step: they may be pushed right after it"),
    "average_in_collective": (False, "gradients are summed; the objective's weights make them means"),
    "deallocate_pipeline_outputs": (True, "a stage's output is of no use once it is sent; on a CPU it is kept: gloo may still read it"),
    "moe_router_force_load_balancing": (False, "the router is the policy's"),
    "moe_token_drop_policy": ("probs", "no token is dropped"),
    "moe_expert_capacity_factor": (None, "no token is dropped"),
    "moe_pad_expert_input_to_capacity": (False, "no token is dropped"),
    "moe_token_dropping": (False, "no token is dropped"),
    "moe_input_jitter_eps": (None, "log-probs must be those of the policy that the engine samples from"),
    "optimizer": ("adam", "no other is there"),
    "decoupled_weight_decay": (True, "the optimizer is AdamW"),
    "moe_use_legacy_grouped_gemm": (False, "Megatron gives it up"),
    "fused_single_qkv_rope": (False, "attention is over packed sequences"),
    "defer_embedding_wgrad_compute": (False, "log-probs are computed in chunks by Myxo; see docs/algorithms.md"),
    "wgrad_deferral_limit": (0, "log-probs are computed in chunks by Myxo; see docs/algorithms.md"),
    "delay_wgrad_compute": (False, "it needs Megatron's own schedule of a training step"),
    "ep_overlap_early_attn_memory_release": (False, "it needs Megatron's own schedule of a training step"),
}

NOT_A_FIELD_FIXED: dict[str, tuple[str, Any, str]] = {
    # name: (kind, the only value, why); of no dataclass, but often given
    "use_mcore_models": ("switch", True, "there are no others"),
    "ckpt_format": ("text", "torch_dist", "checkpoints are torch_dist; myxo convert makes others"),
}

_WITHOUT_EFFECT = {
    # the reason: flags of which every value is accepted, and changes nothing
    "updates are computed on the model's device, from pinned host memory; the values are the same": (
        "use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params"
    ),
    "kernels are launched one by one: a CUDA graph has one shape, and packs have any length": (
        "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps cuda_graph_retain_backward_graph "
        "cuda_graph_use_single_mempool"
    ),
    "no layer takes random numbers: nothing is dropped, and weights come from hf_checkpoint": "use_te_rng_tracker",
    "nothing in Megatron-Core reads it": "async_tensor_model_parallel_allreduce tp_comm_bootstrap_backend",
}

NOT_A_FIELD_WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    # name: (kind, why); of no dataclass, but often given
    "padded_vocab_size": ("int", "rows are added as make_vocab_size_divisible_by says, and left out of exports"),
    "use_flash_attn": ("switch", "attention is flash attention on GPUs, by torch or Transformer Engine"),
    "micro_batch_size": ("int", "micro-batches are packed by tokens, see max_tokens_per_gpu"),
    "seq_length": ("int", "micro-batches are packed, each to its own length, see max_tokens_per_gpu"),
    "distributed_backend": ("text", "ranks talk by NCCL on GPUs, by gloo on CPUs"),
    "finetune": ("switch", "a new run starts from hf_checkpoint, with a fresh optimizer; one that is in --load continues, unless --fresh"),
    "no_load_optim": ("switch", "a run that is in --load continues exactly, unless --fresh; a new one starts from hf_checkpoint"),
    "no_load_rng": ("switch", "a run that is in --load continues exactly, unless --fresh; a new one starts from hf_checkpoint"),
    "no_save_optim": ("switch", "a checkpoint holds all that an exact resume needs"),
    "log_interval": ("int", "every step is logged"),
    "log_throughput": ("switch", "it is always logged"),
    "timing_log_level": ("int", "the times of a step are always measured"),
    "no_save_rng": ("switch", "a checkpoint holds all that an exact resume needs"),
}

WITHOUT_EFFECT = {name: reason for reason, names in _WITHOUT_EFFECT.items() for name in names.split()}
"""Flags that are accepted with every value of their kind, and why they change nothing."""

_REASONS = {
    # the reason, or what to use instead: flags that are refused with it
    "a field of [trainer], which see": (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel "
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size use_distributed_optimizer recompute_granularity "
        "mtp_num_layers mtp_loss_scaling_factor recompute_method recompute_num_layers recompute_modules lr "
        "lr_warmup_fraction lr_decay_iters min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad"
    ),
    "weights come from hf_checkpoint; nothing is initialised": (
        "perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std embedding_init_method_std "
        "init_method_xavier_uniform"
    ),
    "use train_dtype": "params_dtype pipeline_dtype autocast_dtype enable_autocast",
    "there is no fp16 training; train_dtype is float32 or bfloat16": (
        "fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    "it is for generation with Megatron; here the engine generates, see the --sglang-… flags": (
        "flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type use_inference_optimized_layers "
        "inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents batch_invariant_mode"
    ),
    "no model family of Myxo has it; docs/models.md lists them": (
        "mtp_standalone qk_l2_norm "
        "apply_residual_connection_post_layernorm no_rope_freq "
        "softmax_scale "
        "mrope_section is_hybrid_model mamba_state_dim "
        "mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs "
        "hetereogenous_dist_checkpoint moe_latent_size moe_apply_probs_on_input use_fused_weighted_squared_relu squared_relu "
        "openai_gelu"
    ),
    "indexers keep the weights of hf_checkpoint; they are not trained": "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
    "use use_distributed_optimizer; there is no FSDP": (
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy preserve_fp32_weights "
        "keep_fp8_transpose_cache fsdp_double_buffer fsdp_manual_registration suggested_communication_unit_size "
        "gradient_reduce_div_fusion num_distributed_optimizer_instances nccl_ub disable_symmetric_registration use_torch_fsdp2"
    ),
    "use max_tokens_per_gpu: sequences are packed by tokens": ("decoder_seq_length encoder_seq_length batch_size rampup_batch_size"),
    "use lr, min_lr, lr_warmup_iters and lr_decay_style; the schedule runs over num_rollout x num_steps_per_rollout steps": (
        "decoupled_lr decoupled_min_lr lr_decay_samples lr_warmup_samples lr_warmup_init "
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples start_weight_decay end_weight_decay weight_decay_incr_style "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"
    ),
    "use prompt_data: prompts come from JSONL or Parquet files": (
        "data_path split train_data_path valid_data_path test_data_path data_cache_path per_split_data_args_path mock_data "
        "dataloader_type num_workers reset_position_ids reset_attention_mask eod_mask_loss no_create_attention_mask_in_dataloader"
    ),
    "the tokenizer is that of hf_checkpoint": "tokenizer_type tokenizer_model vocab_file merge_file vocab_extra_ids ",
    "checkpoints lie in the run's directory; see save_interval, keep_checkpoints and save_hf": ("use_dist_ckpt save_retain_interval"),
    "a run that has a checkpoint continues from it; a new one starts from hf_checkpoint": (
        "load ckpt_step pretrained_checkpoint use_checkpoint_args auto_detect_ckpt_format"
    ),
    "docs/metrics.md tells what is logged and where": (
        "tensorboard_dir tensorboard_log_interval log_params_norm log_num_zeros_in_grad log_progress "
        "log_timers_to_tensorboard log_memory_to_tensorboard moe_per_layer_logging wandb_exp_name wandb_save_dir wandb_entity "
        "log_max_attention_logit"
    ),
    "docs/metrics.md tells what is measured": ("timers barrier_with_L1_time profile"),
    "main weights are whole, in main_params_dtype": "store_param_remainders",
    "parameters are gathered in the optimizer step: they may be pushed right after it": "overlap_param_gather_with_optimizer_step",
    "the optimizer is Adam": (
        "sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
        "muon_tp_mode muon_extra_scale_factor"
    ),
    "attention and context parallelism are over packed sequences, split by Myxo": (
        "max_seqlen_per_dp_cp_rank hybrid_context_parallel hierarchical_context_parallel_sizes"
    ),
    "log-probs are computed in chunks by Myxo; see docs/algorithms.md": ("cross_entropy_loss_fusion cross_entropy_fusion_impl"),
    "use num_rollout: a step is a rollout batch": "train_iters train_samples",
    "use eval_prompt_data and eval_interval": "eval_iters",
    "use num_rollout": "exit_interval",
    "stop the run with SIGTERM: it saves, and the same command continues": "exit_duration_in_mins",
    "SIGTERM saves and stops always": "exit_signal_handler",
    "it is a file's content; there is no quantised training but by the --fp8-… flags": "quant_recipe",
    "it is for Megatron's own tests": "test_mode",
    "set where pipelines are interleaved, and only there": "overlap_p2p_comm",
    "unset where pipelines are interleaved, and only there": "batch_p2p_comm",
    "it needs Megatron's own schedule of a training step": ("overlap_moe_expert_parallel_comm"),
    "use use_rollout_routing_replay or use_routing_replay": "moe_enable_routing_replay",
    "weights are held, saved and pushed in train_dtype": "fp8_param fp8_param_gather fp4_param",
    "use virtual_pipeline_model_parallel_size": "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    "the router is the policy's: which experts it may choose does not depend on the layout": "moe_router_topk_limited_devices",
    "use expert_tensor_parallel_size": "moe_extended_tp",
    "use recompute_granularity selective and recompute_modules moe": "moe_layer_recompute",
    "it changes weights after the optimizer step, behind the objective's back": "qk_clip qk_clip_alpha qk_clip_threshold",
    "use recompute_granularity, recompute_method and recompute_num_layers": "num_microbatches_with_partial_activation_checkpoints",
    "pipelines send by torch's point-to-point calls": "use_ring_exchange_p2p",
    "pipelines send over the trainer's own process group": "pipeline_model_parallel_comm_backend",
}

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Flags that no value is taken of → why."""

_OF_TRANSFORMER_ENGINE = (
    "attention_backend cp_comm_type fp8 fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory first_last_layers_bf16 num_layers_at_start_in_bf16 "
    "num_layers_at_end_in_bf16 tp_only_amax_red fp4 fp4_recipe fp4_quantizer_factory tp_comm_overlap tp_comm_bulk_wgrad "
    "tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs "
    "tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap_disable_qkv moe_grouped_gemm "
    "moe_router_padding_for_fp8 moe_router_padding_for_quantization "
    "use_te_activation_func use_kitchen use_kitchen_attention kitchen_attention_backend "
    "activation_func_fp8_input_store persist_layer_norm memory_efficient_layer_norm reuse_grad_buf_for_mxfp8_param_ag "
    "disable_parameter_transpose_cache fine_grained_activation_offloading offload_modules min_offloaded_tensor_size cpu_offloading "
    "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering"
)

TRANSFORMER_ENGINE = frozenset(_OF_TRANSFORMER_ENGINE.split())
"""Fields that only Transformer Engine's layers look at: another value than the default is refused beside local ones."""

_KERNELS = (
    "attention_backend cp_comm_type moe_grouped_gemm moe_permute_fusion moe_router_fusion apply_rope_fusion "
    "persist_layer_norm memory_efficient_layer_norm tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad "
    "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs "
    "tp_comm_overlap_disable_qkv"
)

KERNELS = frozenset(_KERNELS.split())
"""Fields that only choose among Transformer Engine's kernels for the same values: without them they have no effect. Those that are not in
`TRANSFORMER_ENGINE` do so in local layers, too."""
