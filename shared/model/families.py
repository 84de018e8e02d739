"""Reads a model's architecture from a Hugging Face ``config.json``, for the families that the trainer knows.

`read_architecture` refuses whatever it cannot reproduce exactly (another activation, biases, a rope scaling it does
not know) instead of training a model that is almost the right one. `docs/models.md` lists what a new family needs.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shared.config.engine_limits import text_entries
from shared.config.run_config import RunConfig
from shared.config.trainer_section import TrainerSection
from shared.model.architecture import (
    Architecture,
    Experts,
    GroupedYarn,
    Indexer,
    LatentAttention,
    LinearAttention,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Tower,
    YarnScaling,
)
from shared.model.quantization import ENTRY, format_of
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json
from shared.schema.sample import ExpertChoices

Trait = bool | tuple[str, bool]  # A feature of a family: a fixed answer, or the entry of ``config.json`` that decides it, with its default


@dataclass(frozen=True)
class Family:
    """The features of one ``model_type``; the fields are those of :class:`.architecture.Architecture`.

    Args:
        experts: how the router scores them; None for a family without. ``softmax`` and ``sigmoid`` also tell two dialects of
            ``config.json`` apart; ``minimax`` is a third one, of sigmoid scores, ``gpt_oss`` a fourth. latent: multi-head latent
            attention.
        window_pattern: of so many layers the last one sees all tokens and the others ``sliding_window``, where ``layer_types`` does not
            say which; 0 for a family without windows.
        linear: gated delta net in most layers, gated softmax attention in the others, norms of one more than their weight.
        gemma: Gemma's choices: GELU, a scaled embedding that is also the output layer, a scale of queries, norms of one more than their
            weight before and after each block, and another rotary embedding in layers with a window.
        rotary_fraction: default of ``partial_rotary_factor``; None if the family has no such entry.
    """

    qk_norm: Trait = False
    joint_qk_norm: bool = False
    qkv_bias: Trait = False
    post_norms: bool = False
    fused_gate_up: bool = False
    mixtral_names: bool = False
    stacked_experts: bool = False
    biases: bool = False
    sinks: bool = False
    window_pattern: int = 0
    gemma: bool = False
    interleaved_rope: bool = False
    rotary_fraction: float | None = None
    experts: Literal["softmax", "sigmoid", "minimax", "gpt_oss"] | None = None
    latent: bool = False
    linear: bool = False
    indexer: bool = False
    prefix: str = "model"
    apart_projections: bool = False

    @property
    def activation(self) -> tuple[str, str]:
        """Returns the entry that names the activation of MLPs, and the one that is implemented."""
        return ("hidden_activation", "gelu_pytorch_tanh") if self.gemma else ("hidden_act", "silu")

    @property
    def zero_centered_norms(self) -> bool:
        return self.linear or self.gemma

    @property
    def rope_scaling(self) -> str:
        """Returns the one way in which its rotary embedding may be scaled."""
        if self.gemma:
            return "linear"
        return "yarn" if self.latent or self.experts == "gpt_oss" else "llama3"


_DEEPSEEK = Family(latent=True, experts="sigmoid")
_SPARSE = Family(latent=True, experts="sigmoid", indexer=True)
_QWEN3_NEXT = Family(qk_norm=True, linear=True, rotary_fraction=0.25, experts="softmax")
_QWEN3_5_MOE = replace(_QWEN3_NEXT, apart_projections=True)
_QWEN3_5 = replace(_QWEN3_5_MOE, experts=None)
_WITH_VISION = "model.language_model"

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=("qkv_bias", True), experts="softmax"),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts="softmax"),
    "glm4": Family(qkv_bias=("attention_bias", True), post_norms=True, fused_gate_up=True, interleaved_rope=True, rotary_fraction=0.5),
    "glm4_moe": Family(qk_norm=("use_qk_norm", False), qkv_bias=("attention_bias", False), rotary_fraction=0.5, experts="sigmoid"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _SPARSE,
    "kimi_k2": _DEEPSEEK,
    "gemma3_text": Family(qk_norm=True, post_norms=True, window_pattern=6, gemma=True),
    "mimo": Family(qkv_bias=("attention_bias", True)),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": replace(_QWEN3_5, prefix=_WITH_VISION),
    "qwen3_5_moe": replace(_QWEN3_5_MOE, prefix=_WITH_VISION, stacked_experts=True),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "minimax_m2": Family(joint_qk_norm=True, experts="minimax", mixtral_names=True),
    "gpt_oss": Family(qkv_bias=True, biases=True, sinks=True, window_pattern=2, experts="gpt_oss", stacked_experts=True),
}

_WINDOWS_SERVED = {"gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "olmo3", "exaone4", "cohere2"}
"""The families whose sliding windows SGLang's models apply."""


