"""What the first node's agent writes of an attempt while NATS is away."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.bus.subjects import Subjects
from shared.nodes.node_agent import NodeAgent
from shared.nodes.node_decisions import OwnRanks
from shared.runtime.errors import DeadlineExceeded
from shared.schema.service_messages import Attempt, Over
from shared.service.service_base import Service
from tests.support.run_config import run_config


class Away:
    """A bus that cannot be reached until it is ``back``."""

    def __init__(self) -> None:
        self.back, self.kept = False, b""

    async def get(self, *_: object) -> bytes:
        return self.kept

    async def put(self, bucket: str, key: str, value: bytes, deadline: float) -> None:
        if not self.back:
            raise DeadlineExceeded(key, bucket, deadline, "it ends")
        self.kept = value


@pytest.mark.parametrize("over", ["", "lost", "done"])
async def test_an_attempt_is_written_as_soon_as_the_bus_is_back(tmp_path: Path, over: Over, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last one fails its agent, which would leave without it."""
    bus, config = Away(), run_config(tmp_path)
    service = SimpleNamespace(bus=bus, run="r", config=config, subjects=Subjects("r"), stopping=asyncio.Event())
    agent: Any = NodeAgent(cast("Service", service), "trainer", 0, 1, 60.0, cast("Any", SimpleNamespace(own=OwnRanks(), look=OwnRanks)))
    monkeypatch.setattr(agent._lease, "held", lambda: asyncio.sleep(0))
    bus.kept = Attempt(number=1, address="a", port=1, terms=["t"], at=time.time()).encode()
    announced = Attempt(number=2 if not over else 1, address="a", port=1, terms=["t"], over=over, at=time.time())
    if over == "done":
        with pytest.raises(DeadlineExceeded):
            await agent._announce(announced)
        return
    await agent._announce(announced)
    assert (await agent._look()).attempt.number == announced.number
    bus.back = True
    await agent._look()
    written = Attempt.decode(bus.kept)
    assert (written.number, written.over) == (announced.number, over)
