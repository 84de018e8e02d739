"""What a script of slime's means beyond its flags: its own functions, its defaults, and what it refuses at its start.

The flags themselves are translated by `shared.config.flags`, by the rows of `shared.config.flag_table`.

slime's default function is what the rollout services do anyway, its fully asynchronous one what they do with ``max_staleness`` above 0, and
its function for demonstrations makes of a run a supervised one, ``[sft]`` alone. Its reward of on-policy distillation names a teacher's
server; its importance weights are `algorithm.tis_mode`. These hold wherever a config names one.

A command line without a config has slime's defaults where Myxo's differ in what is trained, and is refused what slime refuses; where Myxo
gives such a combination a meaning, a TOML file may have it. Only values that decide which samples are made, and what is made of them, are
slime's. How large a machine is used, what is stored and what is written stays Myxo's: `docs/coming-from-slime.md` lists those that differ.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from shared.config import presets
from shared.config.eval_section import EVAL_LOOP
from shared.config.flag_table import shown
from shared.config.run_config import RunConfig
from shared.config.section import Rule
from shared.config.trainer_section import TrainerSection
from shared.rewards.names import GIVEN
from shared.runtime.errors import ConfigError

Values = dict[str, Any]  # Section → field → value, as flags and TOML give it: text, or plain

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
TEACHER = "slime.rollout.on_policy_distillation.reward_func"

SETTLED_FROM = {
    "algorithm.opd_teachers": "reward.rm_url",
    "algorithm.tis_mode": "algorithm.custom_tis_function_path",
    "eval.sets": "eval.eval_config",
    "sft.sft_data": "data.prompt_data",
    "sft.sft_messages_key": "data.input_key",
    "sft.sft_batch_size": "trainer.global_batch_size",
    "sft.sft_num_epoch": "rollout.num_epoch",
    "sft.sft_steps": "rollout.num_rollout",
    "sft.sft_lr": "trainer.lr",
    "sft.sft_min_lr": "trainer.min_lr",
    "sft.sft_lr_decay_style": "trainer.lr_decay_style",
    "sft.sft_warmup_iters": "trainer.lr_warmup_iters",
    "sft.sft_warmup_fraction": "trainer.lr_warmup_fraction",
}
"""Field → the field that a user gave, where what slime means by it is set here under another name."""


def _dotted(path: object) -> str:
    return str(path or "").replace(":", ".")


def _train_demonstrations(values: Values) -> None:
    """Makes of a run over prompts with ``loss_type`` sft_loss one over demonstrations."""
    for section in ("data", "rollout", "trainer", "sft", "algorithm", "debug"):
        values.setdefault(section, {})
    rollout = values["rollout"]
    sources = {field.removeprefix("sft."): source.split(".") for field, source in SETTLED_FROM.items() if field.startswith("sft.")}
    given: dict[str, Any] = {field: values[section].get(name) for field, (section, name) in sources.items()}
    prompts, steps = rollout.get("rollout_batch_size"), values["trainer"].get("num_steps_per_rollout")
    batch = given["sft_batch_size"] = given["sft_batch_size"] or _quotient(1 if steps is None else steps, prompts)
    if given["sft_lr"] is None:
        given["sft_lr"] = TrainerSection.model_fields["lr"].default
    given["sft_steps"] = _quotient(batch, rollout.get("num_rollout"), prompts)
    if "num_rollout" in rollout:
        del given["sft_num_epoch"]
    for name, value in given.items():
        if value is not None:
            values["sft"].setdefault(name, value)
    steps = [f"trainer.{name}" for name in ("global_batch_size", "lr_warmup_fraction", "lr_warmup_iters", "num_steps_per_rollout")]
    for path in ("data.prompt_data", "rollout.num_epoch", "algorithm.loss_type", "debug.debug_train_only", *steps):
        section, name = path.split(".")
        values[section].pop(name, None)
    rollout["num_rollout"] = 0


def _quotient(divisor: Any, *factors: Any) -> int | None:
    """Returns the factors' product by the divisor, rounded down; None where one is no number, which its own field reports."""
    try:
        return math.prod(map(int, factors)) // int(divisor)
    except (TypeError, ValueError, ZeroDivisionError):
        return None


