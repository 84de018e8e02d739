"""Text and values of runs, whatever they hold, as JSON can carry them."""

import json
from typing import Any

import numpy as np


def safe(text: str) -> str:
    """Returns a text that can be encoded: half a surrogate pair becomes a question mark."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_text(value: Any) -> str:
    """Returns a value as text: itself, or its JSON."""
    if isinstance(value, str):
        return safe(value)
    try:
        return safe(json.dumps(value, ensure_ascii=False, default=_plain))
    except (ValueError, RecursionError, TypeError):
        return safe(str(value))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
