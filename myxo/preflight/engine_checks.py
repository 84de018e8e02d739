"""Checks of engines: what flags ask of the model and of installed packages, and whether prompts and responses fit context and micro-
batches.

A prompt's length is that of the longest that was read. Where none was read (the user has a source of prompts), only lengths that fit with
no prompt are refused. What generates in place of the engine, a function or an agent, is given `rollout_max_response_len` too, and asks as
it likes: what it may generate has to fit into a micro-batch. Samples that are too long all the same are `rollout.overlong_samples`' matter.
"""

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from myxo.preflight.model_checks import (
    check_engine_backend,
    check_engine_context,
    check_engine_flags,
    check_engines,
    check_files,
    positive_count,
)
from shared.config import devices
from shared.config.engine_limits import CONTEXT_KEPT, context_length, cpu_token_capacity, longest_sequence, model_config_of, text_entries
from shared.config.eval_views import eval_views
from shared.config.external_server import EngineAway, ExternalServer
from shared.config.rollout_section import APART, GENERATORS, GPUS_OF_MACHINE, TRANSFER, RolloutSection, flag_size, transfer_backend
from shared.config.run_config import RunConfig
from shared.config.sglang_flags import plain_name, unfit_for_pushes
from shared.config.speculation import (
    ALGORITHM,
    ALGORITHMS,
    DRAFT,
    DRAFT_LAYERS,
    OF_THE_MODEL,
    WITHOUT_A_DRAFT,
    draft_layers,
    is_chain,
    reshaped,
    speculates,
    speculation_flags,
    why_not_switched,
    wrong_sizes,
)
from shared.model.quantization import ENTRY
from shared.runtime.errors import ConfigError, nearest

# Quantizations that SGLang makes of weights which have none.
ONLINE = ("bitsandbytes", "fp8", "mxfp8", "nvfp4_online", "quark_int4fp8_moe", "w8a8_fp8")
FOUR_BIT_CACHES = ("fp4_e2m1", "fp4_mx_block16", "mxfp8", "nvfp4")  # of keys and values, in blocks with scales
UNROUNDED = {"dtype": ("auto", "bfloat16", "float", "float32"), "kv-cache-dtype": ("auto", "bf16", "bfloat16")}
FEWER_BITS = "engines compute with fewer bits than the trainer; train/train_rollout_logprob_abs_diff is how much they differ"


def check_engine_model(inspection: Inspection) -> Findings:
    """Yields what the model lacks for a flag of SGLang's; notes flags without effect, and those that change an engine's numbers."""
    rollout = inspection.config.rollout
    whole = rollout.alignment_flags | rollout.sglang
    given = {key: value for key, value in whole.items() if value is not None and value is not False}
    flags = {plain_name(key): (f"rollout.sglang.{key}", value) for key, value in given.items()}
    yield from _speculation(inspection, flags)
    yield from _stages(inspection)
    yield from _shares(inspection, flags)
    yield from _pushed(inspection, flags)
    for name, (field, value) in flags.items():
        if name == "quantization" and value != "unquant" and ENTRY not in (inspection.model_config or {}):
            yield from _quantized(inspection, field, value)
        elif name == "kv-cache-dtype" and value in FOUR_BIT_CACHES:
            yield ConfigError(field, value, "auto, bf16, fp8_e4m3 or fp8_e5m2: MXFP8 and NVFP4 keys and values are not tried here")
        elif value not in UNROUNDED.get(name, (value,)):
            yield Note(f"{field} = {value}: {FEWER_BITS}")
        elif name in ("enable-lora", "lora-paths"):
            yield Note(f"{field} changes nothing: no request names an adapter of the engine's; lora_rank trains one")


OWN_SIZES = ("rollout_num_gpus", "rollout_num_gpus_per_engine", "gpus_per_node", "rollout_device")
"""Fields that say what engines of the run's own take of its machines."""

DIVISORS = ("dp-size", "ep-size", "attn-cp-size", "moe-dp-size")
"""Flags of SGLang's whose sizes divide its tensor-parallel one."""


