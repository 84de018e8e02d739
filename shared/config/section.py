"""The base of the sections of a run's config: fields, and rules about combinations of them."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MUTABLE: dict[str, Any] = {"json_schema_extra": {"mutable": True}}
"""Marks fields that may change when a run is resumed."""

HOOK = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*$"
"""The pattern of a path to a custom function: ``package.module:function``, or slime's ``package.module.function``."""

LARGEST_SEED = 2**31 - 1
"""The largest seed: random generators take 32 bits, and replicas and ranks add their number to it."""


def hook(purpose: str) -> Any:
    """Returns the field of a path to a custom function. ``purpose``: what the function does, as a relative clause."""
    return Field(default=None, pattern=HOOK, description=f"package.module:function, or with a dot before it, {purpose}")


class Words(NamedTuple):
    """Marks a field, in the metadata of its type, whose flag takes all words up to the next flag.

    ``read``: takes the words, and returns the field's value as TOML would have it. Raises ValueError: what is expected.
    """

    read: Callable[[list[str]], Any]


class Misfits(ValueError):
    """Fields that contradict each other. ``problems``: each ``section.field: what is wrong``."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class Rule(NamedTuple):
    """A condition on a section under which it is refused.

    Args:
        fields: the fields that it is about; each is refused by itself. broken: takes the section and the field's value.
        expected: why the value is refused, or what is expected; formatted with the section and the value: ``{0.other_field}``, ``{1}``.
    """

    fields: str | tuple[str, ...]
    broken: Callable[[Any, Any], Any]
    expected: str


class Section(BaseModel):
    """A section ``[name]`` of the config; its class is called after it: ``AlgorithmSection``."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        self._complete()
        if problems := [*self._broken_rules(), *self._misfits()]:
            raise Misfits(problems)
        return self

    def _complete(self) -> None:
        """Fills in the fields that follow from others and were not given."""

    def _broken_rules(self) -> Iterator[str]:
        section = type(self).__name__.removesuffix("Section").lower()
        for rule in self.rules:
            for field in (rule.fields,) if isinstance(rule.fields, str) else rule.fields:
                value = getattr(self, field)
                if rule.broken(self, value):
                    yield f"{section}.{field}: {rule.expected.format(self, value)}"

    def _misfits(self) -> Iterator[str]:
        """Yields further errors, each as ``section.field: what is wrong``."""
        yield from ()
