"""Named rewards as metrics: names are the user's, so they are made legal everywhere and bounded in number."""

from __future__ import annotations

import re
from collections.abc import Mapping

import structlog

from shared.schema.messages import RewardPart

MOST_NAMES = 64
"""Names that are written in a trainer's life: each makes four time series that nothing takes away again."""

_ILLEGAL = re.compile(r"[^-/\w.]")  # TensorBoard's own rule; W&B and Prometheus then have the same names


class RewardParts:
    """The names that are written, which are the first `MOST_NAMES` that come."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._told = False

    def metrics(self, parts: Mapping[str, RewardPart]) -> dict[str, float]:
        """``rewards/<part>/mean`` and ``std``, ``min``, ``max`` beside it."""
        found: dict[str, float] = {}
        for given, part in parts.items():
            name = _ILLEGAL.sub("_", given)
            if name not in self._names and len(self._names) >= MOST_NAMES:
                self._tell(name)
                continue
            self._names.add(name)
            values = {"mean": part.mean, "std": part.std, "min": part.min, "max": part.max}
            found.update({f"rewards/{name}/{what}": value for what, value in values.items()})
        return found

    def _tell(self, name: str) -> None:
        if not self._told:
            self._told = True
            structlog.get_logger().warning("reward_parts_left_out", first=name, most=MOST_NAMES)