def _stages(inspection: Inspection) -> Findings:
    """Yields what engines with pipeline stages cannot do."""
    config, rollout = inspection.config, inspection.config.rollout
    if (stages := rollout.stages_per_engine) == 1:
        return
    gpus, field, why = rollout.rollout_num_gpus_per_engine, "rollout.sglang.pp-size", f"with pp-size = {stages}"
    if gpus % stages:
        yield ConfigError(field, stages, f"a divisor of rollout_num_gpus_per_engine = {gpus}: stages have the same number of GPUs")
    if inspection.architecture is not None and stages > (layers := inspection.architecture.num_layers):
        yield ConfigError(field, stages, f"at most the model's {layers} layers: each stage has one or more")
    if "in_flight_on_push" in rollout.model_fields_set and rollout.in_flight_on_push != "abort":
        expected = f"abort, or leave it out, {why}: SGLang's stages generate on in any other pause"
        yield ConfigError("rollout.in_flight_on_push", rollout.in_flight_on_push, expected)
    if rollout.worker_type in APART:
        yield ConfigError(field, stages, "1 where prefill and decode are apart")
    if config.trainer.use_rollout_routing_replay:
        expected = f"false {why}: the stages of an engine do not tell each other which experts they chose"
        yield ConfigError("trainer.use_rollout_routing_replay", True, expected)
    own = {"rollout.speculation": rollout.speculation} if rollout.own_speculation else {}
    own |= {f"rollout.sglang.{ALGORITHM}": rollout.engine_flags.get(ALGORITHM)} if speculates(rollout.engine_flags) else {}
    for place, value in own.items():
        yield ConfigError(place, value, f"none {why}: SGLang speculates in one stage alone")


def _shares(inspection: Inspection, flags: Mapping[str, tuple[str, Any]]) -> Findings:
    """Yields sizes that do not divide the GPUs which hold an engine's tensors together: it would end as it starts."""
    rollout, gpus = inspection.config.rollout, inspection.config.rollout.tensor_parallel
    for name in DIVISORS if not rollout.external_engines else ():
        field, value = flags.get(name, ("", 1))
        if gpus % (size := flag_size({name: value}, name)):
            of = f" / {rollout.stages_per_engine} stages" if rollout.stages_per_engine > 1 else ""
            yield ConfigError(field, size, f"a divisor of rollout_num_gpus_per_engine{of} = {gpus}")


def check_alignment(inspection: Inspection) -> Findings:
    """Yields what keeps engines and trainer from computing the same bits, where the run asks for them."""
    config, model = inspection.config, inspection.architecture
    rollout, trainer = config.rollout, config.trainer
    if rollout.alignment != "bitwise":
        return
    sharers = {"tensor": trainer.tensor_model_parallel_size, "context": trainer.context_parallel_size}
    flags = ("quantization", "kv-cache-dtype", "speculative-algorithm", "dp-size", "attention-backend", "enable-lora")
    obstacles = {
        "trainer.train_device": devices.resolve(trainer.train_device) != "cpu",
        "rollout.rollout_device": devices.resolve(rollout.rollout_device) != "cpu",
        "trainer.train_dtype": trainer.train_dtype != "float32",
        "rollout.sglang.dtype": rollout.engine_flags.get("dtype", "float32") != "float32",
        **{f"trainer.{name}_model_parallel_size".replace("context_model", "context"): size > 1 for name, size in sharers.items()},
        **{f"rollout.sglang.{name}": rollout.engine_flags.get(name) is not None for name in flags},
        **{name.partition(" =")[0]: True for name in (*rollout.truncates, *rollout.sampled_otherwise)},
        "rollout.speculation": rollout.speculation not in (None, "off"),
        "rollout.rollout_precision": rollout.rollout_precision != "checkpoint",
        "weights.update_weight_dtype": config.weights.update_weight_dtype not in (None, "float32"),
        "model.hf_checkpoint (quantized)": (inspection.model_config or {}).get(ENTRY),
        "trainer.fsdp_float8": trainer.fsdp_float8,
        "trainer.lora_rank": trainer.lora_rank,
        "data.multimodal_keys": config.data.multimodal_keys,
    }
    if model is not None:
        kinds = {name: getattr(model, name) for name in ("experts", "latent", "linear", "indexer", "sinks", "windows", "joint_qk_norm")}
        obstacles |= {f"model.hf_checkpoint ({name} of {model.model_type})": kind for name, kind in kinds.items()}
    if found := [name for name, stands in obstacles.items() if stands]:
        expected = "close, or a dense model in float32 on CPUs, whole on each rank, sampled from its whole distribution; in the way: "
        yield ConfigError("rollout.alignment", rollout.alignment, expected + ", ".join(found))


