"""Published algorithms by name, ``algorithm.preset``: the fields that give each, where the user gave none (`docs/algorithms.md`).

A field that the user gave stays as given, and so does one that says the same thing under another name (``use_tis`` for ``off_policy``). Of
several presets a later one wins: ``--preset gspo icepop``. Presets count where a config is read; the run's frozen config has the fields.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.runtime.errors import nearest


@dataclass(frozen=True)
class ValueOf:
    """A value that is another field's."""

    field: str


_AS_PUBLISHED = {"off_policy": "none"}  # The published form has no importance weight: its samples are of the policy at batch start

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"advantage_estimator": "grpo", "eps_clip": 0.2, "kl_loss_coef": 0.04, "kl_loss_type": "k3", **_AS_PUBLISHED},
    "dr_grpo": {
        "advantage_estimator": "grpo",
        "disable_grpo_std_normalization": True,
        "loss_divisor": ValueOf("rollout_max_response_len"),
        **_AS_PUBLISHED,
    },
    "dapo": {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": "nonzero_std",
        **_AS_PUBLISHED,
    },
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, **_AS_PUBLISHED},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0, "calculate_per_token_loss": True, **_AS_PUBLISHED},
    "rloo": {"advantage_estimator": "rloo", "loss_divisor": 1, "kl_coef": 0.05, **_AS_PUBLISHED},
    "ppo": {
        "advantage_estimator": "ppo",
        "eps_clip": 0.2,
        "gamma": 1.0,
        "lambd": 0.95,
        "value_clip": 0.2,
        "normalize_advantages": True,
        "kl_coef": 0.05,
        **_AS_PUBLISHED,
    },
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 1.0,
        "normalize_advantages": True,
        "kl_coef": 0.01,
        **_AS_PUBLISHED,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        "kl_coef": 0.01,
        **_AS_PUBLISHED,
    },
    "dual_clip": {"eps_clip_c": 3.0, **_AS_PUBLISHED},
    "decoupled": {"off_policy": "decoupled", "tis_mode": "clip", "tis_clip": 2.0},
    "tis": {"off_policy": "decoupled", "tis_mode": "truncate", "tis_clip": 2.0},
    "icepop": {"off_policy": "decoupled", "tis_mode": "mask", "tis_clip": 5.0, "tis_clip_low": 0.5},
    "mis": {
        "off_policy": "decoupled",
        "tis_level": "sequence",
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.99,
        "rs_upper_bound": 1.001,
        "rs_veto_threshold": 1e-4,
    },
    "opsm": {"off_policy": "rollout", "use_opsm": True, "opsm_delta": 1e-4, "kl_loss_coef": 0.001, "use_unbiased_kl": True},
    "m2po": {"off_policy": "rollout", "use_m2po": True, "m2_threshold": 0.04, "calculate_per_token_loss": True},
    "rollout_logprobs": {"off_policy": "rollout"},
    "opd": {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 1.0, **_AS_PUBLISHED},
    "rejection_sampling": {"loss_type": "sft_loss", "rejection_threshold": 0.0},
}

_SAME_THING = (("off_policy", "use_tis", "use_rollout_logprobs"), ("calculate_per_token_loss", "loss_divisor"), ("kl_loss_coef", "kl_coef"))
"""Fields of which one given makes the others' presets void."""

_NOTHING = (None, False, "", "0", "false", "none")


def listed(given: object) -> list[object]:
    """Returns a list of presets' names, from a list or a single name. Raises ValueError for an unknown one."""
    found = given if isinstance(given, list) else [given]
    for name in found:
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"no preset {name!r}; {nearest(str(name), list(PRESETS))}")
    return found


def fields_of(presets: Iterable[str], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that presets set: name → value, but for those that the user gave.

    Args:
        given: every field that the user gave, by its name. defaults: of every field.
    """
    found: dict[str, Any] = {}
    for preset in presets:
        found |= PRESETS[preset]
    chosen = {field for same in _SAME_THING for field in same if any(_gives(given.get(other)) for other in same)}
    return {
        field: {**defaults, **given}[value.field] if isinstance(value, ValueOf) else value
        for field, value in found.items()
        if field not in given and field not in chosen
    }


def owner(presets: Iterable[str], field: str) -> str | None:
    """Returns which of several presets a field is set by: the last that has it; None where none has."""
    return next((preset for preset in reversed(list(presets)) if field in PRESETS[preset]), None)


def _gives(value: object) -> bool:
    """Returns whether a value, perhaps a flag's word, is other than nothing."""
    try:
        return float(str(value)) != 0.0
    except ValueError:
        return (value.lower() if isinstance(value, str) else value) not in _NOTHING


def notes(presets: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each preset: what it set, and what was given otherwise.

    Args:
        values: every field of the resolved config, by its name.
    """
    named = list(presets)
    wanted = {preset: {f: values.get(v.field) if isinstance(v, ValueOf) else v for f, v in PRESETS[preset].items()} for preset in named}
    for position, preset in enumerate(named):
        alike, over, other = list[str](), list[str](), list[str]()
        for field, value in wanted[preset].items():
            found = values.get(field)
            later = owner(named[position + 1 :], field)
            if found == value:
                alike.append(f"{field} = {value}")
            elif later is not None and wanted[later][field] == found:
                over.append(f"{field} = {found} (of {later}, which comes later; {preset}: {value})")
            else:
                other.append(f"{field} = {found} (the preset: {value})")
        parts = [", ".join(alike) or "sets nothing", *(f"instead: {', '.join(over)}" for _ in over[:1])]
        yield f"preset {preset}: " + "; ".join([*parts, *(f"given otherwise: {', '.join(other)}" for _ in other[:1])])


def flags_of(preset: str) -> str:
    """Returns a preset as the flags that it stands for."""
    words = []
    for field, value in PRESETS[preset].items():
        flag = f"--{field.replace('_', '-')}"
        given = value.field.upper() if isinstance(value, ValueOf) else value
        words.append(flag if value is True else f"{flag} {given}")
    return " ".join(words)
