"""How many tokens an engine has drawn, by its own count: each as it is drawn, not when its group ends."""

from __future__ import annotations

from http import HTTPStatus

from services.rollout.engine.capabilities import NOT_CHANGED
from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.generation import Generation
from services.rollout.engine.transport import EngineTransport

DRAWN, BEGUN = "sglang:realtime_tokens_total", "sglang:queue_time_seconds_count"
"""Metrics of an engine: tokens by the kind of step that processed them, and requests whose prefill began."""


class DrawnCount:
    """The count of one engine.

    Args:
        overlaps: the engine overlaps its steps.
    """

    def __init__(self, transport: EngineTransport, overlaps: bool) -> None:
        self._transport, self._overlaps = transport, overlaps
        self._retracted = 0

    def noted(self, generations: list[Generation]) -> list[Generation]:
        """Takes what this client's requests came to, and hands it on. A sample that was put back draws its next token in a prefill again,
        which the engine does not count."""
        self._retracted += sum(generation.retractions for generation in generations)
        return generations

    async def read(self, *, deadline: float) -> int | None:
        """Tokens since the engine started, for everybody. None: the engine does not count them. Raises DeadlineExceeded, EngineError."""
        try:
            text = await self._transport.get("/metrics", deadline, NOT_CHANGED)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:  # launched without --enable-metrics
                return None
            raise
        drawn = parse_drawn(str(text), self._overlaps)
        return None if drawn is None else drawn + self._retracted


def parse_drawn(text: str, overlaps: bool) -> int | None:
    """Tokens that an engine has drawn, from its Prometheus page; None where the page does not tell.

    SGLang counts what its decode steps draw, step by step. The first token of a sample is drawn by its prefill, and is not among them; it
    is taken from the number of samples whose prefill began. An engine that overlaps its steps computes, and counts, one token beyond each
    sample's end in exchange.
    """
    if DRAWN not in text:
        return None
    drawn = _sum_of(text, DRAWN, 'mode="decode"')
    return int(drawn if overlaps else drawn + _sum_of(text, BEGUN, ""))


def _sum_of(text: str, name: str, label: str) -> float:
    """The sum of a metric's lines that carry the label."""
    lines = (line for line in text.splitlines() if line.startswith(name + "{") and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)