ENGINE_CHECKS = (check_engine_flags, check_engine_backend, check_engine_context, check_engine_model, check_alignment)


def check_models(inspection: Inspection) -> Findings:
    """Yields what is wrong with frozen models and with groups of the policy's engines, each by the checks of engines that are alike."""
    config, rollout = inspection.config, inspection.config.rollout
    for model in ("", *rollout.models) if rollout.engine_groups else rollout.models:
        for place, group in enumerate(rollout.engines(model)):
            field = f"rollout.models.{model}" if model else f"rollout.engine_groups.{place}"
            if group.worker_type not in ("regular", *APART):
                where = f"{field}.groups.{place}" if model else field
                yield ConfigError(f"{where}.worker_type", group.worker_type, f"regular, or {' and '.join(APART)}")
            own = config.of_engines(model, place)
            if own.rollout.nodes_per_engine > 1:
                expected = f"at most gpus_per_node = {rollout.gpus_per_node or GPUS_OF_MACHINE}: such an engine is on one machine"
                yield ConfigError(f"{field}.num_gpus_per_engine", group.num_gpus_per_engine, expected)
            known = [check_engines] if not model or model in inspection.frozen_models else []
            yield from _of_group(Inspection(own, inspection.starts), field, [*ENGINE_CHECKS, *([check_files] if model else []), *known])
        yield from _check_apart(inspection, model)
    if rollout.engine_groups and config.trainer.colocate:
        expected = "none with colocate: engines that share the trainer's GPUs are alike"
        yield ConfigError("rollout.engine_groups", f"{len(rollout.engine_groups)} groups", expected)


ALIKE = ("page-size", "kv-cache-dtype", TRANSFER)
"""Flags of SGLang's that prefill and decode engines must have in common: keys and values lie in memory as these say."""
BACKENDS = {"cpu": ("mooncake_tcp",), "cuda": ("nixl", "mooncake", "mooncake_tcp")}
"""By what keys and values are sent: what SGLang can do there, of what was tried or follows from what was."""


def _check_apart(inspection: Inspection, model: str) -> Findings:
    """Yields what keeps a model's prefill and decode engines from working together."""
    config, rollout = inspection.config, inspection.config.rollout
    places = [place for place, group in enumerate(rollout.engines(model)) if group.worker_type in APART]
    own = {place: config.of_engines(model, place).rollout for place in places}
    for place, section in own.items():
        field = f"rollout.models.{model}.groups.{place}" if model else f"rollout.engine_groups.{place}"
        yield from _of_kind(section, field, inspection.starts)
        for prefill in (one for one in own.values() if (section.worker_type, one.worker_type) == ("decode", "prefill")):
            sizes = sorted((section.rollout_num_gpus_per_engine, prefill.rollout_num_gpus_per_engine))
            if sizes[1] % sizes[0]:
                expected = f"a divisor or a multiple of {prefill.rollout_num_gpus_per_engine}, the GPUs of a prefill engine"
                yield ConfigError(f"{field}.num_gpus_per_engine", section.rollout_num_gpus_per_engine, expected)
            for name in ALIKE:
                if (here := section.engine_flags.get(name)) != (there := prefill.engine_flags.get(name)):
                    yield ConfigError(f"{field}.sglang.{name}", here, f"{there}, as the prefill engines have it")
    if places and not model:
        yield from _of_whole_run(config)


def _of_kind(section: RolloutSection, field: str, starts: bool) -> Findings:
    """Yields what engines of one kind cannot do."""
    device = devices.resolve(section.rollout_device)
    if (backend := transfer_backend(section, device)) not in BACKENDS[device]:
        yield ConfigError(f"{field}.sglang.{TRANSFER}", backend, f"{' or '.join(BACKENDS[device])}, for engines on {device}")
    elif starts and importlib.util.find_spec(package := OF_SGLANG[TRANSFER][backend]) is None:
        expected = f"the package {package}, which moves keys and values and is not installed, or another backend in [rollout.sglang]"
        yield ConfigError(f"{field}.sglang.{TRANSFER}", backend, expected)
    if ALGORITHM in section.engine_flags:
        yield ConfigError(f"{field}.sglang.{ALGORITHM}", section.engine_flags[ALGORITHM], "none where prefill and decode are apart")