def architecture_of(config: RunConfig) -> Architecture:
    """Returns the architecture of a run's policy, as its trainer's backend reads it. Raises ConfigError."""
    architecture = read_architecture(config.model.hf_checkpoint, backend=config.trainer.trainer_backend)
    return with_drafts(architecture, config.trainer)


def read_architecture(hf_dir: Path, quantized: bool = False, backend: str = "megatron") -> Architecture:
    """Returns the architecture of a Hugging Face checkpoint directory.

    Args:
        quantized: whether its weights may be. backend: with ``torch`` any model that has the usual entries is read, by its sizes alone:
            transformers makes the model, and refuses what it does not know.

    Raises:
        ConfigError: the directory or its ``config.json`` is missing, the model type is unknown, a required entry is missing
            or of the wrong type, or the config asks for something that is not implemented. It names the entry.
    """
    if not hf_dir.is_dir():
        raise ConfigError("model.hf_checkpoint", str(hf_dir), "a directory holding a Hugging Face checkpoint; there is none")
    path = hf_dir / "config.json"
    if not path.is_file():
        raise ConfigError("model.hf_checkpoint", str(hf_dir), "a Hugging Face checkpoint; it has no config.json")
    try:
        raw = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("model.hf_checkpoint", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError("model.hf_checkpoint", str(path), "a JSON object")
    if quantized:
        raw.pop("quantization_config", None)
    try:
        return _Entries(path, raw).outline() if backend == "torch" else _Entries(path, text_entries(raw)).architecture()
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:  # an entry of a type that none has
        raise ConfigError("model.hf_checkpoint", str(path), f"entries of the types that a config.json has ({error})") from error


def planned_architecture(hf_dir: Path, outline: Architecture, backend: str | None) -> Architecture:
    """Returns what memory is planned and operations counted by; on the torch backend all known of a family, else its outline with traits.

    Checkpoints hold the outline itself, and are compared with it: what is planned may change.
    """
    if backend != "torch":
        return outline
    with contextlib.suppress(ConfigError):
        return read_architecture(hf_dir, quantized=True)
    kind, experts = outline.model_type, outline.experts
    entries = text_entries(parse_json((hf_dir / "config.json").read_bytes()))
    if experts is not None and isinstance(shared := entries.get("n_shared_experts"), int):
        experts = replace(experts, shared_ffn_hidden_size=shared * experts.ffn_hidden_size)
    return replace(
        outline,
        experts=experts,
        gelu=kind.startswith("gemma"),
        fused_gate_up=kind.startswith(("phi", "glm")),
        zero_centered_norms=kind.startswith("gemma"),
        post_norms=kind.startswith(("gemma2", "gemma3")),
        qk_norm=kind.startswith(("gemma3", "olmo", "flex_olmo", "apertus", "exaone4", "dots1")) and kind != "olmo",
    )


TOWERS = ("visual.", "audio_tower.", "multi_modal_projector.")  # In the names of tensors of what sees or hears


def tower_of(entries: Mapping[str, Any], parameters: int) -> Tower | None:
    """Returns what of a model sees or hears, by its ``config.json``; None where that names none of its sizes.

    Args:
        parameters: of it, which the checkpoint's files tell.
    """
    sees, hears = entries.get("vision_config"), entries.get("audio_config")
    with contextlib.suppress(KeyError, TypeError):
        if isinstance(hears, dict):
            sizes = (hears["encoder_layers"], hears["d_model"], hears["encoder_ffn_dim"], hears["encoder_attention_heads"])
            return Tower(parameters, *sizes, gated=False, rotated=False, per_token=2, matrix="model.audio_tower.layers.0.fc1.weight")
        if isinstance(sees, dict):
            glm = entries["model_type"].startswith("glm4v")
            sizes = (sees["depth"], sees["hidden_size"], sees["out_hidden_size" if glm else "intermediate_size"], sees["num_heads"])
            gated, merged = glm or entries["model_type"] == "qwen2_5_vl", sees["spatial_merge_size"] ** 2
            return Tower(parameters, *sizes, gated, rotated=True, per_token=merged, matrix="model.visual.blocks.0.attn.qkv.weight")
    return None


# Names that families of transformers' have for the number of a layer's experts, and of those that each token goes through
_EXPERTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
_CHOSEN = "num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"


class _Entries:
    """Typed access to one ``config.json``."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path, self.raw = path, raw

    def error(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}:{key}", self.raw.get(key), expected)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, "required: a positive integer" if least == 1 else f"required: an integer, at least {least}")
        return value

    def number(self, key: str) -> float:
        value = self.raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "required: a positive number")
        return float(value)

    def trait(self, trait: Trait) -> bool:
        if isinstance(trait, bool):
            return trait
        key, default = trait
        return bool(self.raw.get(key, default))

    def require(self, key: str, wanted: object, reason: str) -> None:
        """Refuses any value but ``wanted``; a missing entry counts as ``wanted``."""
        if self.raw.get(key, wanted) not in (wanted, None):
            raise self.error(key, f"{wanted!r}; {reason}")

    def architecture(self) -> Architecture:
        model_type = self.raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise self.error("model_type", f"one of {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[model_type]
        choices = self.gemma(family) if family.gemma else {}
        self.require(*family.activation, "other activations are not implemented")
        self.require("mlp_bias", False, "biases in the MLP are not implemented")
        self.require("use_sliding_window", False, "sliding windows are not implemented")
        if ENTRY in self.raw:
            format_of(self.path, self.raw[ENTRY])
        if family.qkv_bias is False:
            self.require("attention_bias", False, f"{model_type} with attention biases is not implemented")
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        layers = self.integer("num_hidden_layers")
        latent = self.latent() if family.latent else None
        head_dim = latent.qk_head_dim + latent.qk_pos_emb_head_dim if latent else self.integer("head_dim", default=hidden // heads)
        return Architecture(
            model_type=model_type,
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=self.integer("intermediate_size", default=self.raw.get("moe_intermediate_size") if family.linear else None),
            num_attention_heads=heads,
            num_key_value_heads=heads if latent else self.integer("num_key_value_heads", default=heads),
            head_dim=head_dim,
            vocab_size=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings"),
            norm_eps=self.number("rms_norm_eps"),
            tied_embeddings=bool(self.raw.get("tie_word_embeddings", family.gemma)),
            rope=self.rope(family),
            experts=self.experts(family.experts, layers),
            latent=latent,
            linear=self.linear(layers) if family.linear else None,
            indexer=self.indexer(layers) if family.indexer else None,
            qk_norm=self.trait(family.qk_norm),
            joint_qk_norm=family.joint_qk_norm,
            qkv_bias=self.trait(family.qkv_bias),
            biases=family.biases,
            sinks=family.sinks,
            windows=self.windows(family.window_pattern, layers, model_type),
            output_gate=family.linear,
            zero_centered_norms=family.zero_centered_norms,
            post_norms=family.post_norms,
            fused_gate_up=family.fused_gate_up,
            prefix=family.prefix,
            apart_projections=family.apart_projections,
            mixtral_names=family.mixtral_names,
            stacked_experts=family.stacked_experts,
            draft_layers=self.draft_layers(family, model_type),
            **choices,
        )

    def draft_layers(self, family: Family, model_type: str) -> int:
        """Returns how many layers draft. Qwen3-Next's published config does not say that it has one."""
        drafts = family.experts or model_type == "mimo"
        return self.integer("num_nextn_predict_layers", default=int(model_type == "qwen3_next"), least=0) if drafts else 0

    def gemma(self, family: Family) -> dict[str, Any]:
        """Returns what Gemma alone has."""
        self.require("use_bidirectional_attention", False, "only causal attention is implemented")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            self.require(key, None, "soft caps are not implemented")
        scale = self.integer("query_pre_attn_scalar", default=256) ** -0.5
        return {"window_rope": self.rope(family, windowed=True), "softmax_scale": scale, "gelu": True, "scaled_embedding": True,
                "feedforward_names": True}  # fmt: skip

    def windows(self, pattern: int, layers: int, model_type: str) -> tuple[int, ...]:
        """Returns the window of each layer; nothing for a family without."""
        if not pattern:
            self.check_windows(model_type)
            return ()
        kinds = self.raw.get("layer_types")
        if kinds is None:
            pattern = self.integer("sliding_window_pattern", default=pattern)
            kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
        if len(kinds) != layers or not {*kinds} <= {"sliding_attention", "full_attention"}:
            raise self.error("layer_types", f"sliding_attention or full_attention for each of the {layers} layers")
        return tuple(self.integer("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)

    def check_windows(self, model_type: str) -> None:
        """Raises ConfigError for a window that transformers has and engines do not."""
        window, kinds = self.raw.get("sliding_window"), self.raw.get("layer_types") or ["sliding_attention"]
        slides = isinstance(window, int) and self.raw.get("use_sliding_window", True) and "sliding_attention" in kinds
        if slides and model_type not in _WINDOWS_SERVED and (window or 0) < self.integer("max_position_embeddings", default=2**31):
            raise self.error("sliding_window", f"none: engines serve {model_type} without windows, and would score tokens otherwise")

    def check_served(self, model_type: str) -> None:
        """Raises ConfigError for what transformers computes otherwise than engines do."""
        self.check_windows(model_type)
        rope = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        for one in (rope, *rope.values()):
            if isinstance(one, dict) and one.get("rope_type", one.get("type")) == "dynamic" and "alpha" not in one:
                raise ConfigError(
                    f"{self.path}:rope_type", "dynamic", "another one; engines stretch all sequences alike, transformers long ones"
                )
        if self.raw.get("indexer_rope_interleave") is not None:
            raise self.error(
                "indexer_rope_interleave", "no such entry: engines read it, and transformers does not; Megatron trains the model"
            )

    def outline(self) -> Architecture:
        """Returns the sizes of a model of any family. Raises ConfigError for one without the entries that all have."""
        if isinstance(inner := self.raw.get("text_config"), dict):
            return _Entries(self.path, {"tie_word_embeddings": self.raw.get("tie_word_embeddings", True), **inner}).outline()
        model_type = self.raw.get("model_type")
        if not isinstance(model_type, str):
            raise self.error("model_type", "the name of a family of transformers'")
        self.check_served(model_type)
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        width = self.of_all_layers(("moe_intermediate_size", "intermediate_size")) or 4 * hidden
        count = self.of_all_layers(_EXPERTS)
        chosen = self.of_all_layers(_CHOSEN)
        if count > 1 and not chosen:
            raise self.error(_CHOSEN[0], f"how many of {count} experts each token goes through, or {', '.join(_CHOSEN[1:])}")
        return Architecture(
            model_type=model_type,
            num_layers=self.integer("num_hidden_layers"),
            hidden_size=hidden,
            ffn_hidden_size=self.integer("intermediate_size", default=width),
            num_attention_heads=heads,
            num_key_value_heads=self.integer("num_key_value_heads", default=heads),
            head_dim=self.integer("head_dim", default=max(hidden // heads, 1)),
            vocab_size=self.integer("vocab_size"),
            max_positions=self.integer("max_position_embeddings", default=2**31),
            norm_eps=1e-6,
            tied_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
            rope=Rope(10000.0),
            experts=Experts(count, chosen or 1, width, True) if count else None,
        )

    def of_all_layers(self, names: Sequence[str]) -> int:
        """Returns the first of the entries that is given, 0 without one. One that lists its layers' numbers says the same of all."""
        for name in filter(self.raw.get, names):
            if isinstance(given := self.raw[name], list):
                self.raw[name] = given[0]
                if any(one != given[0] for one in given):
                    raise ConfigError(f"{self.path}:{name}", given, "the same number for all layers")
            return self.integer(name)
        return 0

    def latent(self) -> LatentAttention:
        self.require("rope_interleave", True, "latent attention is implemented with interleaved rotary dimensions")
        return LatentAttention(
            q_lora_rank=None if self.raw.get("q_lora_rank") is None else self.integer("q_lora_rank"),
            kv_lora_rank=self.integer("kv_lora_rank"),
            qk_head_dim=self.integer("qk_nope_head_dim"),
            qk_pos_emb_head_dim=self.integer("qk_rope_head_dim"),
            v_head_dim=self.integer("v_head_dim"),
        )

    def linear(self, layers: int) -> LinearAttention:
        self.require("attn_output_gate", True, "softmax attention is implemented with output gates here")
        if self.raw.get("output_gate_type") not in (None, "silu", "swish"):
            raise self.error("output_gate_type", "silu; other gates of linear attention's output are not implemented")
        names = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
        sizes = {name: self.integer(name) for name in names}
        if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
            raise self.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {sizes['linear_num_key_heads']}")
        interval = self.integer("full_attention_interval", default=4)
        linear = tuple(layer for layer in range(layers) if (layer + 1) % interval)
        if (kinds := self.raw.get("layer_types")) is not None:
            stated = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
            if stated != linear or len(kinds) != layers:
                raise self.error(
                    "full_attention_interval", f"what layer_types say, {kinds}; engines read the interval alone, 4 where it is missing"
                )
        return LinearAttention(**sizes, layers=linear)

    def indexer(self, layers: int) -> Indexer:
        """Returns the choice of keys. Which layers share one is in the first of three entries that is there, as engines read them."""
        for key, wanted in {"index_kpool": 1, "index_k_norm_type": "layer"}.items():
            self.require(key, wanted, "other indexers are not implemented")
        if self.raw.get("q_lora_rank") is None:
            raise self.error("q_lora_rank", "required: a positive integer; the indexer's queries are made of low-rank ones")
        freq, offset = self.integer("index_topk_freq", default=1), self.integer("index_skip_topk_offset", default=2)
        kinds = ["shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(layers)]
        key = "indexer_types" if self.raw.get("indexer_types") is not None else "index_topk_pattern"
        if (given := self.raw.get(key)) is not None:
            kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in given][:layers]
        if len(kinds) < layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
            raise self.error(key, f"'full' or 'shared' for each of the {layers} layers, the first of them 'full'")
        return Indexer(
            heads=self.integer("index_n_heads"),
            head_dim=self.integer("index_head_dim", least=self.integer("qk_rope_head_dim")),
            top_k=self.integer("index_topk"),
            interleaved=bool(self.raw.get("indexer_rope_interleave", False)),
            shared_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "shared"),
        )

    def rope(self, family: Family, windowed: bool = False) -> Rope:
        """Returns the rotary embedding: transformers 5 writes ``rope_parameters``, older versions ``rope_theta`` and ``rope_scaling``.

        Args:
            windowed: that of layers with a window, where it is another one.
        """
        nested, theta = self.rope_entries(family, windowed)
        fraction = 1.0
        if family.experts == "minimax":
            head = self.integer("head_dim")
            fraction = self.integer("rotary_dim", default=head) / head
            if fraction > 1 or float(nested.get("partial_rotary_factor", fraction)) != fraction:
                stated = nested.get("partial_rotary_factor", "at most 1")
                raise self.error("rotary_dim", f"head_dim, {head}, times partial_rotary_factor, {stated}: engines read this one alone")
        if family.rotary_fraction is not None:
            outside = self.raw.get("partial_rotary_factor", family.rotary_fraction)
            fraction = float(nested.get("partial_rotary_factor", outside))
        kind = nested.get("rope_type", nested.get("type", "default"))
        known = "default" if windowed else family.rope_scaling
        if kind not in ("default", known):
            expected = f"'default' or '{known}'; other rope scalings are not implemented for this family"
            raise ConfigError(f"{self.path}:rope_type", kind, expected)
        try:
            yarn, linear = _yarn if family.latent else _grouped_yarn, lambda found: LinearScaling(float(found["factor"]))
            scaling = {"default": lambda _: None, "llama3": _llama3, "yarn": yarn, "linear": linear}[kind](nested)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}:rope_scaling", nested, f"valid entries for rope type {kind!r}: {error}") from error
        return Rope(theta=theta, fraction=fraction, interleaved=family.interleaved_rope, scaling=scaling)

    def rope_entries(self, family: Family, windowed: bool) -> tuple[dict[str, Any], float]:
        """Returns the entries of a rotary embedding, and its base."""
        nested = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not family.gemma:
            return nested, float(nested.get("rope_theta", self.raw.get("rope_theta", 10000.0)))
        if windowed or "full_attention" in nested:
            nested = nested.get("sliding_attention" if windowed else "full_attention") or {}
        outside, usual = ("rope_local_base_freq", 1e4) if windowed else ("rope_theta", 1e6)
        return nested, float(nested.get("rope_theta", self.raw.get(outside, usual)))

    def experts(self, score: str | None, layers: int) -> Experts | None:
        if score is None:
            return None
        return {"softmax": self.softmax_experts, "sigmoid": self.sigmoid_experts, "minimax": self.minimax_experts,
                "gpt_oss": self.gpt_oss_experts}[score](layers)  # fmt: skip

    def softmax_experts(self, layers: int) -> Experts:
        step = self.integer("decoder_sparse_step", default=1)
        plain = self.raw.get("mlp_only_layers") or []
        dense = tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step)
        shared = self.integer("shared_expert_intermediate_size", default=0, least=0)
        return Experts(
            count=self.integer("num_local_experts" if "num_local_experts" in self.raw else "num_experts"),  # transformers 5
            per_token=self.integer("num_experts_per_tok"),
            ffn_hidden_size=self.integer("moe_intermediate_size"),
            normalize=bool(self.raw.get("norm_topk_prob", "linear_num_key_heads" in self.raw)),
            dense_layers=dense,
            shared_ffn_hidden_size=shared,
            shared_gate=shared > 0,
        )

    def sigmoid_experts(self, layers: int) -> Experts:
        self.require("norm_topk_prob", True, "a sigmoid router is implemented with rescaled probabilities")
        self.require("scoring_func", "sigmoid", "this family's router is implemented with sigmoid scores")
        self.require("topk_method", "noaux_tc", "this family's experts are chosen by corrected scores")
        self.require("moe_layer_freq", 1, "every layer behind the first dense ones is a mixture of experts")
        width, first = self.integer("moe_intermediate_size"), min(layers, self.integer("first_k_dense_replace", least=0))
        if (kinds := self.raw.get("mlp_layer_types")) is not None and kinds != ["dense"] * first + ["sparse"] * (layers - first):
            raise self.error("mlp_layer_types", f"dense for the first {first} layers, as first_k_dense_replace says, then sparse")
        found = Experts(
            count=self.integer("num_local_experts" if "num_local_experts" in self.raw else "n_routed_experts"),
            per_token=self.integer("num_experts_per_tok"),
            ffn_hidden_size=width,
            normalize=True,
            dense_layers=tuple(range(first)),
            score="sigmoid",
            shared_ffn_hidden_size=width * self.integer("n_shared_experts", least=0),
            groups=self.integer("n_group"),
            groups_per_token=self.integer("topk_group"),
            scaling=self.number("routed_scaling_factor"),
        )
        if found.per_token < 2:
            raise self.error("num_experts_per_tok", "at least 2; a single expert's sigmoid score is not rescaled")
        if found.count % found.groups:
            raise self.error("n_group", f"a divisor of the {found.count} experts")
        if found.groups > 1 and found.per_token != 2 * found.groups_per_token:
            raise self.error("topk_group", f"{found.per_token / 2:g}: Megatron ranks groups by num_experts_per_tok / topk_group "
                             "experts, and the model by two")  # fmt: skip
        return found

    def minimax_experts(self, layers: int) -> Experts:
        """Returns MiniMax-M2's experts: no shared ones, no groups, ``intermediate_size`` the width of one. SGLang takes an entry that is
        missing here for false, so each must be there."""
        entries = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"}
        for key, wanted in entries.items():
            if self.raw.get(key) != wanted:
                raise self.error(key, f"{wanted!r}, stated; MiniMax-M2 is implemented with it, and engines take other defaults")
        self.require("shared_intermediate_size", 0, "shared experts are not implemented for this family")
        return Experts(
            count=self.integer("num_local_experts"),
            per_token=self.integer("num_experts_per_tok", least=2),
            ffn_hidden_size=self.integer("intermediate_size"),
            normalize=True,
            score="sigmoid",
        )

    def gpt_oss_experts(self, layers: int) -> Experts:
        """Returns gpt-oss' experts, ``intermediate_size`` the width of one. transformers computes with a limit of 7 whatever is stated,
        SGLang with what is."""
        self.require("attention_bias", True, "gpt-oss has biases on all of attention's projections")
        self.require("hidden_act_alpha", 1.702, "the clamped SwiGLU is implemented with it")
        if self.raw.get("swiglu_limit") != 7:
            raise self.error("swiglu_limit", "7.0, stated; engines read it, and transformers computes with it")
        return Experts(
            count=self.integer("num_local_experts"),
            per_token=self.integer("num_experts_per_tok"),
            ffn_hidden_size=self.integer("intermediate_size"),
            normalize=True,
            swiglu_limit=self.number("swiglu_limit"),
        )


def _llama3(entries: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(entries["factor"]),
        low_freq_factor=float(entries["low_freq_factor"]),
        high_freq_factor=float(entries["high_freq_factor"]),
        original_max_positions=int(entries["original_max_position_embeddings"]),
    )


def _yarn(entries: dict[str, Any]) -> YarnScaling:
    """Returns the YaRN scaling. If only one of the two mscales is given, the frequencies' growth follows the factor alone."""
    mscale, all_dim = entries.get("mscale") or 0.0, entries.get("mscale_all_dim") or 0.0
    if entries.get("attention_factor") is not None or entries.get("truncate", True) is not True or (all_dim and not mscale):
        raise ValueError("attention_factor, truncate and an mscale_all_dim without mscale are not implemented")
    return YarnScaling(
        rotary_scaling_factor=float(entries["factor"]),
        original_max_position_embeddings=int(entries["original_max_position_embeddings"]),
        beta_fast=float(entries.get("beta_fast") or 32.0),
        beta_slow=float(entries.get("beta_slow") or 1.0),
        mscale=float(mscale) if all_dim else 1.0,
        mscale_all_dim=float(all_dim),
    )


def _grouped_yarn(entries: dict[str, Any]) -> GroupedYarn:
    if stated := [name for name in ("attention_factor", "attn_factor", "mscale", "mscale_all_dim") if entries.get(name) is not None]:
        raise ValueError(f"{stated[0]} is not implemented; logits grow with the factor alone")
    return GroupedYarn(
        factor=float(entries["factor"]),
        original_max_positions=int(entries["original_max_position_embeddings"]),
        beta_fast=float(entries.get("beta_fast") or 32.0),
        beta_slow=float(entries.get("beta_slow") or 1.0),
        truncate=bool(entries.get("truncate", True)),
    )


def _trains_drafts(a: Architecture) -> bool:
    plain = a.linear is None or (a.model_type == "qwen3_next" and a.draft_layers == 1)
    return a.draft_layers > 0 and a.indexer is None and plain and a.model_type != "minimax_m2"


def with_drafts(architecture: Architecture, trainer: TrainerSection, value_head: bool = False) -> Architecture:
    """Returns the architecture with the draft layers that a run trains; a critic (``value_head``) has none.

    Raises ConfigError: the checkpoint has none, or another number of them, or they are of a kind that is not trained here.
    """
    given, held = trainer.mtp_num_layers, architecture.draft_layers
    if given and given != held and not value_head:
        raise ConfigError("trainer.mtp_num_layers", given, f"{held or 'none'}, as num_nextn_predict_layers in the checkpoint's config.json")
    if not trainer.enable_mtp_training or value_head:
        return architecture
    if not _trains_drafts(architecture):
        why = "draft layers of another form" if held else "no draft layers (num_nextn_predict_layers in its config.json)"
        raise ConfigError("trainer.enable_mtp_training", True, f"false; this checkpoint of {architecture.model_type} has {why}")
    return replace(architecture, trained_drafts=held)


def with_found_drafts(architecture: Architecture, names: Collection[str]) -> Architecture:
    """Returns the architecture with the checkpoint's draft layers, where ``names``, of its tensors, has theirs and they can be trained."""
    found = replace(architecture, trained_drafts=architecture.draft_layers) if _trains_drafts(architecture) else architecture
    return found if hf_tensors(found).keys() <= set(names) else architecture


def replayed_choices(config: RunConfig) -> ExpertChoices | None:
    """Returns what the choices of the run's model look like; None where training does not replay them.

    Raises ConfigError: the model has no experts, or cannot be read.
    """
    if not config.trainer.use_rollout_routing_replay:
        return None
    architecture = read_architecture(config.model.hf_checkpoint)
    if (choices := ExpertChoices.of(architecture)) is None:
        raise ConfigError("trainer.use_rollout_routing_replay", True, f"false; {architecture.model_type} has no experts")
    return choices
