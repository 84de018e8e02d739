"""When an engine that does not answer counts as hung."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine import engine_client
from shared.runtime.errors import MyxoError


class Probed:
    """An engine whose probes begin 40 s apart and fail after 30 s, but for the numbers in ``answered``; it is paused at those in
    ``paused``."""

    def __init__(self, answered: set[int], paused: set[int]) -> None:
        self.now, self.asked, self._answered, self._paused = 0.0, 0, answered, paused

    def can_be_asked(self) -> bool:
        return self.asked not in self._paused

    async def probe(self, deadline: float) -> None:
        self.now += 30.0
        if self.asked not in self._answered:
            raise MyxoError("no answer")

    async def sleep(self, seconds: float) -> None:
        self.now, self.asked = self.now + seconds, self.asked + 1


@pytest.mark.parametrize(
    ("answered", "paused", "probes"), [(set(), set(), 2), ({2}, set(), 4), (set(), {2}, 4)], ids=["silent", "answers once", "is paused"]
)
async def test_silence_counts_from_the_first_probe_that_failed_in_a_row(
    answered: set[int], paused: set[int], probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Probed(answered, paused)
    monkeypatch.setattr(engine_client, "asyncio", SimpleNamespace(sleep=engine.sleep))
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: engine.now))
    hung = await engine_client.until_hung(engine, engine.can_be_asked, 60.0)
    assert hung == "it has answered no probe for 70 s, though its processes are there: no answer"
    assert engine.asked == probes