def _of_whole_run(config: RunConfig) -> Findings:
    rollout, why = config.rollout, "where the policy's prefill and decode are apart"
    if rollout.in_flight_on_push == "retract":
        expected = f"in_place or abort {why}: a decode engine cannot have a prompt computed anew"
        yield ConfigError("rollout.in_flight_on_push", "retract", expected)
    if config.trainer.use_rollout_routing_replay:
        yield ConfigError("trainer.use_rollout_routing_replay", True, f"false {why}: a prompt's experts stay with the prefill engine")
    if rollout.eval_replicas:
        yield ConfigError("rollout.eval_replicas", rollout.eval_replicas, f"0 {why}: decode engines take held-out prompts, too")


def _of_group(own: Inspection, field: str, checks: Iterable[Callable[[Inspection], Findings]]) -> Findings:
    """Yields what the checks of a run's engines find in the config of one group, under the group's own fields."""
    named = {"model.hf_checkpoint": f"{field}.hf_checkpoint", "rollout.rollout_num_gpus_per_engine": f"{field}.num_gpus_per_engine"}
    for finding in (finding for check in checks for finding in check(own)):
        if isinstance(finding, ConfigError):
            place = named.get(finding.field) or finding.field.replace("rollout.sglang", f"{field}.sglang", 1)
            yield ConfigError(place, finding.value, finding.expected)
        elif isinstance(finding, Note):
            yield Note(f"{field}: {finding.text}")


def check_external_engines(inspection: Inspection) -> Findings:
    """Yields the external engines that the run cannot use; notes those that do not answer, for which their replicas wait, and what is given
    for engines of the run's own."""
    rollout, urls = inspection.config.rollout, inspection.config.rollout.external_engines
    for name in filter(rollout.model_fields_set.__contains__, OWN_SIZES if urls else ()):
        yield Note(f"rollout.{name} changes nothing: external_engines have the GPUs that whoever runs them has given them")
    for url in urls if inspection.model_config is not None else ():  # else the check of the model's files reports it
        try:
            ExternalServer(inspection.config, url).describe()
        except EngineAway as error:
            yield Note(f"rollout.external_engines: {error}; its replica waits for it, and the run continues with others")
        except ConfigError as error:
            yield error


def _pushed(inspection: Inspection, flags: Mapping[str, tuple[str, Any]]) -> Findings:
    """Yields flags by which engines compute with other weights than what is pushed; a note where those on GPUs cast it to bfloat16."""
    config, entries = inspection.config, inspection.model_config or {}
    if config.rollout.rollout_precision != "checkpoint":
        entries = {**entries, ENTRY: {"quant_method": config.rollout.rollout_precision}}
    given = {name: value for name, (_, value) in flags.items()} if config.pushes else {}
    drafts = config.trainer.enable_mtp_training and DRAFT not in flags
    for name, why in unfit_for_pushes(given, entries, config.weights.update_weight_transport, drafts):
        yield ConfigError(*flags[name], f"none in engines that get pushes: {why}")
    pushed = config.weights.update_weight_dtype or config.trainer.train_dtype
    if pushed == "float32" and config.pushes and devices.resolve(config.rollout.rollout_device) == "cuda" and "dtype" not in flags:
        yield Note(f"trainer.train_dtype = float32, rollout.sglang.dtype = bfloat16: {FEWER_BITS}")


def _quantized(inspection: Inspection, field: str, value: Any) -> Findings:
    config = inspection.config
    if value not in ONLINE:
        yield ConfigError(field, value, "none: the weights of hf_checkpoint are not quantized (config.json has no quantization_config)")
    elif (config.has_steps and not config.debug.debug_rollout_only) or config.sft.sft_data is not None:
        wanted = "none: engines load the trainer's weights with each push; a model that SGLang has quantized cannot, rollout_precision can"
        yield ConfigError(field, value, wanted)