INSTEAD: dict[str, tuple[str, str, Callable[[Values], object]]] = {
    EVAL_LOOP: ("rollout.rollout_function_path", "what the rollout services do", lambda _: None),
    FULLY_ASYNC: (
        "rollout.rollout_function_path",
        "what the rollout services do; --max-staleness bounds how far they run ahead, --off-policy corrects",
        lambda _: None,
    ),
    "slime.rollout.sft_rollout.generate_rollout": (
        "rollout.rollout_function_path",
        "--num-rollout 0 with --sft-data: demonstrations are trained, nothing is generated",
        _train_demonstrations,
    ),
    "slime.rollout.sglang_streaming_rollout.generate_streaming": (
        "rollout.custom_generate_function_path",
        "what the rollout services do",
        lambda _: None,
    ),
    "slime.backends.megatron_utils.loss.vanilla_tis_function": (
        "algorithm.custom_tis_function_path",
        "--tis-mode clip",
        lambda values: values["algorithm"].setdefault("tis_mode", "clip"),
    ),
    "slime.backends.megatron_utils.loss.icepop_function": (
        "algorithm.custom_tis_function_path",
        "--tis-mode mask",
        lambda values: values["algorithm"].setdefault("tis_mode", "mask"),
    ),
}
"""slime's own functions → the field that names each, what Myxo does in its place, and what that sets."""


def settle_functions(values: Values) -> list[str]:
    """Puts in the place of slime's own functions what they stand for; returns the lines for the user."""
    notes = []
    for path, (field, meaning, settle) in INSTEAD.items():
        section, name = field.split(".")
        if isinstance(fields := values.get(section), dict) and _dotted(fields.get(name)) == path:
            del fields[name]
            settle(values)
            notes.append(f"--{name.replace('_', '-')} {path} is {meaning}")
    reward, algorithm = values.get("reward"), values.get("algorithm")
    if not isinstance(reward, dict) or not isinstance(algorithm, dict) or "rm_url" not in reward or "opd_teachers" in algorithm:
        return notes
    if _dotted(reward.get("custom_rm_path")) == TEACHER:
        algorithm["opd_teachers"] = {"teacher": reward.pop("rm_url")}
        notes.append(f"--custom-rm-path {TEACHER} asks a teacher: --rm-url is its address, algorithm.opd_teachers, and every reward is 0")
    return notes


DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"input_key": "input", "label_key": None, "overlong_prompts": "filter", "add_special_tokens": False},
    "rollout": {"overlong_samples": "alone", "rollout_skip_special_tokens": False, "gpus_per_node": 8},
    "trainer": {"adam_beta2": 0.999, "weight_decay": 0.01, "lr_decay_style": "linear"},
}
"""Those that always hold; the optimizer's are Megatron's."""

_OBJECTIVES = ("use_tis", "off_policy", "use_rollout_logprobs", "use_m2po", "preset")
"""Fields that say how stale samples are corrected, or name a whole objective."""


