"""Many ordinary clients at once, while weights are pushed every moment, clients are gone and the gateway is killed −9."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import DefaultAsyncHttpxClient

from shared.process.embedded_servers import free_port
from shared.runtime.addresses import LOOPBACK
from shared.schema.messages import Sampling
from shared.sessions.session import SessionEnded, Turn, trajectories
from shared.sessions.session_store import LATE_SECONDS
from tests.integration.engine.conftest import Checkpoint, Checkpoints
from tests.integration.engine.hall import Hall, NewHall
from tests.integration.engine.load import load
from tests.integration.engine.reference import log_probs, log_probs_over_pushes
from tests.support.gateways import Played
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
TURNS = 3
RETRIES = 40
"""Of the SDK: each death of the gateway and each version that is awaited costs some."""


@dataclass
class Crowd:
    """Clients that are unmodified but for their patience.

    Attributes:
        live: the newest version that is served. refused: how often a version was asked for that was not. asked: by the id of an answer,
            the least version that it was asked of. over: nobody plays any more.
    """

    live: int = 0
    refused: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    over: bool = False

    async def play(self, played: Played, url: str, number: int) -> int:
        """Plays a session's turns, each by a version that is served (one client in three: that is not served yet). Returns their number."""
        messages: list[Any] = [{"role": "user", "content": f"start {number}"}]
        http = DefaultAsyncHttpxClient(event_hooks={"response": [self._note]})
        async with played.client(url, max_retries=RETRIES, timeout=240.0, http_client=http) as client:
            for turn in range(TURNS):
                least = self.live + (number % 3 == 0)
                answer = await client.chat.completions.create(model="0", messages=messages, extra_body={"min_version": least})
                self.asked[answer.id] = least
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": f"continue {turn}"}]
        return TURNS

    async def _note(self, response: httpx.Response) -> None:
        self.refused += response.status_code == 409


async def pushing(room: Hall, crowd: Crowd, checkpoint: Checkpoints, seconds: float) -> None:
    """Pushes two models in turn, one every so many seconds, until all is over: one that was broken off would leave the engine paused."""
    while not crowd.over:
        await asyncio.sleep(seconds)
        await room.pushed(checkpoint(1 + crowd.live % 2).model, crowd.live + 1)
        crowd.live += 1


def exact(turn: Turn, model: Callable[[int], Checkpoint], keeps_cache: bool) -> None:
    """Asserts that a turn's log-probs are those of the versions that drew it. ``keeps_cache``: it was drawn at one go, in place."""
    if keeps_cache:
        drawn = [(model(version).model, end) for _, end, version in turn.spans]
        np.testing.assert_allclose(turn.log_probs, log_probs_over_pushes(drawn, turn.prompt, turn.completion), atol=EXACT)
        return
    for start, end, version in turn.spans:
        prompt = np.concatenate([turn.prompt, turn.completion[:start]])
        np.testing.assert_allclose(
            turn.log_probs[start:end], log_probs(model(version).model, prompt, turn.completion[start:end]), atol=EXACT
        )


