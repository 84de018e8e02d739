"""The longest sequence that an engine generates: its limits before the engine runs, and for a request."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json

CPU_KV_BYTES = 512 * 2**20
"""The bytes that the KV cache may take on a CPU. SGLang's own default is a share of all memory, filled with zeros at the start:
8 GB and 19 s on a machine of 24 GB, for a model of 1 MB."""

CPU_MAX_TOKENS = 65_536  # The most KV tokens on a CPU: more are of no use at its speed, however few bytes each takes

CPU_MIN_TOKENS = 4_096  # The fewest KV tokens on a CPU, enough for a few requests: a larger model takes more than ``CPU_KV_BYTES``

CONTEXT_KEPT = 2  # Tokens of its context that SGLang keeps for itself


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities that an engine has reported.

    ``release``: SGLang's version, ``0.5.20``. ``vocab_size``: token ids are from 0 to this, exclusive. ``max_sequence``: tokens of one
    request, input and output together. ``weight_sessions``: a push must lie between begin and end. ``overlaps``: a step is computed while
    the results of the one before are processed. A pause in place leaves that step unfinished. ``ranks``: processes that each hold a part of
    the model (tensor parallelism). ``kept_tokens``: whose keys and values it keeps for later requests; 0: none. ``device``: of an external
    engine. ``token_versions``: it names the version of each token. ``speculates``: it verifies drafts, several tokens at once."""

    release: str
    vocab_size: int
    max_sequence: int
    weight_sessions: bool
    overlaps: bool
    ranks: int = 1
    kept_tokens: int = 0
    device: str = ""
    token_versions: bool = True
    speculates: bool = False


def longest_sequence(context: int, cache_tokens: int, page: int = 1) -> int:
    """Returns the most tokens of input and output together that are generated in full.

    SGLang silently cuts ``max_new_tokens`` if input + new tokens exceed its context less 2, or its KV cache less
    two pages and one token (0.5.16 to 0.5.21: ``Scheduler.init_req_max_new_tokens``).
    """
    return min(context - CONTEXT_KEPT, cache_tokens - 2 * page - 1)


def text_entries(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a ``config.json`` that are about text: those of its ``text_config`` over the others, but for ``model_type``.
    Embeddings are tied where either says so."""
    nested = model_config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(model_config)
    tied = bool(model_config.get("tie_word_embeddings") or nested.get("tie_word_embeddings"))
    return {**model_config, **nested, "model_type": model_config.get("model_type"), "tie_word_embeddings": tied}


def cpu_token_capacity(model_config: Mapping[str, Any]) -> int:
    """Returns how many tokens of float32 keys and values ``CPU_KV_BYTES`` hold for a model, within the two bounds above.

    ``model_config``: its ``config.json``. Raises KeyError where that lacks a size.
    """
    model_config = text_entries(model_config)
    heads = model_config["num_attention_heads"]
    head_dim = model_config.get("head_dim") or model_config["hidden_size"] // heads
    bytes_per_token = 2 * 4 * model_config["num_hidden_layers"] * model_config.get("num_key_value_heads", heads) * head_dim
    return max(CPU_MIN_TOKENS, min(CPU_MAX_TOKENS, CPU_KV_BYTES // bytes_per_token))


def context_length(model_config: Mapping[str, Any]) -> int | None:
    """Returns the context that an engine takes a model to have, in tokens, as SGLang reads it from ``config.json``; None if it has none."""
    model_config = text_entries(model_config)
    scaling = model_config.get("rope_scaling") or model_config.get("rope_parameters") or {}
    known = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1 if known else scaling.get("factor") or 1
    for key in ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings"):
        if isinstance(value := model_config.get(key), int):
            return int(factor * value)
    return None


def model_config_of(directory: Path) -> dict[str, Any] | None:
    """Returns a checkpoint's ``config.json``; None where it holds no JSON object."""
    try:
        values = parse_json((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def needed_model_config(directory: Path) -> dict[str, Any]:
    """Returns a checkpoint's ``config.json``. Raises ConfigError where it holds no JSON object."""
    if (entries := model_config_of(directory)) is None:
        raise ConfigError("model.hf_checkpoint", str(directory), "a directory whose config.json is a readable JSON object")
    return entries


def longest_trained(config: RunConfig) -> int:
    """Returns the most tokens of a sample that is trained: ``index_topk`` at most by the torch backend, which has no sparse attention."""
    keys = (model_config_of(config.model.hf_checkpoint) or {}).get("index_topk") if config.trainer.trainer_backend == "torch" else None
    return min(config.longest_sample, keys) if isinstance(keys, int) else config.longest_sample


def unequal_context_problem(model_config: Mapping[str, Any], flags: Mapping[str, Any], device: str, trained: int = 0) -> ConfigError | None:
    """Returns why an engine computes otherwise than the trainer in a long context, or None where it does not.

    On a CPU sparse attention (``index_topk``) attends to every key, which is the same up to so many tokens. Rotary embeddings of type
    ``longrope`` have two sets of angles: engines take the second for a whole batch as soon as one of its sequences is long, transformers
    for each long sequence from its beginning. ``flags``: SGLang's by their plain names, as the run has them. ``trained``: the most tokens
    of a sample that a trainer sees which attends to every key.
    """
    given, entries = flags.get("context-length"), text_entries(model_config)
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    bounds, keys = [], model_config.get("index_topk")
    if device == "cpu":
        bounds.append((keys, " on a CPU, index_topk; sparse attention needs a GPU"))
    elif isinstance(keys, int) and trained > keys:
        bounds.append((keys, " with trainer_backend = torch, index_topk: it has no sparse attention; or as many rollout_max_context_len"))
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        short = entries.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        bounds.append((short, ", original_max_position_embeddings: beyond it engines choose longrope's angles by batch"))
    for most, why in bounds:
        if isinstance(most, int) and int(given or context_length(model_config) or 0) > most:
            return ConfigError("rollout.sglang.context-length", given, f"at most {most}{why}")
    return None


PREFILL_GRAPHS = "cuda-graph-backend-prefill"
"""The flag that says how an engine captures CUDA graphs of prefill. Each is for one sequence, and a rollout's prompts are prefilled many at
a time: capturing some sixty of them only makes the start longer, so an engine has none unless its flags ask for them."""

_OF_PREFILL = ("cuda-graph-max-bs-prefill", "cuda-graph-bs-prefill", "cuda-graph-config", "enforce-piecewise-cuda-graph")


def captures_prefill(flags: Mapping[str, Any]) -> bool:
    """Returns whether a run's flags of SGLang, by their plain names, ask for CUDA graphs of prefill."""
    return any(flags.get(name) for name in _OF_PREFILL) or flags.get(PREFILL_GRAPHS) not in (None, False, "disabled")
