"""Checks that the model has what flags of SGLang's ask of it: a draft, weights of another precision, adapters."""

from pathlib import Path
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.sglang_flags import plain_name
from shared.runtime.errors import ConfigError, nearest

ALGORITHM, DRAFT = "speculative-algorithm", "speculative-draft-model-path"
SHORT = {"speculative-draft-model": DRAFT}

OF_THE_MODEL, WITHOUT_A_DRAFT = ("EAGLE", "NEXTN"), ("NGRAM", "UNO", "NONE")
ALGORITHMS = (*OF_THE_MODEL, *WITHOUT_A_DRAFT, "EAGLE3", "STANDALONE", "DFLASH", "DSPARK", "FROZEN_KV_MTP")
"""Of speculative decoding: the draft may be layers of the model's own checkpoint, there is none, or it is another checkpoint."""

DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
"""Keys of ``config.json`` that count the layers which draft."""

ONLINE = ("bitsandbytes", "fp8", "mxfp8", "nvfp4_online", "quark_int4fp8_moe", "w8a8_fp8")
"""Quantizations that SGLang makes of weights which have none."""

FEWER_BITS = "engines compute with fewer bits than the trainer; train/train_rollout_logprob_abs_diff is how much they differ"


def check_engine_model(inspection: Inspection) -> Findings:
    """Yields what the model lacks for a flag of SGLang's; notes flags without effect, and those that change an engine's numbers."""
    given = {key: value for key, value in inspection.config.rollout.sglang.items() if value not in (None, False)}
    flags = {SHORT.get(name := plain_name(key), name): (f"rollout.sglang.{key}", value) for key, value in given.items()}
    if ALGORITHM in flags:
        yield from _draft(inspection, *flags[ALGORITHM], *flags.get(DRAFT, ("", None)))
    elif idle := [field for name, (field, _) in flags.items() if name.startswith("speculative-")]:
        yield Note(f"{', '.join(idle)}: without effect, as no {ALGORITHM} is given")
    for name, (field, value) in flags.items():
        if name == "quantization" and value != "unquant" and "quantization_config" not in (inspection.model_config or {}):
            yield from _quantized(inspection, field, value)
        elif _has_fewer_bits(name, value):
            yield Note(f"{field} = {value}: {FEWER_BITS}")
        elif name in ("enable-lora", "lora-paths"):
            yield Note(f"{field} changes nothing: no request names an adapter of the engine's; lora_rank trains one")


def _has_fewer_bits(name: str, value: Any) -> bool:
    return value in ("half", "float16") if name == "dtype" else name == "kv-cache-dtype" and value not in ("auto", "bf16", "bfloat16")


def _quantized(inspection: Inspection, field: str, value: Any) -> Findings:
    config = inspection.config
    if value not in ONLINE:
        yield ConfigError(field, value, "none: the weights of hf_checkpoint are not quantized (config.json has no quantization_config)")
    elif (config.has_steps and not config.debug.debug_rollout_only) or config.sft.sft_data is not None:
        yield ConfigError(field, value, "none: engines load the trainer's weights with each push; a model that SGLang has quantized cannot")


def _draft(inspection: Inspection, field: str, algorithm: Any, draft_field: str, draft: Any) -> Findings:
    """Yields an algorithm that nothing drafts for, and a draft that is named by a path and no checkpoint."""
    name, path = str(algorithm).upper(), Path(str(draft or ""))
    if name not in ALGORITHMS:
        yield ConfigError(field, algorithm, f"one of {', '.join(ALGORITHMS)}; {nearest(name, list(ALGORITHMS))}")
    elif name in WITHOUT_A_DRAFT:
        return
    elif draft is not None:
        if (path.is_absolute() or str(draft).startswith(".") or path.exists()) and not (path / "config.json").is_file():
            yield ConfigError(draft_field, draft, "the directory of a model that drafts: there is no config.json in it")
        yield Note(f"{draft_field}: the draft is not trained; it stays as its checkpoint has it")
    elif name not in OF_THE_MODEL:
        yield ConfigError(field, algorithm, f"{DRAFT} besides, the checkpoint of a model that drafts for this one")
    elif (missing := _without_layers(inspection)) is not None:
        yield ConfigError(field, algorithm, f"a model with layers that draft, or {DRAFT}: {missing}")
    else:
        yield Note(f"{field}: the layers that draft are not trained; they stay as the checkpoint has them")


def _without_layers(inspection: Inspection) -> str | None:
    """Returns why the model drafts nothing by itself; None where it does, or its files cannot be read."""
    model, names = inspection.model_config, inspection.weight_headers
    if model is None or any("mtp" in name or "nextn" in name for name in names):
        return None
    counts = {**(model.get("text_config") or {}), **model}
    if not any(counts.get(name) for name in DRAFT_LAYERS):
        return f"its config.json names none ({DRAFT_LAYERS[0]})"
    if names and not any(f".layers.{counts.get('num_hidden_layers')}." in name for name in names):
        return "its config.json names some, and its files have no weights of them"
    return None
