"""slime's own rollout functions, where a config names one: what its services do in their place.

slime's default function is what the rollout services do anyway, its fully asynchronous one what they do with ``max_staleness`` above 0, and
its function for demonstrations makes of a run a supervised one, ``[sft]`` alone.
"""

from typing import Any

DEFAULT = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
DEMONSTRATIONS = "slime.rollout.sft_rollout.generate_rollout"

_FLAG = "--rollout-function-path"

Values = dict[str, Any]
"""Section → field → value, as flags and TOML give it."""


def settle(values: Values) -> list[str]:
    """Puts in the place of one of slime's own functions what it stands for; returns the lines for the user."""
    rollout = values.get("rollout")
    if not isinstance(rollout, dict):
        return []
    match str(rollout.get("rollout_function_path", "")).replace(":", "."):
        case str(path) if path == DEFAULT:
            del rollout["rollout_function_path"]
            return [f"{_FLAG} {path} is what the rollout services do"]
        case str(path) if path == FULLY_ASYNC:
            del rollout["rollout_function_path"]
            return [f"{_FLAG} {path} is what the rollout services do; --max-staleness says how far they run ahead"]
        case str(path) if path == DEMONSTRATIONS:
            _train_demonstrations(values)
            return [f"{_FLAG} {path} is --num-rollout 0 with --sft-data: demonstrations are trained, nothing is generated"]
    return []


def _train_demonstrations(values: Values) -> None:
    """Makes of a run over prompts with ``loss_type`` sft_loss one over demonstrations."""
    data, rollout, trainer, sft, _, _ = (
        values.setdefault(section, {}) for section in ("data", "rollout", "trainer", "sft", "algorithm", "debug")
    )
    batch = trainer.pop("global_batch_size", None) or rollout.get("rollout_batch_size")
    given = {
        "sft_data": data.pop("prompt_data", None),
        "sft_messages_key": data.get("input_key"),
        "sft_batch_size": batch,
        "sft_num_epoch": rollout.pop("num_epoch", None) if "num_rollout" not in rollout else None,
        "sft_steps": _steps(rollout.get("num_rollout"), rollout.get("rollout_batch_size"), batch),
        "sft_lr": trainer.get("lr"),
        "sft_min_lr": trainer.get("min_lr"),
        "sft_lr_decay_style": trainer.get("lr_decay_style"),
        "sft_warmup_iters": trainer.get("lr_warmup_iters"),
        "sft_warmup_fraction": trainer.get("lr_warmup_fraction"),
    }
    for name, value in given.items():
        if value is not None:
            sft.setdefault(name, value)
    replaced = {
        "rollout": ("rollout_function_path", "num_epoch"),
        "trainer": ("lr_warmup_fraction", "lr_warmup_iters", "num_steps_per_rollout"),
        "algorithm": ("loss_type",),
        "debug": ("debug_train_only",),
    }
    for section, names in replaced.items():
        for name in names:
            values[section].pop(name, None)
    rollout["num_rollout"] = 0


def _steps(rollouts: Any, prompts: Any, batch: Any) -> int | None:
    """Returns the optimizer steps of so many rollouts; None where a number is none, which its own field reports."""
    try:
        return int(rollouts) * int(prompts) // int(batch)
    except (TypeError, ValueError, ZeroDivisionError):
        return None
