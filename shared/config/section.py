"""The base of the sections of a run's config: fields, and rules about combinations of them."""

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from shared.runtime.errors import nearest

MUTABLE: dict[str, Any] = {"json_schema_extra": {"mutable": True}}  # Marks fields that may change when a run is resumed

RECORDED: dict[str, Any] = {"json_schema_extra": {"mutable": True, "recorded": True}}
"""Marks fields of the training itself that may change when a run is resumed: the change is recorded in the run's ledger."""

HOOK = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*$"
"""The pattern of a path to a custom function: ``package.module:function``, or slime's ``package.module.function``."""

LARGEST_SEED = 2**31 - 1  # The largest seed: random generators take 32 bits, and replicas and ranks add their number to it


def hook(purpose: str) -> Any:
    """Returns the field of a path to a custom function. ``purpose``: what the function does, as a relative clause."""
    return Field(default=None, pattern=HOOK, description=f"package.module:function, or with a dot before it, {purpose}")


FROM_TEXT = BeforeValidator(lambda given: json.loads(given) if isinstance(given, str) and given.startswith("{") else given)
NO_NANS = AfterValidator(lambda table: json.dumps(table, default=str, skipkeys=True, allow_nan=False) and table)
Table = Annotated[dict[str, Any], FROM_TEXT, NO_NANS]
"""A table of the user's own keys, or its JSON text, since TOML has no null; without NaN and infinities: services get the config as JSON,
where these are null."""


class Words(NamedTuple):
    """Marks a field, in the metadata of its type, whose flag takes all words up to the next flag.

    ``read``: takes the words, and returns the field's value as TOML would have it. Raises ValueError: what is expected. ``adds``: a list,
    to which the flag adds each time that it is given.
    """

    read: Callable[[list[str]], Any]
    adds: bool = False


class ContradictoryFields(ValueError):
    """Fields that contradict each other. ``problems``: each ``section.field: what is wrong``."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class Rule(NamedTuple):
    """A condition under which a section, or a whole config, is refused.

    Args:
        fields: the fields that it is about, of a config ``section.field``; each is refused by itself.
        broken: takes the section and the field's value, and returns whether the value is refused, or yields what is wrong with it; of
            values that are only noted the run's inspection in the section's place.
        expected: why, or what is expected; formatted with the section, the value and what ``broken`` yields: ``{0.other_field}``, ``{1}``.
    """

    fields: str | tuple[str, ...]
    broken: Callable[[Any, Any], Any]
    expected: str = "{2}"

    def problems(self, section: Any, known: Any = None) -> Iterator[tuple[str, Any, str]]:
        """Yields each field that is refused, its value, and why. ``known``: given to ``broken`` in the section's place."""
        for field in (self.fields,) if isinstance(self.fields, str) else self.fields:
            value = attrgetter(field)(section)
            found = self.broken(section if known is None else known, value)
            for wrong in found if isinstance(found, Iterator) else [found] if found else []:
                yield field, value, self.expected.format(section, value, wrong)


def read_where(there: Callable[[Any], Any], expected: str, *fields: str) -> tuple[Rule, ...]:
    """Returns the rules that refuse fields which are not at their defaults where nothing reads them.

    Args:
        there: of the section: whether they are read. expected: why they are not, formatted with the section.
    """

    def unread(name: str) -> Rule:
        return Rule(name, lambda section, given: given != type(section).model_fields[name].default and not there(section), expected)

    return tuple(map(unread, fields))


WITHOUT_RULES = {"rules": False}
"""The context in which sections are validated field by field alone: combinations of fields are not looked at."""


def _is_counted(given: Any, taken: Any) -> bool:
    """Returns whether a switch was taken for a number, in a list or a table too."""
    if isinstance(given, list) and isinstance(taken, list):
        return any(map(_is_counted, given, taken))
    if isinstance(given, dict) and isinstance(taken, dict):
        return any(_is_counted(given[key], taken[key]) for key in given.keys() & taken.keys())
    return isinstance(given, bool) and type(taken) in (int, float)


class ConfigTable(BaseModel):
    """A table of the config: unknown keys are refused with the nearest valid one, a switch for a number and no text for a path."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}; {nearest(str(key), list(cls.model_fields))}")
        return given

    @field_validator("*", mode="wrap")
    @classmethod
    def _counts_no_switch(cls, given: Any, check: Callable[[Any], Any]) -> Any:
        if _is_counted(given, taken := check(given)):
            raise ValueError("expected a number")
        if given == "" and isinstance(taken, Path):  # as of a variable that is not set
            raise ValueError("expected a path; that of the working directory is '.'")
        return taken


class Section(ConfigTable):
    """A section ``[name]`` of the config; its class is called after it: ``AlgorithmSection``."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keeps_its_rules(self, info: ValidationInfo) -> Self:
        self._complete()
        if info.context is WITHOUT_RULES:
            return self
        section, ends, _ = type(self).__name__.lower().partition("section")
        prefix = f"{section}." if ends else ""
        broken = [f"{prefix}{field}: {expected}" for rule in self.rules for field, _, expected in rule.problems(self)]
        if problems := [*broken, *self._misfits()]:
            raise ContradictoryFields(problems)
        return self

    def _complete(self) -> None:
        """Fills in the fields that follow from others and were not given."""

    def _misfits(self) -> Iterator[str]:
        """Yields further errors, each as ``section.field: what is wrong``."""
        yield from ()
