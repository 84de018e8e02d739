"""What a model wrote to call a tool, and what it is answered."""

import json
from typing import Any


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, JSON of an object. Raises ValueError, in words for the model."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the arguments must be a JSON object")
    return given


def shortened(text: str, most: int) -> str:
    """Returns a text; of one of more than ``most`` characters the beginning and the end, and how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