@pytest.mark.extra
@pytest.mark.parametrize(
    ("mode", "engine_name", "count", "kills", "pause_s"),
    [
        ("in_place", "engine", 10, 1, 0.5),
        *(
            pytest.param(mode, engine, 200, 5, 3.0, marks=pytest.mark.timeout(3600))
            for mode, engine in (("in_place", "engine"), ("abort", "engine"), ("retract", "plain_engine"))
        ),
        ("retract", "plain_engine", 10, 1, 0.5),
        pytest.param("retract", "plain_engine", 200, 0, 3.0, marks=pytest.mark.timeout(3600)),
    ],
)
async def test_many_sessions_over_pushes_and_deaths_of_the_gateway(
    hall: NewHall, checkpoint: Checkpoints, mode: str, count: int, kills: int, pause_s: float
) -> None:
    """Every token is by the versions that are told, none is trained twice, and nothing is left of anybody."""
    gateway = {"gateway_checkpoint_tokens": 24 if mode == "abort" else 2000}
    room = await hall(rollout={"max_staleness": 9999, "in_flight_on_push": mode}, gateway=gateway, address=f"{LOOPBACK}:{free_port()}")
    url, crowd = room.urls[0], Crowd()
    sampling = Sampling(temperature=1.0, max_new_tokens=100)
    sessions = [await room.session(sampling=sampling, deadline=time.time() + 3000) for _ in range(count)]
    pusher = asyncio.create_task(pushing(room, crowd, checkpoint, pause_s))
    playing = [asyncio.create_task(crowd.play(one, url, number)) for number, one in enumerate(sessions)]
    gone = playing[::10]

    async def some_turns(least: int) -> bool:
        assert not pusher.done(), pusher.exception()
        return sum([len((await one.log()).turns) for one in sessions]) >= least

    leavings = max(kills, 1)
    for leaving in range(leavings):
        await until(lambda leaving=leaving: some_turns((leaving + 1) * count * 2 // (leavings + 1)), "turns", 600, pause=0.5)
        for task in gone[leaving::leavings]:
            task.cancel()
        if kills:
            room.processes[-1].kill()
            await room.start()
    results = await asyncio.gather(*playing, return_exceptions=True)
    crowd.over = True
    await pusher
    failed = [one for one in results if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)]
    assert not failed, failed[:3]
    assert crowd.refused and crowd.live >= 2, "versions were asked for that nobody served yet, and came"

    crossed = 0
    for one, result in zip(sessions, results, strict=True):
        log = await one.log()
        if result == TURNS:
            assert len(log.turns) == TURNS and not log.pending, "each turn was drawn once, whoever answered it"
        for turn in log.turns.values():
            exact(turn, lambda version: checkpoint(1 + (version - 1) % 2 if version else 0), keeps_cache=mode == "in_place")
            assert turn.spans[0][2] >= crowd.asked.get(turn.request, 0)
            crossed += len(turn.spans) > 1
        trained = sum(int(found.mask.sum()) for found in trajectories(log.turns.values()))
        assert trained == sum(len(turn.completion) for turn in log.turns.values())
    assert crossed or count < 100, "pushes came in the middle of turns"
    print(f"{mode}: {crossed} turns over {crowd.live} pushes, {crowd.refused} refused by version, {kills} gateways killed")
    await nothing_is_left(room, sessions, wait=count >= 100)


async def nothing_is_left(room: Hall, sessions: Sequence[Played], wait: bool) -> None:
    """Asserts that store, gateway, replica and engine hold nothing of sessions that have ended; ``wait``: for their records to go."""
    replica, service = room.desk.replica, room.desk.service

    async def idle() -> bool:
        newest = f"gateway-{len(room.processes) - 1}"
        status = next(one for one in await room.registry.alive("gateway") if one.instance == newest)
        held = await load(room.desk.client)
        gauges = [status.gauges[name] for name in ("gateway_requests_in_hand", "gateway_generations")]
        return not any([*gauges, replica.proxy._requests, room.desk.client.generating, held.running, held.waiting])

    await until(idle, "a gateway, a replica and an engine without requests", 60, pause=0.5)
    size = descriptors_and_memory(room)
    for number in range(10):  # further ones take no more
        further = await room.session()
        await Crowd().play(further, room.urls[0], number)
        await room.sessions.end(further.session.id, SessionEnded(at=time.time()))
        await room.sessions.let_go(further.session.id)
    for one in sessions:
        await room.sessions.end(one.session.id, SessionEnded(at=time.time()))
        await room.sessions.let_go(one.session.id)
    await until(idle, "the same once more", 60, pause=0.5)
    grown = np.subtract(descriptors_and_memory(room), size)
    assert grown[0] <= 4 and grown[1] <= 32, f"the gateway has {grown[0]} more descriptors and {grown[1]} MiB more"

    async def kept() -> dict[str, int]:
        [names] = await service.store.commands("the sessions", [("KEYS", f"{service.run}:session:*")])
        others = [bytes(name) for name in names if b":session:." not in bytes(name)]  # those of no one session
        left = await service.store.commands("their time", [("TTL", name) for name in others]) if others else []
        return dict(zip([name.decode() for name in others], left, strict=True))

    left = await kept()
    lasting = {name: seconds for name, seconds in left.items() if not 0 <= seconds <= LATE_SECONDS}
    assert not lasting, lasting
    if wait:
        await until(lambda: kept_nothing(kept), "the end of the last record", LATE_SECONDS + 30, pause=1.0)


async def kept_nothing(kept: Callable[[], Any]) -> bool:
    return not await kept()


def descriptors_and_memory(room: Hall) -> tuple[int, int]:
    """The open descriptors of the newest gateway, and its resident memory in MiB."""
    process = Path("/proc") / str(room.processes[-1].process.pid)
    resident = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(list((process / "fd").iterdir())), int(resident.split()[1]) // 1024
