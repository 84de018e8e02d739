"""Checks of the models that a config names: their files, their weights, and whether ranks, engines and flags fit them."""

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from myxo.preflight.inspection import Findings, Headers, Inspection, Note
from shared.config import devices, flag_table, sglang_flags
from shared.config.engine_limits import context_length, unequal_context_problem
from shared.config.environment_variables import QAT_GROUP
from shared.config.eval_views import eval_views
from shared.config.rollout_section import GPUS_OF_MACHINE
from shared.config.run_config import RunConfig
from shared.config.trainer_section import LearningRateSchedule, TrainerSection
from shared.data.chat_template import read_variables
from shared.data.tokenizer import Tokenizer
from shared.model import architecture_flags, hf_checkpoint
from shared.model.architecture import Architecture
from shared.model.architecture_flags import contradictions, described_shape, is_own_module
from shared.model.engine_plan import EngineLayout
from shared.model.families import read_architecture
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.model.quantization import Quantization, quantization_in_engines, quantization_of, split_problems
from shared.model.tensor_table import hf_tensors, megatron_parameters
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import ConfigError

MEGATRON_LATEST = "latest_checkpointed_iteration.txt"  # file that Megatron keeps beside its checkpoints

# Attention backends that need a GPU.
GPU_ATTENTION = ("flashinfer", "fa3", "fa4", "triton", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha")
FLOAT8, INT4 = (8.9, 10.0), (8.0, 10.0)  # compute capabilities whose kernels take weights as they are pushed, or copies of them
BLOCK_SCALED = 10.0  # the compute capability from which on GPUs multiply blocks of 32 or 16 numbers with scales
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's variable for a context that is longer than the model's own


def check_files(inspection: Inspection) -> Findings:
    """Yields what is missing of the model's directory."""
    model = inspection.config.model.hf_checkpoint
    if not model.is_dir():
        expected = "no such directory; give one with config.json and *.safetensors, or ORG/NAME of a model on the hub"
        yield ConfigError("model.hf_checkpoint", str(model), expected)
        return
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            yield ConfigError("model.hf_checkpoint", str(model), f"the directory holds no {name}")


def check_tokenizer(inspection: Inspection) -> Findings:
    """Yields a chat template that is asked for and missing, what is passed over of the tokenizer's files, and what text begins with."""
    model, data, tokenizer = inspection.config.model.hf_checkpoint, inspection.config.data, inspection.tokenizer
    if tokenizer is None:
        return
    yield from map(Note, tokenizer.notes)
    if data.apply_chat_template and not tokenizer.has_chat_template:
        expected = f"the model has no chat template; put a chat_template.jinja into {model}, or leave it out and give prompts as text"
        yield ConfigError("data.apply_chat_template", True, expected)
    if not data.apply_chat_template or inspection.config.sft.sft_data is not None:
        prefix, suffix = (", ".join(map(tokenizer.shown, ids)) for ids in (tokenizer.text_prefix, tokenizer.text_suffix))
        if prefix:
            begin, why = ("begin", "= false leaves it out") if data.add_special_tokens else ("do not begin", "is false")
            added_by = f"{prefix}, which the checkpoint's tokenizer adds; data.add_special_tokens {why}"
            yield Note(f"text prompts and text demonstrations {begin} with {added_by}")
        if suffix:
            yield Note(f"the checkpoint's tokenizer ends a text with {suffix}; a prompt does not, since it is continued")
    own = {view.field: view.config.data.apply_chat_template_kwargs for view in eval_views(inspection.config)}
    shared = data.apply_chat_template_kwargs
    for field, given in {"data": shared, **{field: given for field, given in own.items() if given != shared}}.items():
        yield from _unread_variables(tokenizer, f"{field}.apply_chat_template_kwargs", given)


def _unread_variables(tokenizer: Tokenizer, field: str, given: Mapping[str, Any]) -> Iterator[Note]:
    own = given.get("chat_template")
    variables = tokenizer.template_variables | (read_variables(own) if isinstance(own, str) else set())
    for name in given:
        if name == "messages" or (name != "chat_template" and name not in variables):
            yield Note(f"{field}.{name} changes nothing: the model's chat template reads no such variable")


def check_actor(inspection: Inspection) -> Findings:
    """Yields what is wrong with the policy's weights, and its tokenizer's size."""
    architecture, tokenizer, config = inspection.architecture, inspection.tokenizer, inspection.config
    if architecture is None:
        return
    if inspection.weight_headers and config.trainer.trainer_backend != "torch":  # there transformers knows them
        yield from _tensors(config.model.hf_checkpoint, inspection.weight_headers, architecture, "model.hf_checkpoint")
    rows = architecture.vocab_size
    if tokenizer is not None and tokenizer.vocabulary_size > rows:
        wanted = f"a tokenizer of at most {rows} tokens, vocab_size in config.json; its tokenizer.json has {tokenizer.vocabulary_size}"
        yield ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), wanted)
    if outside := [token for token in config.rollout.rollout_stop_token_ids if not 0 <= token < rows]:
        yield ConfigError("rollout.rollout_stop_token_ids", outside[0], f"ids from 0 to {rows - 1}, the model's vocabulary")


