"""Measures the engine's generation rate over a sliding window, from its own count of drawn tokens.

A count of finished groups would jump when several end together; the engine counts each token as it is drawn.
"""

from collections import deque

import numpy as np

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_errors import EngineError
from shared.runtime.errors import DeadlineExceeded

WINDOW_SECONDS = 5.0

READ_SECONDS = 5.0
"""The deadline for reading an engine's count. While it does not answer, no new tokens are known, and the rate falls."""


class TokenRate:
    """Measures tokens a second over the last `WINDOW_SECONDS`.

    A reading divides the tokens of the window by the whole window, also at the start, so that the rate's integral over a run is the run's
    tokens; it is 0 once a window has had no tokens. Between two readings tokens count as evenly drawn.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def note(self, now: float, tokens: float) -> float:
        """Returns the rate at ``now`` (monotonic seconds), when ``tokens`` have been drawn in all."""
        self._readings.append((now, tokens))
        begin = now - WINDOW_SECONDS
        while len(self._readings) > 1 and self._readings[1][0] <= begin:
            self._readings.popleft()
        times, counts = zip(*self._readings, strict=True)
        return (tokens - float(np.interp(begin, times, counts))) / WINDOW_SECONDS


class DrawnTokens:
    """Counts the tokens that the replica's engines have drawn, one engine after another.

    Attributes:
        total: tokens in all, of finished, aborted and unfinished samples alike, without prompts.
    """

    def __init__(self) -> None:
        self.total = 0
        self._engine: EngineClient | None = None
        self._last = self._delivered = 0

    async def read(self, client: EngineClient | None, delivered: int) -> int:
        """Returns ``total``, brought up to date.

        Args:
            client: of the present engine, None while there is none. delivered: tokens of the groups that have ended; they are counted where
                an engine does not count by itself (`[rollout.sglang] enable_metrics = false`, or an old SGLang).
        """
        ended, self._delivered = delivered - self._delivered, delivered
        if client is None:
            return self.total
        try:
            drawn = await client.drawn_tokens(deadline=READ_SECONDS)
        except (DeadlineExceeded, EngineError):  # `Replica.keep_engine` deals with an engine that is gone
            return self.total
        if drawn is None:
            self.total += ended
            return self.total
        if client is self._engine:  # tokens that a new engine has drawn before were its own warm-up
            self.total += max(0, drawn - self._last)
        self._engine, self._last = client, drawn
        return self.total
