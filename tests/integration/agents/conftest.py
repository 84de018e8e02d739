"""A replica that serves, without an engine: what is drawn for agents is drawn elsewhere."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from services.rollout.agent_groups import AgentGroups
from services.rollout.engine.engine_client import EngineClient
from services.rollout.in_flight import InFlight, Stopped
from services.rollout.played_group import PlayedGroup
from services.rollout.replica import Replica
from services.rollout.request_slots import RequestSlots
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import TRAIN
from shared.data.tokenizer import Tokenizer
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Sample
from shared.service.service_base import Service
from shared.sessions.session_store import LATE_SECONDS
from tests.support import agents
from tests.support.run_config import run_config


class StoreAsGateway:
    """The agents of `tests.support.agents` find their session in the store itself."""

    def __init__(self, url: str, run: str) -> None:
        self._address = f"{url}#{run}"

    async def base_url(self) -> str:
        return self._address


@dataclass
class AgentBench:
    groups: AgentGroups
    replica: Replica
    in_flight: InFlight
    slots: RequestSlots
    directory: Path
    service: Service
    played: PlayedGroup | None = None

    async def play(self, n: int = 2, **changes: Any) -> tuple[list[Sample], Stopped | None]:
        self.played = played = await self.group(self.task(n, **changes), [])
        return played.samples, played.stopped

    async def group(self, task: Task, earlier: list[Sample]) -> PlayedGroup:
        surplus = self.service.config.rollout.surplus_rollouts
        return await self.groups.group(task, earlier, self.in_flight, self.slots.take(TRAIN, task.n + surplus))

    def task(self, n: int = 2, **changes: Any) -> Task:
        asked = {"prompt": "40+2=", "prompt_tokens": np.array(agents.ASKED, np.int32), "environment": "math", "label": "42"}
        sampling = Sampling(temperature=1.0, max_new_tokens=20)
        return Task(**{"group": "g00000007", "n": n, **asked, "sampling": sampling, "min_version": 0, **changes})

    def serve(self, version: int) -> None:
        self.replica.served.serve(version, "")
        self.replica.show()

    def at_play(self) -> int:
        """The rollouts whose agents were called and that have not ended: the rest of those called have their samples."""
        return len(self.in_flight._oldest)

    def calls(self) -> list[dict[str, Any]]:
        return agents.calls(self.directory)

    async def left_open(self) -> list[str]:
        """The sessions in the store that have not ended, or whose record stays for long."""
        client, names = self.service.store._client, self.service.subjects
        keys = [key.decode() async for key in client.scan_iter(names.session_keys)]
        assert keys, "sessions are there for a while after their end"
        ids = {key: key.removeprefix(names.session_key("")) for key in keys}
        keys = [key for key in keys if not ids[key].startswith(".")]  # lists of those that were opened, for the console
        open_ones = [key for key in keys if (await self.groups.sessions.read(ids[key])).ended is None]
        return open_ones + [key for key in keys if await client.ttl(key) > LATE_SECONDS]


NewAgentBench = Callable[..., Awaitable[AgentBench]]


@pytest.fixture
async def bench(
    nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NewAgentBench]:
    """``bench("function")``: with that agent of `tests.support.agents`; without one, with what ``sections`` name."""
    monkeypatch.setenv(agents.DIRECTORY, str(tmp_path))
    bus = await Bus.connect(nats.url, "test")
    made: list[AgentBench] = []

    async def make(function: str = "", **sections: dict[str, Any]) -> AgentBench:
        rollout = {"agent_workers": 1} | ({"agent": f"tests.support.agents:{function}"} if function else {})
        sections["rollout"] = rollout | sections.get("rollout", {})
        sections.setdefault("reward", {}).setdefault("worker_environment", [agents.DIRECTORY])
        config = run_config(tmp_path, run={"name": run_name}, model={"hf_checkpoint": str(tiny_model)}, **sections)
        await runs.create(bus, config, valkey.url)
        service = Service("rollout", "rollout-1", run_name, bus, config, valkey.url)
        replica = Replica(service)
        replica.client = cast(EngineClient, object())  # nobody asks it
        replica.served.engine_started()
        replica.served.serve(0, "")
        replica.show()
        groups = AgentGroups(service, replica, Tokenizer(tiny_model), StoreAsGateway(valkey.url, run_name))
        made.append(AgentBench(groups, replica, InFlight(config), RequestSlots.of(config), tmp_path, service))
        await groups.start()
        return made[-1]

    yield make
    for one in made:
        await one.groups.close()
        await one.service.store.close()
    await bus.close()
