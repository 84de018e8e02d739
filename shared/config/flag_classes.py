"""The class of every flag, slime's and Megatron's alike: taken, renamed, without effect or refused. Derived from where each rule stands."""

from typing import Literal, NamedTuple

from shared.config import flags, megatron_flags, slime_flags
from shared.config.megatron_flags import UNSET, Flag
from shared.config.run_config import field_sections, section_model
from shared.config.slime_flags import NoOp, Renamed

Kind = Literal["taken", "renamed", "no-op", "refused"]


class FlagClass(NamedTuple):
    """A flag's class, and in words what it sets, or why it does nothing."""

    kind: Kind
    meaning: str


def classify(name: str) -> FlagClass | None:
    """Returns the class of a flag, its name with underscores; None for one that is unknown."""
    owners = field_sections()
    field = name if name in owners else name.removeprefix("no_")
    if field in owners and (field == name or flags.is_switch(field)):
        return FlagClass("taken", section_model(owners[field]).model_fields[field].description or "")
    if (entry := slime_flags.find(name)) is not None:
        if isinstance(entry, Renamed):
            return FlagClass("renamed", entry.meaning)
        return FlagClass("no-op" if isinstance(entry, NoOp) else "refused", entry.reason)
    if name.startswith("sglang_"):
        return FlagClass("taken", "a flag of SGLang's server, passed on")
    known = megatron_flags.spellings().get(name)
    return None if known is None else _of_megatron(known[0])


def _of_megatron(flag: Flag) -> FlagClass:
    if flag.ignored:
        return FlagClass("no-op", flag.reason)
    if flag.refused:
        return FlagClass("refused", flag.reason)
    if flag.fixed is not UNSET:
        shown = str(flag.fixed).lower() if flag.fixed is None or isinstance(flag.fixed, bool) else str(flag.fixed)
        return FlagClass("taken", f"{shown} only: {flag.reason}")
    if flag.groups == ("architecture",):
        return FlagClass("taken", "compared with the checkpoint")
    return FlagClass("taken", "passed on to Megatron" + (", where Transformer Engine is installed" if flag.engine else ""))