def _speculation(inspection: Inspection, flags: Mapping[str, tuple[str, Any]]) -> Findings:
    """Yields what speculation lacks. ``flags``: the run's, by plain names, with the field of each."""
    rollout = inspection.config.rollout
    derived = speculation_flags(rollout.speculation, rollout.sglang, inspection.model_config or {})
    flags = {**{name: ("rollout.speculation", value) for name, value in derived.items()}, **flags}
    if ALGORITHM in flags:
        yield from _draft(inspection, *flags[ALGORITHM], *flags.get(DRAFT, ("", None)))
        yield from _beside_speculation(inspection, {name: value for name, (_, value) in flags.items()})
        if rollout.speculation == "auto" and (reason := why_not_switched(inspection.config)):
            yield Note(f"rollout.speculation = auto chooses the kind, and does not switch it off: no engine is restarted, as {reason}")
    elif idle := [field for name, (field, _) in flags.items() if name.startswith("speculative-")]:
        yield Note(f"{', '.join(idle)}: without effect, as no {ALGORITHM} is given")


def _beside_speculation(inspection: Inspection, flags: Mapping[str, Any]) -> Findings:
    """Yields what an engine that speculates would leave out, or only nearly do."""
    config = inspection.config
    if not speculates(flags):
        return
    yield from wrong_sizes(flags)
    chain = "mtp or draft with speculative-eagle-topk = 1" if not is_chain(flags) else ""
    if config.trainer.use_rollout_routing_replay and chain:
        expected = f"false, or speculation by {chain}: the experts of tokens that were accepted off a tree are lost"
        yield ConfigError("trainer.use_rollout_routing_replay", True, expected)
    aligned = dict.fromkeys(config.rollout.alignment_flags, ("rollout.alignment", config.rollout.alignment))
    for name in ("enable-deterministic-inference", "rl-on-policy-target"):
        if flags.get(name):
            field, value = aligned.get(name, (f"rollout.sglang.{name}", flags[name]))
            yield ConfigError(field, value, "left out beside speculation, whose tokens are not sampled by seeds")
    if devices.resolve(config.rollout.rollout_device) == "cpu" and str(flags.get("speculative-eagle-topk", 1)) != "1":
        yield ConfigError("rollout.sglang.speculative-eagle-topk", flags["speculative-eagle-topk"], "1 on a CPU: a chain of drafts")
    with contextlib.suppress(ValueError, TypeError, AttributeError):  # what is no JSON object is reported
        preferred = flags.get("preferred-sampling-params") or {}
        for problem in reshaped(preferred if isinstance(preferred, dict) else json.loads(preferred)):
            yield ConfigError(f"rollout.sglang.preferred-sampling-params: {problem.field}", problem.value, problem.expected)
    for view in eval_views(config):
        for problem in reshaped({"min_new_tokens": view.min_new_tokens, "repetition_penalty": view.own.repetition_penalty}):
            yield ConfigError(f"{view.field}: {problem.field}", problem.value, problem.expected)


def _draft(inspection: Inspection, field: str, algorithm: Any, draft_field: str, draft: Any) -> Findings:
    name, path = str(algorithm).upper(), Path(str(draft or ""))
    if name not in ALGORITHMS:
        yield ConfigError(field, algorithm, f"one of {', '.join(ALGORITHMS)}; {nearest(name, list(ALGORITHMS))}")
    elif name in WITHOUT_A_DRAFT:
        return
    elif draft is not None:
        if (path.is_absolute() or str(draft).startswith(".") or path.exists()) and not (path / "config.json").is_file():
            yield ConfigError(draft_field, draft, "the directory of a model that drafts: there is no config.json in it")
        yield from _unlike_draft(inspection, name, draft_field, path)
        yield Note(f"{draft_field}: the draft is not trained; it stays as its checkpoint has it")
    elif name not in OF_THE_MODEL:
        yield ConfigError(field, algorithm, f"{DRAFT} besides, the checkpoint of a model that drafts for this one")
    elif (missing := _without_layers(inspection)) is not None:
        yield ConfigError(field, algorithm, f"a model with layers that draft, or {DRAFT}: {missing}")
    elif not inspection.config.trainer.enable_mtp_training:
        yield Note(f"{field}: the layers that draft are not trained; they stay as the checkpoint has them")


def _unlike_draft(inspection: Inspection, algorithm: str, field: str, path: Path) -> Findings:
    """Yields how a draft's sizes differ from the model's where they must not: its tokens are the model's, and EAGLE reads its states."""
    if (entries := model_config_of(path)) is None:
        return  # reported, or on the hub
    target, draft = map(text_entries, (inspection.model_config or {}, entries))
    names = ("vocab_size",) if algorithm == "STANDALONE" else ("vocab_size", "hidden_size")
    for name in names:
        has = draft.get("target_hidden_size", draft.get(name)) if name == "hidden_size" else draft.get(name)
        if name in target and has is not None and has != target[name]:
            yield ConfigError(field, str(path), f"a draft with {name} = {target[name]}, as the model has; its config.json has {has}")