def defaults(given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns slime's defaults of what a command line leaves open, those of fields that it gives itself too."""
    found = {section: dict(fields) for section, fields in DEFAULTS.items()}
    rollout, trainer, algorithm = (given.get(section, {}) for section in ("rollout", "trainer", "algorithm"))
    if not _runs_ahead(rollout):
        found["rollout"]["max_staleness"] = 0
        if _leaves_correction_open(algorithm):
            found["algorithm"] = {"use_tis": False}
    named = map(str, preset if isinstance(preset := algorithm.get("preset", []), list) else [preset])
    if algorithm.keys() & {"use_kl_loss", "kl_loss_coef"} and not any("kl_loss_type" in presets.PRESETS.get(name, {}) for name in named):
        found.setdefault("algorithm", {})["kl_loss_type"] = "k1"
    if trainer.get("enable_mtp_training") is True:
        found["trainer"]["mtp_loss_scaling_factor"] = 0.2
    if not given.get("reward", {}).keys() & {"rm_type", "custom_rm_path"}:
        found["reward"] = {"rm_type": GIVEN}
    if trainer.get("colocate") is True and not rollout.keys() & {"rollout_num_gpus", "rollout_replicas"}:
        ranks = _quotient(1, trainer.get("actor_num_nodes", 1), trainer.get("actor_num_gpus_per_node", 1))
        found["rollout"]["rollout_num_gpus"] = ranks
    return found


def _runs_ahead(rollout: Mapping[str, Any]) -> bool:
    """Returns whether samples may be of older weights than those that are trained."""
    if (bound := rollout.get("max_staleness")) is not None:
        return str(bound) != "0"
    is_async = _dotted(rollout.get("rollout_function_path")) == FULLY_ASYNC
    return is_async or rollout.get("staleness_policy") in ("drop", "requeue", "continue")  # slime masks whatever is of older weights


def _leaves_correction_open(algorithm: Mapping[str, Any]) -> bool:
    return not algorithm.keys() & set(_OBJECTIVES) and algorithm.get("loss_type", "policy_loss") == "policy_loss"


def settle_defaults(given: dict[str, dict[str, Any]]) -> list[str]:
    """Takes out of a command line what is without effect in slime; returns the lines for the user, of what slime does not do as well."""
    algorithm, rollout, notes = given.get("algorithm", {}), given.get("rollout", {}), list[str]()
    if _runs_ahead(rollout) and _leaves_correction_open(algorithm):
        weight = f"an importance weight within {algorithm.get('tis_clip_low', 0)} to {algorithm.get('tis_clip', 2)}"
        notes.append(
            f"rollouts run ahead of training, and the loss corrects for it by --off-policy decoupled, {weight}; slime has none: "
            "--no-use-tis leaves it out"
        )
    coefficient = str(algorithm.get("kl_loss_coef"))
    with suppress(ValueError):  # there is none, or its field's own check reports it
        if float(coefficient) > 0 and not algorithm.get("use_kl_loss") and "preset" not in algorithm:
            del algorithm["kl_loss_coef"]
            notes.append(f"--kl-loss-coef {coefficient} changes nothing without --use-kl-loss, as with slime")
    megatron = given.get("trainer", {}).get("megatron")
    if isinstance(megatron, dict) and megatron.get("moe_router_enable_expert_bias") and "moe_router_bias_update_rate" not in megatron:
        notes.append("router biases keep the checkpoint's values; slime moves them, unless told --moe-router-bias-update-rate 0: by 0.001")
    return notes


def note(found: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the note that names the defaults that are taken, as nothing else is ``given``."""
    taken = ((name, value) for section, fields in found.items() for name, value in fields.items() if name not in given.get(section, {}))
    words = ", ".join(f"{name} = {shown(value)}" for name, value in taken)
    return f"slime's defaults hold where they differ from Myxo's and no flag is given: {words}"


RULES = (
    Rule(
        "trainer.lr_decay_iters",
        lambda config, given: given is not None and not config.has_steps and config.sft.sft_data is not None,
        "none with demonstrations alone: their rate decays over all their steps",
    ),
    Rule(
        "algorithm.normalize_advantages",
        lambda config, given: "reinforce_plus_plus" in config.algorithm.advantage_estimator and not given,
        "true with an --advantage-estimator of REINFORCE++, which whitens its advantages",
    ),
    Rule(
        "trainer.freeze_params_name_list",
        lambda config, given: given and config.trainer.only_train_params_name_list,
        "none beside --only-train-params-name-list; give one of them",
    ),
    Rule(
        "weights.update_weight_mode",
        lambda config, given: given == "delta" and config.trainer.colocate,
        "full with --colocate: engines take the weights out of the trainer's memory",
    ),
    Rule(
        "weights.update_weight_mode",
        lambda config, given: given == "delta" and not config.trainer.colocate and config.weights.update_weight_transport == "nccl",
        "full, or --update-weight-transport disk: what is pushed to engines is whole",
    ),
)
"""What slime refuses at its start, and a TOML file may have."""


def refusals(config: RunConfig) -> Iterator[ConfigError]:
    """Yields what slime would refuse."""
    yield from (ConfigError(*found) for rule in RULES for found in rule.problems(config))