def check_other_models(inspection: Inspection) -> Findings:
    """Yields what is wrong with the checkpoints of the critic and of the teacher, where these differ from the policy's."""
    config, actor = inspection.config, inspection.architecture
    if inspection.critic is not None and config.trainer.critic_load is not None:
        yield from _weights(config.trainer.critic_load, inspection.critic, "trainer.critic_load", config.trainer.trainer_backend)
    if (teacher := config.algorithm.opd_teacher_load) is not None and actor is not None:
        if not teacher.is_dir():
            yield ConfigError("algorithm.opd_teacher_load", str(teacher), "no such directory; give a checkpoint of the policy's shape")
        else:  # it runs in the actor's own modules
            yield from _weights(teacher, actor, "algorithm.opd_teacher_load", config.trainer.trainer_backend)


def _weights(directory: Path, architecture: Architecture, field: str, backend: str = "megatron") -> Iterator[ConfigError]:
    headers, problems = hf_checkpoint.read_headers(directory, field)  # raises ConfigError
    yield from problems or ([] if backend == "torch" else _tensors(directory, headers, replace(architecture, trained_drafts=0), field))


def check_quantization(inspection: Inspection) -> Findings:
    """Yields what cannot be done with a policy whose weights are quantized: engines get each version as their checkpoint is."""
    config, here = inspection.config, str(inspection.config.model.hf_checkpoint)
    precision = config.rollout.rollout_precision
    found = None if inspection.architecture is None else quantization_in_engines(config.model.hf_checkpoint, precision)
    if inspection.architecture is None or found is None:
        return
    form = found.format
    if config.pushes or config.sft.sft_data is not None:
        why = "as hf_checkpoint is" if precision == "checkpoint" else f"by rollout_precision = {precision}"
        yield Note(f"engines get each version in {form.title}, {why}: they sample by these (docs/precision.md)")
        yield from _not_beside(config, found)
    yield from _divided_blocks(inspection, inspection.architecture, found)
    least, beyond = FLOAT8 if form.bits == 8 else INT4
    if other := [one for one in devices.gpu_capabilities() if not least <= one < beyond]:
        wanted = f"GPUs of compute capability from {least} to below {beyond}, whose engines compute with {form.bits}-bit weights as pushed"
        yield ConfigError("model.hf_checkpoint", here, f"{wanted}; here is one of {other[0]}")


def _not_beside(config: RunConfig, found: Quantization) -> Findings:
    """Yields what does not go with pushes of quantized weights."""
    form, field, here = found.format, "model.hf_checkpoint", str(config.model.hf_checkpoint)
    if config.trainer.trainer_backend == "torch":
        yield ConfigError("trainer.trainer_backend", "torch", "megatron: it alone reads and pushes quantized weights")
    if config.tinker.tinker_endpoint:
        wanted = "plain weights, and rollout.rollout_precision = checkpoint, with tinker.tinker_endpoint (myxo serve): clients' are plain"
        yield ConfigError(field, here, wanted)
    elif config.trainer.lora_rank:
        wanted = "0: adapters are laid over the engines' own weights, and a sum with quantized ones would be rounded"
        yield ConfigError("trainer.lora_rank", config.trainer.lora_rank, wanted)
    if not form.rows:
        yield ConfigError(field, here, "blocks of 8-bit floats (--to fp8-block): engines round whole matrices again where they fuse them")
    if form.bits == 4 and config.rollout.external_engines:
        wanted = "none: a server of SGLang's own rearranges 4-bit weights as it starts, and cannot take a push of them"
        yield ConfigError("rollout.external_engines", config.rollout.external_engines, wanted)
    if form.bits == 4 and form.layout == "awq" and any(".experts." in name for name in found.names):
        yield ConfigError(field, here, "experts in compressed-tensors' layout (--to int4): engines rearrange AWQ's otherwise")


