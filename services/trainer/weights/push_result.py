"""What is told of a push that has ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    Args:
        replicas: that serve the version now. seconds: from the offer to the last commit. wire_seconds: from the first bucket's export until
            the last replica had loaded and checked everything. engine_seconds: of the slowest engine, from its first wait for a bucket to
            the last one's loading and checking. stall: that the trainer waited for it; the rest ran beside the training.
            bytes: sent, by all stages together. digest: of the version.
    """

    version: int
    replicas: list[str]
    seconds: float
    wire_seconds: float
    engine_seconds: float
    stall: float
    bytes: int
    digest: str

    @property
    def gb_per_s(self) -> float:
        return self.bytes / max(self.wire_seconds, 1e-9) / 1e9
