"""A trainer over two nodes, each a network namespace, with real servers and buffer, and somebody to play the other services."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.ledger import BatchTrained
from shared.store.payload_store import Store
from tests.integration.buffer.player import Player
from tests.support.network_nodes import HeadNats, NodeNetwork, node_network
from tests.support.run_config import run_config, write_jsonl
from tests.support.waiting import until

TRAINER = {"train_dtype": "float32", "train_device": "cpu", "save_final_hf": False, "save_interval": 1, "actor_num_nodes": 2}
RUN_SECONDS = 900.0


class Cluster:
    """A run whose trainer has several nodes."""

    def __init__(self, network: NodeNetwork, player: Player, logs: Path) -> None:
        self.network, self.player, self._logs = network, player, logs
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.words_of_agent: tuple[str, ...] = ("-m", "services.trainer")

    def start(self, node: int, **environment: str) -> None:
        """Starts a node's agent, by the command that people type."""
        given = {**self.player.environment(f"trainer-{node}"), "MYXO_NODE_RANK": str(node), **environment}
        words = self.words_of_agent if self.words_of_agent[0] == "-m" else (*self.words_of_agent, str(node))
        self.agents[node] = self.network.start(node, self.log(node), given, *words)

    def log(self, node: int) -> Path:
        return self._logs / f"node-{node}.log"

    def said(self, node: int, event: str) -> list[dict[str, Any]]:
        """Returns what a node has logged of a kind, in all of its lives."""
        lines = self.log(node).read_text(errors="replace").splitlines() if self.log(node).exists() else []
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == event]

    def kill(self, node: int) -> None:
        """kill -9 of the agent; its ranks go with it."""
        self.agents[node].kill()
        self.agents[node].wait(30)

    def words(self) -> str:
        return "\n".join(f"--- node {node}\n{self.log(node).read_text(errors='replace')[-3000:]}" for node in self.agents)

    async def until(self, what: str, condition: Callable[[], Any], deadline: float = RUN_SECONDS) -> Any:
        try:
            return await until(condition, what, deadline, 0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from None

    async def until_trained(self, steps: int) -> None:
        async def enough() -> bool:
            assert not any(agent.poll() for agent in self.agents.values()), self.words()
            last = await runs.last_record(self.player.bus, self.player.config.run.name, BatchTrained)
            return last is not None and last.step + 1 >= steps

        await self.until(f"{steps} trained steps", enough)

    async def until_ended(self) -> None:
        """Waits until all agents have ended well."""
        await self.until("the agents' end", lambda: all(agent.poll() is not None for agent in self.agents.values()))
        assert [agent.returncode for agent in self.agents.values()] == [0] * len(self.agents), self.words()

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """A step's groups are generated and scored each second, as far as they are asked for."""

        async def work() -> None:
            while True:
                await self.player.work(2)
                await asyncio.sleep(1)

        task = asyncio.create_task(work())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    with node_network(2) as made:
        yield made


@pytest.fixture
async def cluster(
    network: NodeNetwork, valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path, run_name: str
) -> AsyncIterator[Callable[..., Any]]:
    """``await cluster(steps, **trainer)``: the run with its buffer; the nodes are started by the test."""
    nats = HeadNats(tmp_path / "nats", network.head)
    nats.start()
    made: list[tuple[Cluster, Any, Bus, Store]] = []

    async def make(steps: int, **trainer: Any) -> Cluster:
        write_jsonl(tmp_path / "prompts.jsonl")
        config = run_config(
            tmp_path,
            run={"name": run_name},
            model={"hf_checkpoint": str(tiny_model)},
            reward={"rm_type": "exact"},
            rollout={"num_rollout": steps, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_staleness": steps},
            trainer={**TRAINER, **trainer},
        )
        bus, store = await Bus.connect(nats.url, "player"), Store(valkey.url, run_name)
        await runs.create(bus, config, valkey.url)
        player = Player(bus, store, config, nats.url, tmp_path)
        buffer = player.launch()
        made.append((Cluster(network, player, tmp_path), buffer, bus, store))
        await player.ready(buffer)
        await player.live(0)
        return made[-1][0]

    yield make
    for running, buffer, bus, store in made:
        for agent in running.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait(30)
        buffer.__exit__()
        await store.close()
        await bus.close()
    nats.stop()