def check_awareness(inspection: Inspection) -> Findings:
    """Yields why training cannot compute in fewer bits, or be quantization-aware."""
    config, trainer = inspection.config, inspection.config.trainer
    yield from _fewer_bits(trainer)
    yield from _by_torchao(trainer)
    if inspection.architecture is None or not (field := trainer.rounded_by):
        return
    found = quantization_in_engines(config.model.hf_checkpoint, config.rollout.rollout_precision)
    if found is None or found.format.bits == 8:
        yield ConfigError(field, True, "false, or a model.hf_checkpoint in groups of 4-bit integers, or rollout_precision = int4")
    elif trainer.megatron.get("transformer_impl") == "transformer_engine":
        yield ConfigError(field, True, "false, or transformer_impl = local: Transformer Engine's layers read their weights themselves")
    elif (size := trainer.train_env_vars.get(QAT_GROUP, own := str(found.format.columns))) != own:
        yield ConfigError(f"trainer.train_env_vars: {QAT_GROUP}", size, f"{own}, the groups of model.hf_checkpoint, or leave it out")


def _fewer_bits(trainer: TrainerSection) -> Findings:
    """Yields why training cannot compute in 8 or 4 bits."""
    scaled = {flag: value for flag, value in trainer.megatron.items() if flag == "fp4" or (flag, value) == ("fp8_recipe", "mxfp8")}
    asked = scaled or {flag: value for flag, value in trainer.megatron.items() if flag == "fp8" and value}
    least, what = (BLOCK_SCALED, "MXFP8 and NVFP4 want") if scaled else (FLOAT8[0], "8-bit floats want")
    for flag, value in list(asked.items())[:1]:
        if any(one < least for one in devices.gpu_capabilities()):
            wanted = f"another precision: {what} GPUs of compute capability {least} or more"
            yield ConfigError(f"trainer.megatron.{flag}", value, wanted)
        elif devices.resolve(trainer.train_device) == "cpu":
            yield ConfigError(f"trainer.megatron.{flag}", value, f"none on a CPU: {what} GPUs of compute capability {least} or more")


def _by_torchao(trainer: TrainerSection) -> Findings:
    recipe = trainer.fsdp_float8
    if recipe is not None and importlib.util.find_spec("torchao") is None:
        yield ConfigError("trainer.fsdp_float8", recipe, "none: torchao is not installed, which has it")
    if recipe is not None and any(one < FLOAT8[0] for one in devices.gpu_capabilities()):
        yield ConfigError("trainer.fsdp_float8", recipe, f"none: 8-bit floats want GPUs of compute capability {FLOAT8[0]} or more")


def _divided_blocks(inspection: Inspection, architecture: Architecture, found: Quantization) -> Findings:
    config = inspection.config
    held = {name: shape for name, (_, shape) in inspection.weight_headers.items()}
    shapes = {name: shape for name, shape in sorted(found.shapes(held).items()) if name in found.names} if held else {}
    for place in range(len(config.rollout.engines())):
        own = config.of_engines("", place).rollout
        layout = EngineLayout.of(own.rollout_num_gpus_per_engine, own.engine_flags)
        experts = max(int(own.engine_flags.get("ep-size") or 1), 1)
        keys = min(layout.heads, architecture.num_key_value_heads)
        for problem in split_problems(found.format, shapes, layout.heads, keys, max(layout.tensor // experts, 1)):
            wanted = f"matrices that engines can divide: {problem}; fewer GPUs an engine, or smaller blocks"
            yield ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), wanted)


