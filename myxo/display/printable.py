"""Text that others made, fit for a terminal: what a model wrote must not move the cursor or set the window's title."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 control characters but tab and newline, and those that turn the direction of writing."""


def printable(text: str) -> str:
    """The text with its control characters spelled out."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
