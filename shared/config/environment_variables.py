"""The environment variables that a config may set, and those that it may not: a config is frozen on the bus and printed, so no secret
belongs into it, and some variables are the launcher's.
"""

import re
from collections.abc import Iterator, Mapping

from shared.runtime.safe_text import names_credential

EVAL_VARIABLE = "MYXO_EVAL_REPLICA"  # 1 for a rollout service of `rollout.eval_replicas`
MODEL_VARIABLE = "MYXO_MODEL"  # The name of the frozen model that a rollout service serves
ROUTERS_VARIABLE = "MYXO_MODEL_ROUTERS"  # JSON: name of each frozen model → host and port at which this machine's functions ask it
GROUP_VARIABLE = "MYXO_ENGINE_GROUP"  # Which of its model's groups of engines a rollout service's engine is of, from 0

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_CREDENTIAL_VALUE = re.compile(r"\w+://[^/\s]*:[^/\s]*@")

_LAUNCHER = re.compile(
    r"(MYXO_\w*|TORCHELASTIC_\w*|CUDA_VISIBLE_DEVICES|RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|(LOCAL_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT))\Z"
)
"""Variables that Myxo and torchrun set for each rank."""


QAT, QAT_GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"
"""Slime's variables for quantization-aware training and its groups, read from `trainer.train_env_vars`."""

_KERNELS = "slime trains by other kernels with it; here by torch's or Transformer Engine's"

UNREAD = {
    "OPEN_TRAINING_INT4_": "slime's training forward rounds weights to INT4 by it; give --quantization-aware, or it in --train-env-vars",
    "DSA_KV_FP8_QAT": "slime trains sparse attention with keys and values rounded to FP8 by it; here they are not",
    "MEGATRON_USE_SGLANG_": _KERNELS,
    "SLIME_DEEPGEMM_": _KERNELS,
}
"""How the variables begin that slime reads and Myxo does not → what they do there, and what is so here."""


def unread(variables: Mapping[str, str], read: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each variable that is set, and that slime would read. ``read``: those of the trainer's ranks."""
    for name, value in sorted(variables.items()):
        reason = next((reason for start, reason in UNREAD.items() if name.startswith(start)), None)
        reason = None if name in (QAT, QAT_GROUP) and name in read else reason
        if reason is not None and value.lower() not in ("", "0", "false"):
            yield f"{name} = {value} is not read: {reason}"


def problems(variables: Mapping[str, str]) -> Iterator[str]:
    """Yields what is wrong with each variable that a config may not set, name first."""
    for name, value in variables.items():
        if not VARIABLE.match(name):
            yield f"{name!r} is no name of a variable: use letters, digits and '_'"
        elif names_credential(name) or _CREDENTIAL_VALUE.search(value):
            yield f"{name!r} holds a credential, and a run's config is kept on the bus and printed; set it where the trainer is started"
        elif _LAUNCHER.match(name):
            yield f"{name!r} is set for each rank by its launcher; leave it out"
        elif "\0" in value:
            yield f"{name!r}: a value holds no NUL"
