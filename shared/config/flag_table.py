"""The table of all flags that are no fields of the config, slime's and Megatron's: what each sets, or why it does nothing or is refused.

A flag is *taken* if the config has a field of its name, if it is SGLang's (``--sglang-…``) or if Megatron takes it; *renamed* if it sets
fields of other names; a *no-op* if it is accepted without effect; or *refused*, with what to do instead. What is renamed or a no-op is
reported once, when the run starts. Whoever adds a field deletes the flag of its name here.

slime's flags are declared below. Megatron's, ``megatron_flags.json``, are made from its dataclasses and `docs.flag_tables` by
``python -m docs.flags``, so that the flags of a user are checked without torch. A flag has one name (`Flag.name`) and may have other
spellings: ``--no-rope-fusion`` is ``apply_rope_fusion = false``.
"""

import ast
import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from shared.runtime.errors import ConfigError, near

OF_PACKAGE = ("cpu_offloading", "fine_grained", "offload_modules", "min_offloaded")  # local layers have it where the package is there
OF_DEEPEP = frozenset({"moe_enable_deepep", "moe_deepep_num_sms", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms"})
"""Flags that only the flex dispatcher of tokens reads."""

UNSET = object()  # The mark for no fixed value
ANYTHING = "anythings"  # The kind of a flag whose value is not read: any number of words
MAX_LIST = 4096  # The most entries of a list that an expression may make

Fields = dict[str, Any]  # Field of the config → value


class Off(Fields):
    """A switch that is off, in its field's place: what it makes of some values below, by their text. An empty one is no value."""


def laid(below: Any, above: Any) -> Any:
    """Returns what comes of one value over another; of a switch that is off over nothing, an empty ``Off``, itself."""
    if not isinstance(above, Off):
        return above
    return Off({**above, **below}) if isinstance(below, Off) else above.get(str(below), below)


def _switch(off: Fields, **on: Any) -> Callable[[bool], Fields]:
    return lambda given: on if given else dict.fromkeys(on, Off(off))


Kind = Literal["taken", "renamed", "no-op", "refused"]


class FlagClass(NamedTuple):
    """A flag's class, and in words what it sets, or why it does nothing."""

    kind: Kind
    meaning: str


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        name: with underscores. spellings: other names → what a bare switch of that name sets here; None: takes a value as the name does.
        kind: switch, int, float, text, ints, floats, texts, or two of them (``int or ints``); dtypes are all refused. choices: of a text;
            none: any.
        optional: whether none is a value. default: the value if the flag is not given.
        groups: its destinations: transformer, optimizer, ddp (Megatron's dataclasses) or architecture; none: it is refused or
            states what always holds.
        fixed: the only value that it may have here. reason: why it is fixed, ignored or refused; of a renamed one what it sets.
        ignored: whether every value of its kind is accepted without effect.
        sets: takes the value and returns the fields that the flag stands for. variable: the environment variable that is set in their
            place: what no config may hold. yields: whether what another such flag sets stands over it.
        engine: whether only Transformer Engine's layers use it. kernels: whether it only chooses among kernels of Transformer Engine's
            (in local layers, too, unless ``engine``), so that without them it has no effect.
    """

    name: str
    kind: str
    reason: str = ""
    choices: tuple[str, ...] = ()
    default: Any = None
    optional: bool = False
    groups: tuple[str, ...] = ()
    spellings: Mapping[str, Any] = field(default_factory=dict)
    fixed: Any = UNSET
    ignored: bool = False
    sets: Callable[[Any], Fields] | None = None
    variable: str = ""
    yields: bool = False
    engine: bool = False
    kernels: bool = False

    @property
    def outcome(self) -> FlagClass:
        """Returns its class, and what that means."""
        if self.sets or self.variable:
            return FlagClass("renamed", self.reason)
        if self.ignored:
            return FlagClass("no-op", self.reason)
        if self.fixed is not UNSET:
            return FlagClass("taken", f"{shown(self.fixed)} only: {self.reason}")
        if self.reason:
            return FlagClass("refused", self.reason)
        if self.groups == ("architecture",):
            return FlagClass("taken", "compared with the checkpoint")
        return FlagClass("taken", "passed on to Megatron" + (", for Transformer Engine's layers" if self.engine else ""))

    @property
    def refused(self) -> bool:
        """Returns whether every value is refused."""
        return self.outcome.kind == "refused"

    @property
    def command_line(self) -> list[str]:
        """Returns all spellings as typed on a command line, the name first."""
        return ["--" + name.replace("_", "-") for name in (self.name, *self.spellings)]

    def typed(self, value: Any) -> Any:
        """Returns ``value``, text of a command line or TOML's, as plain data of the flag's kind. Raises ValueError: what is expected."""
        if self.refused:
            raise ValueError(self.reason)
        if self.kind == ANYTHING:
            return value
        plain = None if self.optional and _is_none(value) else _plain(self.kind, value)
        given = [] if plain is None else plain if isinstance(plain, list) else [plain]
        if self.choices and not set(given) <= set(self.choices):
            raise ValueError(f"one of {', '.join(self.choices)}")
        if self.fixed is not UNSET and plain != self.fixed:
            raise ValueError(f"leave it out, or give {shown(self.fixed)}: {self.reason}")
        return plain

    def of_words(self, spelled: str, bare: Any, words: list[str]) -> Any:
        """Returns the value of ``--spelled word …`` on a command line, not typed yet. Raises ConfigError where it lacks one."""
        if len(words) > 1 and not self.refused:
            return words
        if words or self.refused or self.kind == ANYTHING:
            return " ".join(words)
        if bare is not None:
            return True
        raise ConfigError(spelled, "", f"needs a value: {self.kind}" + (f", one of {', '.join(self.choices)}" if self.choices else ""))


OWN_SOURCES = {"slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source.RolloutDataSourceWithBuffer"}
"""slime's own sources of prompts, which read files as Myxo does."""

_RENAMED = (
    Flag("offload", "switch", "--offload-train --offload-rollout", sets=_switch({"True": Off()}, offload_train=True, offload_rollout=True)),
    Flag(
        "partial_rollout",
        "switch",
        "--staleness-policy continue: generation continues under the next weights, up to --max-staleness; --off-policy corrects the loss",
        sets=_switch({"continue": Off(), "mask": Off()}, staleness_policy="continue"),
        yields=True,
    ),
    Flag(
        "mask_offpolicy_in_partial_rollout",
        "switch",
        "--staleness-policy mask: tokens older than --max-staleness versions leave the loss",
        sets=_switch({"mask": "continue"}, staleness_policy="mask"),
    ),
    Flag(
        "distributed_timeout_minutes",
        "int",
        "--collective-timeout, in seconds",
        sets=lambda minutes: {"collective_timeout": 60.0 * minutes},
    ),
    Flag("num_gpus_per_node", "int", "--gpus-per-node, by which an engine's nodes are counted", sets=lambda gpus: {"gpus_per_node": gpus}),
    Flag("sglang_router_request_timeout_secs", "float", "--generate-timeout", sets=lambda seconds: {"generate_timeout": seconds}),
    Flag("update_weight_disk_keep_files", "switch", "--keep-snapshots 1000000", sets=_switch({"1000000": Off()}, keep_snapshots=1_000_000)),
    Flag(
        "rollout_external_engine_addrs",
        "texts",
        "--external-engines: SGLang servers of somebody else's, a rollout service for each",
        sets=lambda addresses: {"external_engines": addresses},
    ),
    Flag(
        "data_source_path",
        "text",
        "--data-source, and nothing where it is slime's own: prompts are read from --prompt-data",
        sets=lambda given: {} if given.replace(":", ".") in OWN_SOURCES else {"data_source": given},
    ),
    Flag(
        "bf16",
        "switch",
        "--train-dtype bfloat16, and float32 where it is false",
        sets=lambda given: {"train_dtype": "bfloat16" if given else "float32"},
    ),
    Flag("wandb_key", "text", "WANDB_API_KEY in the trainer's environment; the config holds no secrets", variable="WANDB_API_KEY"),
    Flag("deterministic_mode", "switch", "--deterministic", sets=lambda given: {"deterministic": given}),
)
"""Flags of slime's, and of Megatron's, that are set under the name of a field."""

_NO_OPS: dict[str, tuple[str, ...]] = {
    "train_backend": ("text", "`trainer_backend` chooses: Megatron-Core, or torch where prompts show pictures", "megatron"),
    "use_dynamic_batch_size": ("switch", "micro-batches are always packed by tokens, up to --max-tokens-per-gpu"),
    "log_probs_max_tokens_per_gpu": ("int", "log-probs are computed on the micro-batches of --max-tokens-per-gpu"),
    "ref_micro_batch_size": ("int", "log-probs are computed on the micro-batches of --max-tokens-per-gpu"),
    "recompute_loss_function": ("switch", "it saves memory and changes no value; lower --max-tokens-per-gpu where memory is short"),
    "balance_data": ("switch", "batches are always balanced over the data-parallel ranks"),
    "balance_by_flops": ("switch", "batches are always balanced over the data-parallel ranks, by operations"),
    "data_pad_size_multiplier": ("int", "micro-batches are padded as their layout needs it; padding is in no loss"),
    "loss_mask_type": ("text", "the assistant's turns are trained, by any template", "qwen", "qwen3", "qwen3_5", "distill_qwen"),
    "no_position_embedding": ("switch", "positions are embedded as the checkpoint says"),
    "enable_experimental": ("switch", "nothing here waits for it"),
    "model_name": ("text", "the model's family is read from --hf-checkpoint"),
    "qwen_gdn_backend": ("text", "kernels follow from the machine", "fla", "flashqla"),
    "allgather_cp": ("switch", "context parallelism splits packed sequences in its own way; the values are the same"),
    "freeze_indexer": ("switch", "an indexer keeps the weights of --hf-checkpoint; a policy's loss gives it no gradient"),
    "release_train": ("switch", "the trainer stays alive, and gives its GPUs' memory to engines that share them, --colocate"),
    "use_fault_tolerance": ("switch", "engines and services that die are always started again"),
    "rollout_health_check_interval": ("float", "services are watched by their heartbeats, see --registry-ttl"),
    "rollout_health_check_timeout": ("float", "an engine's answers have the deadline --generate-timeout"),
    "rollout_health_check_first_wait": ("float", "engines are given --engine-start-timeout seconds to start"),
    "rollout_data_transport": ("text", "trainer ranks fetch samples from the run's store", "object-store", "nixl"),
    "use_distributed_post": ("switch", "each rollout service talks to its own engine"),
    "disable_compute_advantages_and_returns": ("switch", "--loss-type sft_loss uses none; other losses need them"),
    "update_weight_delta_checksum": ("text", "every tensor of a push is checked by its digest", "xxh3-128", "blake3", "adler32"),
    "update_weight_local_checkpoint_dir": ("text", "engines read snapshots, whole or deltas, from where the trainer writes them"),
    "use_tensorboard": ("switch", "TensorBoard's files are always written, to RUN/tensorboard"),
    "tb_project_name": ("text", "TensorBoard's files lie in RUN/tensorboard"),
    "tb_experiment_name": ("text", "TensorBoard's files lie in RUN/tensorboard"),
    "disable_wandb_random_suffix": ("switch", "a run's name in W&B is its own name, without a suffix"),
    "wandb_always_use_train_step": ("switch", "the step of every curve is the rollout batch's, whatever --num-steps-per-rollout is"),
    "http_proxy": ("text", "services talk over the run's bus, engines over private sockets: nothing goes through a proxy"),
}
"""Flags of slime's without effect → the kind of their values, why they have none, and the choices of a text."""

_REFUSED = {
    "keep_old_actor": "slime then takes the ratio to the weights that made the samples, by the trainer; --use-rollout-logprobs takes it to "
    "them by the engine's own log-probs",
    "get_mismatch_metrics": "slime then calls --custom-tis-function-path, and what it makes of the loss counts; --use-tis calls it here. "
    "Leave it out otherwise: the distance of trainer and rollout is always measured",
    "load_forge_rollout_data": "use `myxo replay CONFIG TEMPLATE` on batches that --save-debug-rollout-data has written",
    "custom_update_weight_post_write_path": "snapshots lie on a file system that trainer and engines see alike",
    "custom_model_provider_path": "the model is built from --hf-checkpoint; docs/models.md lists the families",
    "ref_ckpt_step": "the reference policy starts from --hf-checkpoint, or from an HF checkpoint in --ref-load",
    "opd_teacher_ckpt_step": "the teacher is the checkpoint of --opd-teacher-load",
    "start_rollout_id": "a run continues after its last checkpoint by itself",
    "use_stateless_adam": "Adam keeps its moments",
    "disable_rollout_global_dataset": "prompts come from --prompt-data or --data-source",
    "sglang_router_ip": "MYXO_ROUTER_URL in the environment opens the engines to a router",
    "sglang_router_port": "MYXO_ROUTER_URL in the environment opens the engines to a router",
    "ci_test": "it is for slime's own tests; see --check-weight-update-equal and --logprob-alarm",
    "ci_disable_kl_checker": "it is for slime's own tests",
    "ci_train_rollout_logprob_abs_diff_threshold": "use --logprob-alarm, which warns",
    "ci_save_grad_norm": "the gradient's norm is logged as train/grad_norm",
    "ci_load_grad_norm": "the gradient's norm is logged as train/grad_norm",
    "fetch_trajectory_retry_times": "there is no server of trajectories; use --rollout-function-path or --custom-generate-function-path",
    "log_correct_samples": "`myxo samples RUN` filters samples by their reward",
    "log_reward_category": "give named rewards: each is logged under its name",
    **dict.fromkeys(
        [f"megatron_deepgemm_{part}" for part in ("forward_layers", "forward_modules", "moe_forward_layers", "moe_forward_modules")],
        "training computes in train_dtype, by torch or Transformer Engine",
    ),
    **dict.fromkeys(
        [f"teacher_{part}" for part in ("port", "warmup_port", "warmup_timeout_s")]
        + [f"teacher_{part}_reduction_chunk_size" for part in ("sample", "label")]
        + [f"megatron_server_{part}" for part in ("max_length", "update_timeout_s", "warmup")],
        "it is for slime's server of a teacher's log-probs; here a teacher is a frozen model, [rollout.models.NAME] that --opd-teachers "
        "names, or the trainer computes it, with --opd-teacher-load",
    ),
    "min_batch_collection_ratio": "a batch has rollout_batch_size groups always",
    "rollout_buffer_url": "there is no server of trajectories; use --rollout-function-path or --custom-generate-function-path",
    "rollout_task_type": "it is for a server of trajectories; rm_type says how a task is scored",
    "use_rollout_entropy": "entropy is computed where entropy_coef asks for it",
    "wandb_run_id": "a run's id in W&B is its name and when it began: give --name",
}
"""Flags of slime's that no value is taken of, and why, or what to do instead."""

SLIME: dict[str, Flag] = {
    flag.name: flag
    for flag in (
        *_RENAMED,
        *(Flag(name, kind, why, tuple(choices), ignored=True) for name, (kind, why, *choices) in _NO_OPS.items()),
        *(Flag(name, ANYTHING, why) for name, why in _REFUSED.items()),
    )
}
"""slime's flags by name."""

ROUTER = "router_"  # What the flags of slime's router begin with, behind ``sglang_`` or alone


def of_slime(name: str) -> Flag | None:
    """Returns the flag of slime's with that name, with underscores; None for any other."""
    if name not in SLIME and name.removeprefix("sglang_").startswith(ROUTER):
        return Flag(name, ANYTHING, "there is no router: rollout services take their work from the run's queues", ignored=True)
    return SLIME.get(name)


class Translation(NamedTuple):
    """What a flag of slime's comes to: values of fields, a line for the user, variables of the services' environment."""

    fields: Fields
    note: str
    environment: dict[str, str]


def translate(path: str, flag: Flag, value: Any, others: Fields) -> Translation:
    """Returns what one of slime's flags comes to, its fields with those of ``others``: over them, or under them where it yields.

    ``value``: words of a command line, or TOML's. Raises ConfigError: the flag is refused, or the value is none of its kind.
    """
    if flag.refused:
        raise ConfigError(path, value, f"a flag of slime's; {flag.reason}")
    plain = typed(path, flag, True, value)
    if flag.ignored:
        return Translation(others, f"{flag.command_line[0]} changes nothing: {flag.reason}", {})
    fields = flag.sets(plain) if flag.sets else {}
    below, above = (fields, others) if flag.yields else (others, fields)
    both = below | {name: laid(below.get(name, Off()), value) for name, value in above.items()}
    meaning = "false takes back, where it stands below," if any(isinstance(value, Off) for value in fields.values()) else "is"
    return Translation(both, f"{flag.command_line[0]} {meaning} {flag.reason}", {flag.variable: str(plain)} if flag.variable else {})


def lay_renamed(sections: dict[str, dict[str, Any]], owners: Mapping[str, str], renamed: Fields) -> list[str]:
    """Puts fields that flags under other names set below those that are given; returns a line for the user of each given otherwise."""
    notes = []
    for name, value in renamed.items():
        given = sections.setdefault(owners[name], {}).setdefault(name, value)
        if not isinstance(value := laid(given, value), Off) and str(value) != str(given):
            notes.append(f"{name} = {shown(given)} is given itself, and counts: {shown(value)}, by a flag under another name, does not")
    return notes


@cache
def catalogue() -> dict[str, Flag]:
    """Returns every flag of Megatron's by its name."""
    stored = json.loads(resources.files("shared.config").joinpath("megatron_flags.json").read_text())
    return {flag.name: flag for flag in TypeAdapter(list[Flag]).validate_python(stored["flags"])}


@cache
def spellings() -> dict[str, tuple[Flag, Any]]:
    """Returns for Megatron's every spelling, ``no_…`` of switches too, the flag and what a bare switch sets (None: it is no switch)."""
    found: dict[str, tuple[Flag, Any]] = {}
    for flag in catalogue().values():
        found[flag.name] = flag, True if flag.kind == "switch" else None
        found |= {spelling: (flag, value) for spelling, value in flag.spellings.items()}
    opposites = {f"no_{name}": (flag, not value) for name, (flag, value) in found.items() if value is not None}
    return opposites | found


def names() -> list[str]:
    """Returns every spelling of a flag of Megatron's that is not refused, with underscores."""
    return [name for name, (flag, _) in spellings().items() if not flag.refused]


def canonical(given: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Returns a config's ``[trainer.megatron]``, keys with dashes or underscores in any spelling, as name → plain value.

    Raises ConfigError: one of Myxo's ``own`` fields, an unknown or refused flag, a wrong value, two spellings that contradict one another.
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        name, path = key.replace("-", "_"), f"trainer.megatron.{key}"
        if name in own:
            raise ConfigError(path, value, f"a field of its own: {name}, outside of [trainer.megatron]")
        if (known := spellings().get(name)) is None:
            meant = near(name, names())
            hint = f"did you mean {meant}?" if meant else "`myxo flags` lists all"  # too many to tell
            raise ConfigError(path, value, f"unknown flag of Megatron's; {hint}")
        name, plain = known[0].name, typed(path, *known, value)
        if result.setdefault(name, plain) != plain:
            raise ConfigError(path, value, f"another spelling says {name} = {shown(result[name])}")
    return result


def has_engine() -> bool:
    """Returns whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def missing_engine(given: Mapping[str, Any], here: bool = True) -> Iterator[ConfigError]:
    """Yields an error for each flag that Transformer Engine's layers alone have beside local ones, and for those layers where, ``here``, it
    is not installed. ``given``: name → value."""
    if (chosen := given.get("transformer_impl") == "transformer_engine") and here and not has_engine():
        yield ConfigError("trainer.megatron.transformer_impl", "transformer_engine", "local; Transformer Engine is not installed")
    for name, value in given.items():
        flag, had = catalogue().get(name), chosen or (name.startswith(OF_PACKAGE) and (not here or has_engine()))
        if flag is not None and flag.engine and not flag.kernels and value != flag.default and not had:
            expected = "leave it out, or transformer_impl = transformer_engine beside it: Transformer Engine's layers have it"
            yield ConfigError(f"trainer.megatron.{name}", value, expected)


def without_effect(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each flag that changes nothing in this installation, and why. ``given``: name → value."""
    engine, chosen = has_engine(), given.get("transformer_impl") == "transformer_engine"
    deepep = importlib.util.find_spec("deep_ep") is not None
    of = "'s layers, and transformer_impl is local" if engine else ", which is not installed"
    for name, value in given.items():
        flag = catalogue().get(name)
        if flag is not None and flag.ignored:
            yield flag.command_line[0], flag.reason
        elif flag is not None and not deepep and (name in OF_DEEPEP or (name, value) == ("moe_token_dispatcher_type", "flex")):
            yield flag.command_line[0], "DeepEP is not installed: tokens go to their experts by all-to-all; the values are the same"
        elif flag is not None and flag.kernels and value != flag.default and not (engine and (chosen or not flag.engine)):
            yield flag.command_line[0], f"it chooses among kernels of Transformer Engine{of}; the values are the same"


@cache
def of_others(kind: Literal["fields", "sections", "sentences"]) -> dict[str, str]:
    """Returns a name of TRL's, verl's, OpenRLHF's or of old slime's → what is meant, or said where none fits (``other_names.json``)."""
    stored = json.loads(resources.files("shared.config").joinpath("other_names.json").read_text())[kind]
    return {name: meant for meant, names in stored.items() for name in names.split()}


def refusal(key: str) -> str | None:
    """Returns why every value of a flag of Megatron's is refused, or what stands here for another project's; None for any other name."""
    flag = catalogue().get(name := key.replace("-", "_"))
    return flag.reason if flag is not None and flag.refused else of_others("sentences").get(name)


def typed(path: str, flag: Flag, bare: Any, value: Any) -> Any:
    """Returns a value as plain data of the flag's kind. ``bare``: as in `spellings`. Raises ConfigError."""
    try:
        if flag.kind == "switch" and not flag.refused and not (flag.optional and _is_none(value)):
            given = _single("switch", value)
            value = bare if given else not bare
        return flag.typed(value)
    except ValueError as error:
        raise ConfigError(path, value, str(error)) from None


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


def shown(value: Any) -> str:
    """Returns a value as TOML and flags have it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def truth(value: Any) -> Any:
    """Returns true or false in any form, such as yes, 1 or off; any other value as it is, for the check of its field or flag."""
    with contextlib.suppress(ValueError):
        return _SWITCH.validate_python(value)
    return value


_SWITCH = TypeAdapter(bool)
_EXPECTED = {"switch": "true or false", "int": "a whole number", "float": "a number", "text": "text"}


def _single(kind: str, value: Any) -> Any:
    """Returns text or TOML's value as one of `_EXPECTED`. Raises ValueError: what is expected."""
    text = str(value)
    with contextlib.suppress(ValueError):
        match kind:
            case "switch" if isinstance(given := truth(value), bool):
                return given
            case "int":
                return int(text)
            case "float" if math.isfinite(number := float(text)):
                return number
            case "text" if isinstance(value, str) and value:
                return value
    raise ValueError(_EXPECTED[kind])


def _plain(kind: str, value: Any) -> Any:
    """Returns text or TOML's value as plain data: a list for ``ints``, one or a list for ``int or ints``. Raises ValueError."""
    single = kind.split()[0].removesuffix("s")
    if kind == single:
        return _single(kind, value)
    if isinstance(value, str):
        if value.lstrip().startswith(("[", "(")):
            value = _expression(value)
        elif " or " not in kind or " " in value.strip():
            value = value.replace(",", " ").split()
    if not isinstance(value, list | tuple):
        return _single(single, value) if " or " in kind else [_single(single, value)]
    if not value:
        raise ValueError("at least one value")
    return [_single(single, item) for item in value]


def _expression(text: str) -> list[Any]:
    """Returns the list that a script writes as ``[0]*1+[1]*27``. Raises ValueError."""

    def read(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return read(body)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [read(item) for item in items]
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return joined(read(left), read(right), 1)
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)):
                return joined(read(left), [], times)
        raise ValueError

    def joined(left: Any, right: Any, times: int) -> list[Any]:
        if not isinstance(left, list) or not isinstance(right, list) or len(left) * times + len(right) > MAX_LIST:
            raise ValueError
        return left * times + right

    try:
        value = read(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, list):
        raise ValueError("a list such as [0]*1+[1]*27")
    return value
