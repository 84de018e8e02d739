"""What a Hugging Face ``config.json`` says about a model, for the families that the trainer knows.

:func:`read_architecture` refuses whatever it cannot reproduce exactly (another activation, biases, a rope scaling it does
not know) instead of training a model that is almost the right one. :func:`hf_tensors` is the list of tensors that such a
model's safetensors hold: loading checks a checkpoint against it, export follows its order.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What distinguishes one ``model_type`` from another.

    Args:
        qk_norm: RMS norm over each query and key head. qkv_bias: biases on the q, k and v projections.
        moe: mixture-of-experts MLPs with a softmax router.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    moe: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, moe=True),
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Args:
        theta: base of the frequencies. factor: 1 for the plain kind, else Llama 3.1's stretching of low frequencies with
            ``low_freq_factor``, ``high_freq_factor`` and ``original_max_positions`` (tokens).
    """

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Float32 [head_dim / 2], in the order of operations of the Hugging Face implementation."""
        frequencies = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if self.factor == 1.0:
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_max_positions / self.low_freq_factor
        shortest = self.original_max_positions / self.high_freq_factor
        smooth = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        stretched = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, stretched)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts.

    Args:
        count: experts per layer. per_token: experts chosen for each token. ffn_hidden_size: width of one expert.
        normalize: whether the chosen experts' probabilities are rescaled to sum to one.
        dense_layers: indices of the layers that keep a plain MLP.
    """

    count: int
    per_token: int
    ffn_hidden_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A model's shape, as its ``config.json`` gives it."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    rope: Rope
    experts: Experts | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def as_json(self) -> dict[str, Any]:
        """Plain values, flat (``rope.theta``), equal after a trip through JSON: what a checkpoint remembers."""
        flat: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if isinstance(value, dict):
                flat.update({f"{key}.{inner}": list(v) if isinstance(v, tuple) else v for inner, v in value.items()})
            else:
                flat[key] = value
        return flat


def read_architecture(hf_dir: Path) -> Architecture:
    """The architecture of a Hugging Face checkpoint directory.

    Raises:
        ConfigError: the directory or its ``config.json`` is missing, the model type is unknown, a required entry is missing
            or of the wrong type, or the config asks for something that is not implemented. It names the entry.
    """
    if not hf_dir.is_dir():
        raise ConfigError("trainer.hf_checkpoint", str(hf_dir), "a directory holding a Hugging Face checkpoint; there is none")
    path = hf_dir / "config.json"
    if not path.is_file():
        raise ConfigError("trainer.hf_checkpoint", str(hf_dir), "a Hugging Face checkpoint; it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError("trainer.hf_checkpoint", str(path), f"a JSON file ({error})") from error
    return _Entries(path, raw).architecture()


class _Entries:
    """Typed access to one ``config.json``."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path, self.raw = path, raw

    def error(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}:{key}", self.raw.get(key), expected)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str) -> float:
        value = self.raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "a positive number")
        return float(value)

    def require(self, key: str, wanted: object, reason: str) -> None:
        """Refuse any value but ``wanted``; a missing entry counts as ``wanted``."""
        if self.raw.get(key, wanted) not in (wanted, None):
            raise self.error(key, f"{wanted!r}; {reason}")

    def architecture(self) -> Architecture:
        model_type = self.raw.get("model_type")
        if model_type not in FAMILIES:
            raise self.error("model_type", f"one of {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[model_type]
        self.require("hidden_act", "silu", "other activations are not implemented")
        self.require("mlp_bias", False, "biases in the MLP are not implemented")
        self.require("use_sliding_window", False, "sliding windows are not implemented")
        if not family.qkv_bias:
            self.require("attention_bias", False, f"{model_type} with attention biases is not implemented")
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        layers = self.integer("num_hidden_layers")
        return Architecture(
            model_type=model_type,
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=self.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=self.integer("num_key_value_heads", default=heads),
            head_dim=self.integer("head_dim", default=hidden // heads),
            vocab_size=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings"),
            norm_eps=self.number("rms_norm_eps"),
            tied_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
            rope=self.rope(),
            experts=self.experts(layers) if family.moe else None,
        )

    def rope(self) -> Rope:
        """transformers 5 writes ``rope_parameters`` with theta inside, older ones ``rope_theta`` and ``rope_scaling``."""
        nested = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        theta = nested.get("rope_theta", self.raw.get("rope_theta", 10000.0))
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default":
            return Rope(theta=float(theta))
        if kind != "llama3":
            raise ConfigError(f"{self.path}:rope_type", kind, "'default' or 'llama3'; other rope scalings are not implemented")
        try:
            return Rope(
                theta=float(theta),
                factor=float(nested["factor"]),
                low_freq_factor=float(nested["low_freq_factor"]),
                high_freq_factor=float(nested["high_freq_factor"]),
                original_max_positions=int(nested["original_max_position_embeddings"]),
            )
        except KeyError as error:
            raise ConfigError(f"{self.path}:rope_scaling", nested, f"an entry {error} for rope type 'llama3'") from error

    def experts(self, layers: int) -> Experts:
        step = self.integer("decoder_sparse_step", default=1)
        plain = self.raw.get("mlp_only_layers") or []
        dense = tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step)
        return Experts(
            count=self.integer("num_local_experts" if "num_local_experts" in self.raw else "num_experts"),  # transformers 5
            per_token=self.integer("num_experts_per_tok"),
            ffn_hidden_size=self.integer("moe_intermediate_size"),
            normalize=bool(self.raw.get("norm_topk_prob", False)),
            dense_layers=dense,
        )


def hf_tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the model's safetensors, in the order of the model."""
    a = architecture
    queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = (a.hidden_size,)
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = (width, a.hidden_size)
            if a.family.qkv_bias:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = (width,)
        if a.family.qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = (a.head_dim,)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = (a.head_dim,)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = (a.hidden_size, queries)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (a.hidden_size,)
        if a.experts is not None and a.is_moe_layer(layer):
            tensors[f"{prefix}.mlp.gate.weight"] = (a.experts.count, a.hidden_size)
            for expert in range(a.experts.count):
                tensors.update(_mlp(f"{prefix}.mlp.experts.{expert}", a.hidden_size, a.experts.ffn_hidden_size))
        else:
            tensors.update(_mlp(f"{prefix}.mlp", a.hidden_size, a.ffn_hidden_size))
    tensors["model.norm.weight"] = (a.hidden_size,)
    if not a.tied_embeddings:
        tensors["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return tensors


def _mlp(prefix: str, hidden_size: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden_size),
        f"{prefix}.up_proj.weight": (width, hidden_size),
        f"{prefix}.down_proj.weight": (hidden_size, width),
    }
