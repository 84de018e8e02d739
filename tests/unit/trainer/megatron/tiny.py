"""Tiny models and batches: real architectures, a few thousand weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.packing import PackedBatch

VOCAB = 67
"""A prime, so that no tensor-parallel size divides it."""


INTERVAL = 2
"""In models with linear attention, every so manieth layer has softmax attention."""


KINDS = ["qwen3", "qwen3_tied", "qwen2", "llama", "llama3_rope", "qwen3_moe", "qwen3_moe_mixed"]
KINDS += [
    "glm4",
    "glm4_moe",
    "glm4_moe_air",
    "deepseek_v3",
    "moonlight",
    "minimax_m2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_text",
]
KINDS += ["mistral", "gemma3_text", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "qwen2_moe"]
"""The checkpoints that the tests of all families take."""


def make_checkpoint(kind: str, directory: Path, **changed: int) -> None:
    """Write a random Hugging Face checkpoint of ``kind``, with norms and biases that are not trivial."""
    import transformers

    expert_width = changed.pop("moe_intermediate_size", 24)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.15,
        **changed,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": expert_width, "decoder_sparse_step": 1}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    }
    sigmoid = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    latent = {
        **{name: size for name, size in sizes.items() if name != "num_key_value_heads"},
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    deepseek = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # not transformers' own entries
    t = transformers
    configs = {
        "qwen3": lambda: t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False),
        "qwen3_tied": lambda: t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "qwen2": lambda: t.Qwen2Config(**sizes, tie_word_embeddings=True),
        "llama": lambda: t.LlamaConfig(**sizes, tie_word_embeddings=False),
        "llama3_rope": lambda: t.LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters=llama3),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**sizes, **experts, head_dim=16, norm_topk_prob=True, tie_word_embeddings=False),
        "qwen3_moe_mixed": lambda: t.Qwen3MoeConfig(
            **sizes, **experts, head_dim=16, norm_topk_prob=False, mlp_only_layers=[0], tie_word_embeddings=False
        ),
        "glm4": lambda: t.Glm4Config(**sizes, head_dim=16, tie_word_embeddings=False, pad_token_id=None),
        "glm4_moe": lambda: t.Glm4MoeConfig(
            **sizes, **sigmoid, head_dim=16, attention_bias=True, use_qk_norm=True, n_group=1, topk_group=1
        ),
        "glm4_moe_air": lambda: t.Glm4MoeConfig(**sizes, **sigmoid, head_dim=16, attention_bias=True, n_group=1, topk_group=1),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **latent, **sigmoid, **deepseek, q_lora_rank=24, n_group=4, topk_group=2, rope_parameters=yarn
        ),
        "moonlight": lambda: t.DeepseekV3Config(**latent, **sigmoid, **deepseek, q_lora_rank=None, n_group=1, topk_group=1),
    }
    minimax = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid", "rotary_dim": 8}
    half = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    deep = {**sizes, "num_hidden_layers": 4}  # for pipelines of several chunks a stage, or of stages that differ
    configs |= {
        "deep": lambda: t.Qwen3Config(**deep, head_dim=16, tie_word_embeddings=True),
        "deep_moe": lambda: t.Qwen3MoeConfig(
            **deep, **experts, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=False
        ),
    }
    configs["minimax_m2"] = lambda: t.MiniMaxM2Config(
        **sizes, **minimax, head_dim=16, num_local_experts=8, num_experts_per_tok=4, rope_parameters=half, bos_token_id=1, eos_token_id=2
    )
    gpt_oss = {**{name: size for name, size in sizes.items() if name != "rms_norm_eps"}, "rms_norm_eps": 1e-5}
    grouped_yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    configs["gpt_oss"] = lambda: t.GptOssConfig(
        **gpt_oss,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=7.0,
        rope_parameters={**grouped_yarn, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
        attn_implementation="eager",
    )
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8}
    quarter = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    configs["qwen3_next"] = lambda: t.Qwen3NextConfig(
        **sizes, **experts, **linear, head_dim=16, rope_parameters=quarter,
        shared_expert_intermediate_size=40, full_attention_interval=INTERVAL,
    )  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_position_embeddings": 16, "patch_size": 4}
    mrope = {**quarter, "mrope_section": [1, 1, 0], "mrope_interleaved": True}

    def with_vision(name: str, **more: int) -> Any:
        text = {**sizes, **linear, **more, "head_dim": 16, "rope_parameters": mrope, "full_attention_interval": INTERVAL}
        return getattr(t, f"{name}Config")(text_config=text, vision_config={**vision, "out_hidden_size": 32})

    configs["qwen3_5"] = lambda: with_vision("Qwen3_5")
    configs["qwen3_5_moe"] = lambda: with_vision("Qwen3_5Moe", **experts, shared_expert_intermediate_size=40)
    configs["qwen3_5_text"] = lambda: with_vision("Qwen3_5", linear_num_key_heads=4).text_config
    # with fewer heads many scores are 0, all of them negative before the ReLU, and which of these keys are chosen is left to chance
    indexer = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "num_key_value_heads": 4}
    # a pipeline of two stages divides the four layers where a layer with an indexer begins
    shared = {**latent, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
    configs["deepseek_v32"] = lambda: t.DeepseekV32Config(
        **latent, **sigmoid, **deepseek, **indexer, num_experts=8, q_lora_rank=24, n_group=4, topk_group=2, rope_parameters=yarn
    )
    configs["glm_moe_dsa"] = lambda: t.GlmMoeDsaConfig(**shared, **sigmoid, **deepseek, **indexer, q_lora_rank=24, n_group=1, topk_group=1)
    configs["glm4_moe_lite"] = lambda: t.Glm4MoeLiteConfig(
        **latent, **sigmoid, **deepseek, q_lora_rank=24, n_group=1, topk_group=1, num_key_value_heads=4
    )
    configs["qwen2_moe"] = lambda: t.Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=40, norm_topk_prob=False)
    by_kind = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
               "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}  # fmt: skip
    configs["gemma3_text"] = lambda: t.Gemma3TextConfig(
        **sizes, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=20,
        rope_parameters=by_kind, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    configs["mistral"] = lambda: t.MistralConfig(**sizes, head_dim=16, sliding_window=None, pad_token_id=None)
    torch.manual_seed(list(configs).index(kind))
    config = configs[kind]()
    kinds = t.AutoModelForImageTextToText if hasattr(config, "vision_config") else t.AutoModelForCausalLM
    model = kinds.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.5)
            elif "conv1d" in name:
                parameter.normal_(std=0.8)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
            elif name.endswith("gate_up_proj"):
                parameter.mul_(6)  # beyond the limits of a clamped activation
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    if hasattr(config.get_text_config(), "linear_num_key_heads"):
        config.get_text_config().full_attention_interval = INTERVAL  # which transformers drops
    model.config = config
    model.save_pretrained(directory)
    if hasattr(config, "vision_config"):
        divide(directory, 4)


def divide(directory: Path, count: int) -> None:
    """Moves what sees into a file of its own, and keeps the matrices of all experts in one tensor, as published models do."""
    held = load_file(directory / "model.safetensors")
    vision = {name: held.pop(name) for name in [*held] if ".visual." in name}
    for name in [name for name in held if ".experts.0.gate_proj." in name]:
        before = name.split("0.gate_proj.")[0]
        up, gate, down = (
            torch.stack([held.pop(f"{before}{i}.{kind}_proj.weight") for i in range(count)]) for kind in ("up", "gate", "down")
        )
        held |= {f"{before}gate_up_proj": torch.cat([gate, up], 1), f"{before}down_proj": down}
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(vision, directory / "model-vision.safetensors", metadata={"format": "pt"})


def sequences(count: int, seed: int = 3, longest: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def pack(seqs: Sequence[Tensor]) -> PackedBatch:
    """One micro-batch that trains every label, with advantages that differ from token to token."""
    tokens = torch.cat(list(seqs))
    labels = torch.cat([torch.cat([s[1:], s.new_zeros(1)]) for s in seqs])
    mask = torch.cat([torch.cat([torch.ones(len(s) - 1), torch.zeros(1)]) for s in seqs])
    starts = torch.tensor([0, *(len(s) for s in seqs)]).cumsum(0).int()
    advantages = torch.sin(tokens.float() * 3 + labels)
    return PackedBatch(tokens, labels, mask, starts, max(len(s) for s in seqs), {"advantages": advantages})