def _tensors(directory: Path, headers: Headers, architecture: Architecture, field: str) -> Iterator[ConfigError]:
    shapes = {name: shape for name, (_, shape) in headers.items()}
    if found := quantization_of(directory):
        shapes = found.shapes(shapes)
    unread = hf_checkpoint.draft_prefixes(architecture)
    yield from hf_checkpoint.tensor_problems(directory, shapes, hf_tensors(architecture), unread, field)


def check_ranks(inspection: Inspection) -> Findings:
    """Yields where the layout divides neither the ranks nor the models."""
    config, trainer, actor, critic = inspection.config, inspection.config.trainer, inspection.architecture, inspection.critic
    layout = ParallelLayout.of(trainer)
    yield from layout.world_problems(trainer.ranks("actor"))
    if config.algorithm.has_critic and trainer.ranks("critic") != trainer.ranks("actor"):
        yield from _of_critic(layout.world_problems(trainer.ranks("critic")), "critic_num_gpus_per_node")
    if actor is not None:
        yield from division_problems(actor, layout, trainer.megatron)
    if critic is not None and critic != actor:
        yield from _of_critic(division_problems(critic, layout, trainer.megatron), "critic_load")


def _of_critic(problems: Iterable[ConfigError], field: str) -> Iterator[ConfigError]:
    return (ConfigError(problem.field, problem.value, f"{problem.expected} ({field})") for problem in problems)


def check_training(inspection: Inspection) -> Findings:
    """Yields which settings of learning rates, adapters and recomputation do not go together."""
    config, trainer, sft, actor = inspection.config, inspection.config.trainer, inspection.config.sft, inspection.architecture
    try:
        if sft.sft_data is not None:
            sft.schedule  # noqa: B018
    except ConfigError as error:
        yield ConfigError(error.field.replace("trainer.lr_", "sft.sft_"), error.value, error.expected)
    steps = config.rollout.num_rollout * trainer.num_steps_per_rollout
    try:
        for rate in (trainer.lr, trainer.critic_lr if config.algorithm.has_critic else None):
            if rate is not None:
                warmup, decay = trainer.warmup_steps(steps), trainer.decay_steps(steps)
                LearningRateSchedule(rate, trainer.min_lr, warmup, decay, trainer.lr_decay_style)
    except ConfigError as error:
        yield error
    if actor is not None and actor.experts is None:
        for name in ("use_rollout_routing_replay", "use_routing_replay"):
            if getattr(trainer, name):
                yield ConfigError(f"trainer.{name}", True, f"false; no experts of {actor.model_type} are known")
    if actor is None or trainer.trainer_backend == "torch":  # which finds its parameters by transformers' names at the start
        return
    if not (patterns := Freezing.of(trainer)).nothing:
        patterns.check(megatron_parameters(actor, trainer.megatron.get("transformer_impl") == "transformer_engine"))
    if (lora := Lora.of(trainer)) is not None:
        lora.check(actor, ParallelLayout.of(trainer), trainer.megatron)


def check_megatron_flags(inspection: Inspection) -> Findings:
    """Yields which of Megatron's architecture flags differ from the checkpoint, and what needs Transformer Engine where it is missing."""
    given, catalogue = inspection.config.trainer.megatron, flag_table.catalogue()
    if (architecture := inspection.architecture) is not None:
        spec = inspection.config.trainer.spec
        try:
            named = is_own_module(spec, architecture.model_type, given)
        except ConfigError as error:
            yield error
        else:
            if spec and not named:
                yield Note(f"--spec {' '.join(spec)} changes nothing: {architecture.model_type} has the same layers of its own")
        described = {name: value for name, value in given.items() if name in catalogue and "architecture" in catalogue[name].groups}
        yield from architecture_flags.differences(described, architecture)
    yield from flag_table.missing_engine(given, here=inspection.starts)
    if inspection.starts:
        yield from (Note(f"{flag} changes nothing: {reason}") for flag, reason in flag_table.without_effect(given))


