"""What a response is compared with: the label and the metadata of its prompt."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reference:
    """The label and the metadata of a prompt.

    label: as text, None where there is none. is_json: the label is the JSON text of a number, a list or an object, and no text itself.
    """

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
