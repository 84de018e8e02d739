"""slime's own rollout functions as values of ``rollout_function_path``: what Myxo does anyway, or does under other fields."""

from typing import Any

from shared.runtime.errors import ConfigError

NATIVE = {
    "slime.rollout.sglang_rollout.generate_rollout": "groups are generated, scored and filtered so by the run's services",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "groups are always generated across steps, up to --max-staleness",
}
"""What Myxo's own loop does → why the value has no effect."""

SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"

REFUSED = {
    "slime.rollout.sleep_rollout.sleep": "it generates nothing; start the engine alone to profile it",
    "slime.rollout.forge_load.generate_rollout": "use --load-debug-rollout-data",
}

Values = dict[str, dict[str, Any]]


def settle(values: Values, notes: list[str]) -> None:
    """Takes one of slime's own functions out of the values of a config (section → field → value), and lays down what it stands for.

    Raises ConfigError, with what to do, for one that there is nothing for.
    """
    rollout = values.get("rollout")
    given = rollout.get("rollout_function_path") if isinstance(rollout, dict) else None
    path = given.replace(":", ".") if isinstance(given, str) else ""
    if path in REFUSED:
        raise ConfigError("rollout.rollout_function_path", given, REFUSED[path])
    if path in NATIVE:
        del values["rollout"]["rollout_function_path"]
        notes.append(f"--rollout-function-path {given} changes nothing: {NATIVE[path]}")
    elif path == SUPERVISED:
        del values["rollout"]["rollout_function_path"]
        notes.append(_supervised(values))


def _supervised(values: Values) -> str:
    """Makes the run a supervised one, with no rollout. Returns the note."""
    rollout, data, trainer = (values.setdefault(name, {}) for name in ("rollout", "data", "trainer"))
    sft, debug = values.setdefault("sft", {}), values.setdefault("debug", {})
    moved = {
        "sft_data": data.get("prompt_data"),
        "sft_messages_key": data.get("input_key"),
        "sft_batch_size": rollout.get("rollout_batch_size"),
        "sft_steps": rollout.get("num_rollout"),
        "sft_epochs": rollout.pop("num_epoch", None),
        "sft_lr": trainer.get("lr"),
        "sft_min_lr": trainer.get("min_lr"),
        "sft_warmup_iters": trainer.get("lr_warmup_iters"),
        "sft_warmup_fraction": trainer.get("lr_warmup_fraction"),
        "sft_lr_decay_style": trainer.get("lr_decay_style"),
    }
    for name, value in moved.items():
        if value is not None:
            sft.setdefault(name, value)
    rollout["num_rollout"] = 0
    data.setdefault("apply_chat_template", True)  # the chats are read as prompts, too, though nothing is generated of them
    debug.pop("debug_train_only", None)  # there are no engines to leave out
    names = ", ".join(f"--{name.replace('_', '-')}" for name in moved if name in sft)
    return f"--rollout-function-path {SUPERVISED} is supervised training alone: --num-rollout 0 with {names}"
