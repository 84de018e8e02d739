"""Verifiers: a response and its label in, a score out. Pure and synchronous; `services.reward.worker` runs them in a process apart."""

from collections.abc import Callable

from services.reward.verifiers.math import math, read

Verifier = Callable[[str, str], float]
"""(response text, label) → reward."""


def exact(response: str, label: str) -> float:
    """Returns 1.0 where the response is the label, white space at both ends aside; else 0.0."""
    return 1.0 if response.strip() == label.strip() else 0.0


VERIFIERS: dict[str, Verifier] = {"math": math, "exact": exact}
"""The verifiers, by ``rm_type``."""

READ_LABEL: dict[str, Callable[[str], str]] = {"math": read}
"""What a verifier reads in a label, by ``rm_type``; raises ValueError for a label that it can compare with nothing. The others take a label
as it is."""
