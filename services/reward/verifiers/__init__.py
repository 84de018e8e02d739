"""Verifiers: a response and its label in, a score out. Pure and synchronous; `services.reward.worker` runs them in a process apart."""

from collections.abc import Callable

from services.reward.verifiers.exact import exact
from services.reward.verifiers.math import math

Verifier = Callable[[str, str], float]
"""(response text, label) → reward."""

VERIFIERS: dict[str, Verifier] = {"math": math, "exact": exact}
"""The verifiers, by ``rm_type``."""
