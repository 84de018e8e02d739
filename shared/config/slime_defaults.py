"""slime's defaults where Myxo's differ in what is trained: a command line without a config has these, as slime's own would.

Only values that decide which samples are made, and what is made of them, are slime's. How large a machine is used, what is kept and what is
written stays Myxo's: `docs/coming-from-slime.md` lists those that differ.
"""

from collections.abc import Mapping
from typing import Any

from shared.config import presets, slime_functions
from shared.rewards.names import GIVEN

Values = Mapping[str, Mapping[str, Any]]
"""Section → field → value, as flags give it: text, or plain."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"input_key": "input", "label_key": None, "overlong_prompts": "filter", "add_special_tokens": False},
    "rollout": {"overlong_samples": "alone", "rollout_skip_special_tokens": False, "gpus_per_node": 8},
    "trainer": {"adam_beta2": 0.999, "weight_decay": 0.01, "lr_decay_style": "linear"},
}
"""Those that always hold; the optimizer's are Megatron's."""

_OBJECTIVES = ("use_tis", "off_policy", "use_rollout_logprobs", "use_m2po", "preset")
"""Fields that say how stale samples are corrected, or name a whole objective."""


def defaults(given: Values) -> dict[str, dict[str, Any]]:
    """Returns the fields that have slime's default, for what a command line gives."""
    found = {section: dict(fields) for section, fields in DEFAULTS.items()}
    rollout, trainer, algorithm = (given.get(section, {}) for section in ("rollout", "trainer", "algorithm"))
    if not _runs_ahead(rollout):
        found["rollout"]["max_staleness"] = 0
        if _leaves_correction_open(algorithm):
            found["algorithm"] = {"use_tis": False}
    if algorithm.keys() & {"use_kl_loss", "kl_loss_coef"} and not _presets(algorithm, "kl_loss_type"):
        found.setdefault("algorithm", {})["kl_loss_type"] = "k1"
    if not given.get("reward", {}).keys() & {"rm_type", "custom_rm_path"}:
        found["reward"] = {"rm_type": GIVEN}
    if _is_on(trainer.get("colocate")) and not rollout.keys() & {"rollout_num_gpus", "rollout_replicas"}:
        ranks = _count(trainer.get("actor_num_nodes", 1)) * _count(trainer.get("actor_num_gpus_per_node", 1))
        found["rollout"]["rollout_num_gpus"] = ranks
    return {
        section: {name: value for name, value in fields.items() if name not in given.get(section, {})} for section, fields in found.items()
    }


def _runs_ahead(rollout: Mapping[str, Any]) -> bool:
    """Returns whether samples may be of older weights than those that are trained."""
    is_async = str(rollout.get("rollout_function_path")).replace(":", ".") == slime_functions.FULLY_ASYNC
    return is_async or bool({"staleness_policy", "max_staleness"} & rollout.keys())


def _leaves_correction_open(algorithm: Mapping[str, Any]) -> bool:
    return not algorithm.keys() & set(_OBJECTIVES) and algorithm.get("loss_type", "policy_loss") == "policy_loss"


def _presets(algorithm: Mapping[str, Any], field: str) -> bool:
    """Returns whether a preset that is given sets the field."""
    given = algorithm.get("preset", [])
    return any(field in presets.PRESETS.get(name, {}) for name in ([given] if isinstance(given, str) else given))


def settle(given: dict[str, dict[str, Any]]) -> list[str]:
    """Takes out of a command line what is without effect in slime; returns the lines for the user, of what slime does not do as well."""
    algorithm, rollout, told = given.get("algorithm", {}), given.get("rollout", {}), list[str]()
    if _runs_ahead(rollout) and str(rollout.get("max_staleness")) != "0" and _leaves_correction_open(algorithm):
        weight = f"an importance weight within {algorithm.get('tis_clip_low', 0)} to {algorithm.get('tis_clip', 2)}"
        told.append(
            f"rollouts run ahead of training, and the loss corrects for it by --off-policy decoupled, {weight}; slime has none: "
            "--no-use-tis leaves it out"
        )
    coefficient = algorithm.get("kl_loss_coef")
    if coefficient is not None and not _is_on(algorithm.get("use_kl_loss")) and _is_above_zero(coefficient):
        del algorithm["kl_loss_coef"]
        told.append(f"--kl-loss-coef {coefficient} changes nothing without --use-kl-loss, as with slime")
    if _is_on(given.get("trainer", {}).get("colocate")) and "rollout_num_gpus" in rollout and "rollout_replicas" not in rollout:
        told.append(f"--rollout-num-gpus {rollout.pop('rollout_num_gpus')} changes nothing with --colocate, as with slime: all are taken")
    return told


def note(fields: Values) -> str:
    """Returns the line that tells a user which defaults were taken."""
    shown = ", ".join(f"{name} = {_shown(value)}" for section in fields.values() for name, value in section.items())
    return f"slime's defaults hold where they differ from Myxo's and no flag is given: {shown}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_on(value: Any) -> bool:
    return str(value).lower() == "true"


def _is_above_zero(value: Any) -> bool:
    """Returns whether a value is a number above 0; what is none is reported by the field's own check."""
    try:
        return float(value) > 0
    except ValueError:
        return False


def _count(value: Any) -> int:
    """Returns a whole number; 1 for what is none, which the field's own check reports."""
    text = str(value)
    return int(text) if text.isdecimal() else 1