def check_layout_reach(inspection: Inspection) -> Findings:
    """Yields what an engine would need several machines for, and engines that differ: neither is there yet. Tells of tensor parallelism
    between machines."""
    trainer, rollout = inspection.config.trainer, inspection.config.rollout
    for role in ("actor", "critic") if inspection.config.algorithm.has_critic else ("actor",):
        if trainer.nodes(role) == 1:
            continue
        if trainer.tensor_model_parallel_size > (share := trainer.ranks_per_node(role)):
            words = f"tensor_model_parallel_size {trainer.tensor_model_parallel_size} is more than the {role}'s {share} ranks of a node"
            yield Note(f"{words}: every layer waits for the network between machines")
    nodes, share, size = trainer.nodes("actor"), trainer.ranks_per_node("actor"), rollout.rollout_num_gpus_per_engine
    room = nodes * (share // size) if (spans := rollout.nodes_per_engine) == 1 else nodes // spans
    if trainer.colocate and nodes > 1 and rollout.rollout_replicas > room:
        expected = f"with colocate {nodes} machines of {share} ranks have room for {room} such engines, each on {spans} of them (by "
        expected += f"gpus_per_node or --sglang-nnodes); rollout_replicas is {rollout.rollout_replicas}"
        yield ConfigError("rollout.rollout_num_gpus_per_engine", size, expected)
    elif size > (each := rollout.gpus_per_node or GPUS_OF_MACHINE) * spans:
        expected = f"at most {each * spans}: gpus_per_node = {each} on each of its {spans} nodes (--sglang-nnodes), over several "
        expected += f"a multiple of {each}"
        yield ConfigError("rollout.rollout_num_gpus_per_engine", size, expected)


def check_given_checkpoints(inspection: Inspection) -> Findings:
    """Yields where ``load`` names other weights than those that the run starts from; reports what becomes of ``ref_load``."""
    config = inspection.config
    model, load = config.model.hf_checkpoint, config.trainer.load
    if config.model.own_reference is not None:
        yield from _reference(inspection, config.model.own_reference)
    elif config.model.ref_load is not None and config.model.ref_load.resolve() != model.resolve():
        yield Note(f"--ref-load {config.model.ref_load} is not read: the policy and its reference start from hf_checkpoint, {model}")
    if load is None or load.resolve() == model.resolve():
        return
    if (load / "config.json").is_file():
        expected = f"another model than hf_checkpoint, {model}; name the one to start from in hf_checkpoint"
        yield ConfigError("trainer.load", str(load), expected)
    elif (load / MEGATRON_LATEST).is_file():
        expected = "a run's directory: `myxo convert` makes a checkpoint of Megatron's one that hf_checkpoint may name"
        yield ConfigError("trainer.load", str(load), expected)
    elif load.resolve() not in (config.run.root.resolve().parent, config.trained.resolve().parent):
        yield Note(f"--load {load} is not read: the run {config.run.name} begins or continues in {config.run.root}")


_NOT_OF_THE_SHAPE = ("max_positions", "draft_layers", "trained_drafts")  # what models may differ in that take each other's place


def _reference(inspection: Inspection, directory: Path) -> Findings:
    """Yields what keeps a checkpoint from being the reference policy's, which runs in the policy's own modules."""
    config, field, actor = inspection.config, "model.ref_load", inspection.architecture
    if not (config.algorithm.measures_kl or config.algorithm.kl_coef):
        yield Note(f"--ref-load {directory} is not read: no KL to a reference policy is measured")
        return
    if actor is None:
        return
    try:
        own = read_architecture(directory, backend=config.trainer.trainer_backend)
    except ConfigError as error:
        yield ConfigError(field, str(directory), error.expected)
        return
    pairs = {name: (getattr(own, name), getattr(actor, name)) for name in vars(actor) if name not in _NOT_OF_THE_SHAPE}
    if other := [f"{name} is {found}, the policy's {wanted}" for name, (found, wanted) in pairs.items() if found != wanted]:
        yield ConfigError(field, str(directory), f"a model of the policy's shape; {'; '.join(other)}")
        return
    yield from _weights(directory, actor, field, config.trainer.trainer_backend)
    yield Note(f"the policy starts from {config.model.hf_checkpoint}, its reference from {directory}; slime starts both from --ref-load")


_HEADS_SHARED_OVER_DATA = ("qwen3", "qwen2_moe", "glm4_moe", "glm_moe", "deepseek", "kimi", "minimax_m2", "gpt_oss")  # with dp-size


def check_engines(inspection: Inspection) -> Findings:
    """Yields where an engine's GPUs cannot share the model's heads: SGLang divides query heads, and divides or copies the others."""
    rollout, model, gpus = inspection.config.rollout, inspection.architecture, inspection.config.rollout.tensor_parallel
    if model is None:
        return
    layout = EngineLayout.of(rollout.rollout_num_gpus_per_engine, rollout.engine_flags)
    parts = layout.heads if model.model_type.startswith(_HEADS_SHARED_OVER_DATA) else gpus
    heads, shared = {"attention heads": model.num_attention_heads}, model.num_key_value_heads
    on_gpus = devices.resolve(rollout.rollout_device) == "cuda"  # on a CPU SGLang adds what is missing
    if model.latent is None and (shared > parts or (on_gpus and parts % shared)):
        heads["key/value heads"] = shared
    if undivided := [f"{count} {what}" for what, count in heads.items() if count % parts]:
        of = f" in each of its {rollout.stages_per_engine} stages" if rollout.stages_per_engine > 1 else ""
        of += f", divided by dp-size = {gpus // parts}" if parts < gpus else ""
        yield ConfigError("rollout.rollout_num_gpus_per_engine", gpus, f"a divisor of the model's {', '.join(undivided)}{of}")


def check_engine_flags(inspection: Inspection) -> Findings:
    """Yields the flags of ``[rollout.sglang]`` that the installed SGLang does not take."""
    if not (given := inspection.config.rollout.sglang):
        return
    later = "[rollout.sglang] is checked where the rollout service starts"
    try:
        flags = sglang_flags.of_installed()
    except sglang_flags.NoCatalogue as error:
        yield Note(f"{error}; {later}")
        return
    if flags is None:
        yield Note(f"SGLang is not installed here; {later}")
        return
    for key in given:
        name = sglang_flags.plain_name(key)
        if (present := flags.present_name(name)) != name:
            yield Note(f"rollout.sglang.{key}: SGLang {flags.sglang} calls it {present}")
    yield from flags.problems(given)


def check_engine_backend(inspection: Inspection) -> Findings:
    """Yields an attention backend that needs a GPU, where the engine computes on a CPU: it would not start."""
    rollout = inspection.config.rollout
    if devices.resolve(rollout.rollout_device) == "cpu" and (given := rollout.engine_flags.get("attention-backend")) in GPU_ATTENTION:
        wanted = "torch_native, or leave it out: rollout_device is cpu here, and this backend needs a GPU"
        yield ConfigError("rollout.sglang.attention-backend", given, wanted)


def check_engine_context(inspection: Inspection) -> Findings:
    """Yields a context that is longer than the model's: SGLang then does not start, unless the environment tells it to. Also one in which
    engines would compute otherwise than the trainer."""
    rollout, model = inspection.config.rollout, inspection.model_config
    if model is None:
        return
    config, device = inspection.config, devices.resolve(rollout.rollout_device)
    trained = config.longest_sample if config.trainer.trainer_backend == "torch" and not config.debug.debug_rollout_only else 0
    trained = min(trained, rollout.rollout_max_context_len or trained)
    if (problem := unequal_context_problem(model, rollout.engine_flags, device, trained)) is not None:
        yield problem
    known, given = context_length(model), positive_count(rollout.engine_flags.get("context-length"))
    allowed = os.environ.get(LONGER_CONTEXT, "").lower() in ("1", "true", "yes", "y")
    if known is not None and given is not None and given > known and not allowed:
        yield ConfigError("rollout.sglang.context-length", given, f"at most {known}, the context in config.json, or set {LONGER_CONTEXT}=1")


def positive_count(value: object) -> int | None:
    """Returns the number that a flag of the engine's has; None where it has none, which `check_engine_flags` reports."""
    try:
        number = sglang_flags.count(str(value))
    except ValueError:
        return None
    return number if number > 0 else None


def check_described_shape(inspection: Inspection) -> Findings:
    """Yields flags that contradict one another, and what the layout does not divide of the shape that they describe.

    With a checkpoint at hand, the flags are compared with it instead (`model_checks.check_megatron_flags`).
    """
    if inspection.architecture is not None:
        return
    trainer = inspection.config.trainer
    yield from contradictions(trainer.megatron)
    if (shape := described_shape(trainer.megatron)) is not None:
        yield from division_problems(shape, ParallelLayout.of(trainer), trainer.megatron)