def _without_layers(inspection: Inspection) -> str | None:
    model, names = inspection.model_config, inspection.weight_headers
    if model is None or any("mtp" in name or "nextn" in name for name in names):
        return None
    counts = {**(model.get("text_config") or {}), **model}
    if not draft_layers(model):
        return f"its config.json names none ({DRAFT_LAYERS[0]})"
    if names and not any(f".layers.{counts.get('num_hidden_layers')}." in name for name in names):
        return "its config.json names some, and its files have no weights of them"
    return None


# Flag of SGLang's → value → the package that it imports for it.
OF_SGLANG: Mapping[str, Mapping[str, str]] = {
    "attention-backend": {"flashinfer": "flashinfer", "aiter": "aiter", "tokenspeed_mla": "tokenspeed_mla"},
    "sampling-backend": {"flashinfer": "flashinfer"},
    "grammar-backend": {"xgrammar": "xgrammar", "outlines": "outlines", "llguidance": "llguidance"},
    "moe-a2a-backend": {
        **{"deepep": "deep_ep", "deepep_v2": "deep_ep", "mooncake": "mooncake", "mori": "mori", "nixl": "nixl"},
        **{"pplx": "pplx_kernels", "flashinfer": "flashinfer", "flashinfer_megamoe": "flashinfer"},
    },
    "moe-runner-backend": {"deep_gemm": "deep_gemm", "triton_kernel": "triton_kernels", "aiter": "aiter"},
    "fp8-gemm-backend": {"deep_gemm": "deep_gemm", "aiter": "aiter"},
    "load-format": {
        **{"bitsandbytes": "bitsandbytes", "gguf": "gguf", "fastsafetensors": "fastsafetensors"},
        **{"runai_streamer": "runai_model_streamer"},
    },
    "quantization": {"bitsandbytes": "bitsandbytes", "gguf": "gguf", "auto-round": "auto_round", "quark": "quark"},
    "disaggregation-transfer-backend": {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl", "mori": "mori"},
    "hicache-storage-backend": {"mooncake": "mooncake", "nixl": "nixl", "mori": "mori", "aibrix": "aibrix_kvcache"},
    "enable-lmcache": {"True": "lmcache"},
}

SAME_VALUES = {"prefill-attention-backend": "attention-backend", "decode-attention-backend": "attention-backend"}
KERNELS = ("moe-runner-backend", "fp8-gemm-backend", "fp4-gemm-backend")  # values that begin with flashinfer_ are kernels of flashinfer

# Flag of Megatron's and its value → the module that Megatron's own layers import for it, and where that comes from.
OF_MEGATRON: Mapping[tuple[str, Any], tuple[str, str]] = {
    ("gradient_accumulation_fusion", True): ("fused_weight_gradient_mlp_cuda", "apex, built with --cuda_ext, has it"),
    ("use_kitchen", True): ("nvidia_kitchen", "install it"),
    ("use_kitchen_attention", True): ("nvidia_kitchen", "install it"),
}


def check_engine_packages(inspection: Inspection) -> Findings:
    """Yields the flags of SGLang's whose packages are not installed."""
    if importlib.util.find_spec("sglang") is None:  # the check of the packages says so
        return
    for key, value in inspection.config.rollout.sglang.items():
        name = SAME_VALUES.get(plain := plain_name(key), plain)
        kernels = name in KERNELS and str(value).startswith("flashinfer_")
        package = "flashinfer" if kernels else OF_SGLANG.get(name, {}).get(str(value))
        if package is not None and importlib.util.find_spec(package) is None:
            yield ConfigError(f"rollout.sglang.{key}", value, f"leave it out, or install the package {package}, which SGLang needs for it")


def check_trainer_packages(inspection: Inspection) -> Findings:
    """Yields the flags of Megatron's whose modules are not installed; Transformer Engine is `check_megatron_flags`' own."""
    given = inspection.config.trainer.megatron
    if given.get("transformer_impl") == "transformer_engine":  # which brings kernels of its own
        return
    for (name, value), (module, origin) in OF_MEGATRON.items():
        if given.get(name) == value and importlib.util.find_spec(module) is None:
            yield ConfigError(f"trainer.megatron.{name}", value, f"leave it out; Megatron needs {module} for it, not installed: {origin}")


TRAINING = "data.prompt_data"


@dataclass(frozen=True)
class Limit:
    """The most tokens that a prompt and its response may have together. ``reason``: why, as the end of a sentence."""

    tokens: int
    reason: str


def check_lengths(inspection: Inspection) -> Findings:
    """Yields what is too long, for training and for evaluation."""
    config = inspection.config
    rollout, limit, shortest = config.rollout, _engine_limit(inspection), 1
    prompt, response = inspection.longest_prompts.get(TRAINING, shortest), rollout.rollout_max_response_len
    made = any(getattr(rollout, name) for name in GENERATORS)
    if reported := not made and limit is not None and prompt + response > limit.tokens:
        yield _too_long("rollout.rollout_max_response_len", response, TRAINING, prompt, limit, inspection.longest_places)
    yield from _micro_batches(inspection, prompt, limit)
    if limit is None:
        return
    for view in eval_views(config):
        own, prompt = view.own.max_response_len, inspection.longest_prompts.get(view.field, shortest)
        response, context = view.config.rollout.rollout_max_response_len, view.max_context_len
        given = own is not None or config.eval.eval_max_response_len is not None
        if min(prompt + response, context or math.inf) > limit.tokens and (given or not reported):
            field = "eval.eval_max_response_len" if own is None else f"{view.field}.max_response_len"
            yield _too_long(field, response, view.field, prompt, limit, inspection.longest_places)


def _too_long(field: str, response: int, prompts: str, prompt: int, limit: Limit, places: Mapping[str, str]) -> ConfigError:
    left, where = limit.tokens - prompt, f"{place}: " if (place := places.get(prompts)) else ""
    if left < 1:
        wanted = f"prompts of fewer than {limit.tokens} tokens, {limit.reason}; or rollout_max_prompt_len with overlong_prompts = filter"
        return ConfigError(prompts, f"{where}a prompt of {prompt} tokens", wanted)
    longest = f"the longest prompt of {prompts} ({where}{prompt} tokens)"
    return ConfigError(field, response, f"at most {left}: {longest} and its response are at most {limit.tokens} tokens, {limit.reason}")


def _micro_batches(inspection: Inspection, prompt: int, limit: Limit | None) -> Findings:
    """Yields a budget of tokens that a sample could exceed: the trainer would refuse it, the batch with it, and the next one."""
    trainer, response = inspection.config.trainer, inspection.config.rollout.rollout_max_response_len
    longest, ranks, budget = prompt + response, trainer.context_parallel_size, inspection.config.longest_sample
    if limit is not None:
        longest = min(longest, limit.tokens)
    if longest <= budget:
        return
    shared = f", which {ranks} context-parallel ranks hold together" if ranks > 1 else ""
    wanted = f"at least {-(-longest // ranks)}: the longest prompt ({prompt} tokens) and its response have up to {longest} tokens{shared}"
    shorter = f"; or rollout_max_response_len of at most {budget - prompt}" if budget > prompt else ""
    yield ConfigError("trainer.max_tokens_per_gpu", trainer.tokens_per_gpu, wanted + shorter)


def _engine_limit(inspection: Inspection) -> Limit | None:
    config, model = inspection.config, inspection.model_config
    flags = config.rollout.engine_flags
    given = positive_count(flags.get("context-length"))
    if model is None or (context := given or context_length(model)) is None:
        return None
    limit = Limit(context - CONTEXT_KEPT, f"{'--sglang-context-length' if given else 'the context in config.json'} less {CONTEXT_KEPT}")
    cache = positive_count(flags.get("max-total-tokens"))
    if cache is None and devices.resolve(config.rollout.rollout_device) == "cpu":
        try:
            cache = cpu_token_capacity(model)
        except (KeyError, TypeError):  # the check of the architecture names it
            return limit
    if cache is not None and (tokens := longest_sequence(context, cache, positive_count(flags.get("page-size")) or 1)) < limit.tokens:
        return Limit(tokens, f"the engine's KV cache of {cache} tokens (--sglang-max-total-tokens)")
    return limit
