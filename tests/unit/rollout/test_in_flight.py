"""Two attempts at one group in one replica: the first, whose lease ran out, and its successor."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.rollout.in_flight import InFlight, Requests
from tests.support.run_config import run_config


class Aborted(list[str]):
    """Of an engine's client: what it was asked to abort."""

    async def abort(self, rids: Sequence[str]) -> None:
        self.extend(rids)


async def test_either_may_end_first_and_both_are_stopped(tmp_path: Path) -> None:
    in_flight = InFlight(run_config(tmp_path, rollout={"max_staleness": 0, "staleness_policy": "drop"}))
    client: Any = Aborted()
    attempts = [ExitStack(), ExitStack()]
    for name, attempt in zip("ab", attempts, strict=True):
        attempt.enter_context(in_flight.tracked("g00000001", Requests({name}), 0, 0))
    await in_flight.stop_stale(client, 1)
    assert sorted(client) == ["a", "b"]
    attempts[0].close()
    client.clear()
    await in_flight.stop_stale(client, 1)
    assert client == ["b"]
    attempts[1].close()
    client.clear()
    await in_flight.stop_stale(client, 1)
    assert not client
