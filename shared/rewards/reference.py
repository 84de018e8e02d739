"""The reference that a response is compared with: the label and the metadata of its prompt."""

import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from shared.rewards.names import REASONING_GYM, RUNS_CODE, VERIFIERS, base, needs_label
from shared.rewards.text_rewards import ANSWERS, instructions, task_problem
from shared.rewards.unit_test_cases import cases_of


@dataclass(frozen=True)
class Reference:
    """The label and the metadata of a prompt. label: as text, None where there is none. is_json: the label is the JSON text of a number, a
    list or an object, and no text itself."""

    label: str | None
    is_json: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Returns the label as text. Raises ValueError where there is none."""
        if self.label is None:
            raise ValueError("needs a label and the prompt has none")
        return self.label

    @property
    def value(self) -> Any:
        """Returns the label as the prompt file has it: a number, a list or an object where it is no text."""
        return json.loads(self.label) if self.is_json and self.label is not None else self.label


def label_problem(environment: str, reference: Reference, *, taught: bool = False) -> str | None:
    """Returns what is wrong with a prompt's label, given what scores its responses; None where nothing is. ``taught``: a teacher is learned
    from besides rewards. Then a prompt may have no label, and every response earns 0, as with slime."""
    if environment not in VERIFIERS or (taught and reference.label is None and needs_label(environment)):
        return None
    if (problem := _metadata_problem(environment, reference)) is not None:
        return problem
    if reference.label is None:
        return f"expected the answer that {environment} compares with: text or a number, found None" if needs_label(environment) else None
    if base(environment) in RUNS_CODE:
        try:
            cases_of(reference.value)
        except ValueError as error:
            return str(error)
        return None
    if isinstance(reference.value, str | int | float) and not isinstance(reference.value, bool):
        return None
    return f"expected text or a number for {environment} to compare with, found {reference.label[:80]}; custom_rm_path takes other values"


def _metadata_problem(environment: str, reference: Reference) -> str | None:
    if base(environment) == "ifbench" and not instructions(reference.metadata):
        return f"expected the ids of instructions in metadata.instruction_id_list, which {environment} checks, found none"
    if base(environment) == REASONING_GYM and (problem := task_problem(reference.metadata)) is not None:
        return problem
    if base(environment) == "gpqa" and reference.label is None and not any(map(reference.metadata.get, ANSWERS)):
        return f"expected the right letter, number or text for {environment}, or one of {', '.join(ANSWERS)} in the metadata, found none"
    return None


def label_text(value: Any) -> tuple[str | None, bool]:
    """Returns a label of a prompt file as text, and whether that is JSON. A number keeps the text that it has in the file
    (`shared.data.rows.JsonNumber`); one that has none is written in decimal digits, for no one answers ``1e-05``. Raises ValueError for NaN
    and infinities, TypeError for what is no JSON."""
    if value is None or isinstance(value, str):
        return value, False
    if not isinstance(value, float):
        return json.dumps(value, ensure_ascii=False, allow_nan=False), True
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number in JSON")
    return getattr(value, "text", None) or f"{Decimal(repr(value)):f}", True
