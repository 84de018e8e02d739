"""The environment variables that a config may set, and those that it may not: a config is frozen on the bus and printed, so no secret
belongs into it, and some variables are the launcher's.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

_CREDENTIAL = re.compile(
    r"(NATS_URL|REDIS_URL)|(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|APIKEY|KEY)(_|\Z)", re.IGNORECASE
)
_CREDENTIAL_VALUE = re.compile(r"\w+://[^/\s]*:[^/\s]*@")

_LAUNCHER = re.compile(
    r"(MYXO_\w*|TORCHELASTIC_\w*|CUDA_VISIBLE_DEVICES|RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|(LOCAL_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT))\Z"
)
"""Variables that Myxo and torchrun set for each rank."""


_KERNELS = "slime trains by other kernels with it; here by torch's or Transformer Engine's"

UNREAD = {
    "OPEN_TRAINING_INT4_": "slime's training forward rounds weights to INT4 by it; here they have train_dtype, as engines get them",
    "DSA_KV_FP8_QAT": "slime trains sparse attention with keys and values rounded to FP8 by it; here they are not",
    "MEGATRON_USE_SGLANG_": _KERNELS,
    "SLIME_DEEPGEMM_": _KERNELS,
}
"""How the variables begin that slime reads and Myxo does not → what they do there, and what is so here."""


def unread(variables: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each variable that is set, and that slime would read."""
    for name, value in sorted(variables.items()):
        reason = next((reason for start, reason in UNREAD.items() if name.startswith(start)), None)
        if reason is not None and value.lower() not in ("", "0", "false"):
            yield f"{name} = {value} is not read: {reason}"


def names_credential(name: str) -> bool:
    """Returns whether a variable, or a key with dashes, is called as those are that hold a secret."""
    return bool(_CREDENTIAL.search(name.replace("-", "_")))


_KEY = re.compile(r"\b(?:sk|hf|gh[op]|glpat|xox[bap])[-_][\w-]{16,}")  # keys of well-known services
_USER, _SECRET_QUERY = re.compile(r"(\w+://)[^/\s?#]*@"), re.compile(r"([?&]([^=&\s]+)=)[^&\s#]+")
_FREE = ("custom_args", "agent_options", "judge_sampling", "sglang")
"""Fields whose keys are the user's own, so that a key says whether its value is a secret; elsewhere ``label_key`` names a column."""


def without_credentials(value: Any, free: bool = False) -> Any:
    """Returns plain values as files, people and other programs get them: URLs without user, password and the parts of a query that are
    named as credentials, and ``…`` for keys of well-known services and, in maps of the user's own (``free``), for what is named as one."""
    if isinstance(value, dict):
        secret = {key for key, item in value.items() if free and not isinstance(item, int | float | None) and names_credential(str(key))}
        return {key: "…" if key in secret else without_credentials(item, free or key in _FREE) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item, free) for item in value]
    if not isinstance(value, str):
        return value
    text = _KEY.sub("…", _USER.sub(r"\1", value))
    return _SECRET_QUERY.sub(lambda found: f"{found[1]}…" if names_credential(found[2]) else found[0], text)


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
