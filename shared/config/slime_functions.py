"""slime's own functions, where a config names one: what Myxo does in their place.

slime's default function is what the rollout services do anyway, its fully asynchronous one what they do with ``max_staleness`` above 0, and
its function for demonstrations makes of a run a supervised one, ``[sft]`` alone. Its reward of on-policy distillation names a teacher's
server; its importance weights are `algorithm.tis_mode`.
"""

from typing import Any

from shared.config.eval_section import EVAL_LOOP

DEFAULT = EVAL_LOOP
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
DEMONSTRATIONS = "slime.rollout.sft_rollout.generate_rollout"

STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"

TEACHER = "slime.rollout.on_policy_distillation.reward_func"
WEIGHTS = {
    "slime.backends.megatron_utils.loss.vanilla_tis_function": "clip",
    "slime.backends.megatron_utils.loss.icepop_function": "mask",
}
"""slime's functions for ``custom_tis_function_path`` → ``tis_mode``."""

_FLAG = "--rollout-function-path"

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

Values = dict[str, Any]
"""Section → field → value, as flags and TOML give it."""


def settle(values: Values) -> list[str]:
    """Puts in the place of slime's own functions what they stand for; returns the lines for the user."""
    return [*_settle_rollout(values), *_settle_generate(values), *_settle_teacher(values), *_settle_weights(values)]


def _settle_teacher(values: Values) -> list[str]:
    """The server at ``rm_url`` is a teacher where slime's reward of distillation asks it; the reward itself is 0."""
    reward, algorithm = values.get("reward"), values.get("algorithm")
    if not isinstance(reward, dict) or not isinstance(algorithm, dict) or "rm_url" not in reward or "opd_teachers" in algorithm:
        return []
    if _dotted(reward.get("custom_rm_path")) != TEACHER:
        return []
    algorithm["opd_teachers"] = {"teacher": reward.pop("rm_url")}
    return [f"--custom-rm-path {TEACHER} asks a teacher: --rm-url is its address, algorithm.opd_teachers, and every reward is 0"]


def _settle_weights(values: Values) -> list[str]:
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict) or (mode := WEIGHTS.get(path := _dotted(algorithm.get("custom_tis_function_path")))) is None:
        return []
    del algorithm["custom_tis_function_path"]
    algorithm.setdefault("tis_mode", mode)
    return [f"--custom-tis-function-path {path} is --tis-mode {mode}"]


def _dotted(path: object) -> str:
    return str(path or "").replace(":", ".")


def _settle_rollout(values: Values) -> list[str]:
    rollout = values.get("rollout")
    if not isinstance(rollout, dict):
        return []
    match _dotted(rollout.get("rollout_function_path")):
        case str(path) if path == DEFAULT:
            del rollout["rollout_function_path"]
            return [f"{_FLAG} {path} is what the rollout services do"]
        case str(path) if path == FULLY_ASYNC:
            del rollout["rollout_function_path"]
            return [f"{_FLAG} {path} is what the rollout services do; --max-staleness bounds how far they run ahead, --off-policy corrects"]
        case str(path) if path == DEMONSTRATIONS:
            _train_demonstrations(values)
            return [f"{_FLAG} {path} is --num-rollout 0 with --sft-data: demonstrations are trained, nothing is generated"]
    return []


def _settle_generate(values: Values) -> list[str]:
    """slime's function that reads an engine's answer as it grows, so that what is aborted is kept: as rollout services do."""
    rollout = values.get("rollout")
    if not isinstance(rollout, dict) or _dotted(rollout.get("custom_generate_function_path")) != STREAMING:
        return []
    del rollout["custom_generate_function_path"]
    return [f"--custom-generate-function-path {STREAMING} is what the rollout services do"]


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
