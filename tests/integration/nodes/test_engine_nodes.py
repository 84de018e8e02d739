"""An engine over two nodes, each a network namespace: real SGLang with a rank on each, led and followed by real rollout services.

The weights are those of a trainer in this process, Megatron's, and so are the log-probs that the engine's must be.
"""

import asyncio
import dataclasses
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from numpy.typing import NDArray

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from services.trainer.parallel import runtime
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.messages import Message, Sampling
from shared.schema.weight_messages import (
    WeightsCommit,
    WeightsLive,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
    WeightsServed,
)
from shared.transfer import digest
from tests.support.network_nodes import HeadNats, NodeNetwork
from tests.support.run_config import run_config, write_jsonl
from tests.support.tiny_model import PRINTABLE, character_tokenizer, write_tiny_model
from tests.support.waiting import until
from tests.support.weights_group import Tensors, WeightsGroup, known_of, manifest_of
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack

pytestmark = [pytest.mark.extra, pytest.mark.timeout(5400)]

SECONDS = 900.0
EXACT = 2e-5
NAME = "rollout-0"
NUMBERS = itertools.count(1)
SHARED_EXPERTS = "ep-size"


class TinyTrainer:
    """Megatron's policy, of one rank in this process, which trains for a step whenever it is told to."""

    def __init__(self, checkpoint: Path) -> None:
        self._actor, self._steps = rank_steps.actor(checkpoint), 0

    def step(self) -> Tensors:
        """Trains for a step. Returns the policy's tensors as the engine takes them, by the names of its files."""
        rank_steps.steps(self._actor, 1, first=self._steps)
        self._steps += 1
        return {name: tensor for name, tensor in rank_steps.exported(self._actor).items() if tensor is not None}

    def log_probs(self, prompt: NDArray[np.int32], drawn: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [T]: of the tokens that were drawn, int32 [T], after a prompt, int32 [P]."""
        (found,) = self._actor.log_probs([pack([torch.tensor([*prompt, *drawn])])])
        return found[len(prompt) - 1 : -1].numpy()


@dataclasses.dataclass
class Pushed:
    """What the engine serves: the digest of its tensors and their version."""

    version: int
    digest: str


class EngineNodes:
    """The services of one engine's nodes, and this process as the trainer that pushes to them."""

    def __init__(
        self, network: NodeNetwork, bus: Bus, config: RunConfig, directory: Path, servers: dict[str, str], name: str = NAME
    ) -> None:
        self.network, self._bus, self._config, self._directory, self._servers = network, bus, config, directory, servers
        self._subjects, self._name = Subjects(config.run.name), name
        self._scratch = Path(tempfile.mkdtemp(prefix="myxo-"))  # pytest's own is too long for sockets
        self.services: dict[int, subprocess.Popen[bytes]] = {}

    def another(self, name: str) -> "EngineNodes":
        """Another engine of the run, on the same nodes."""
        directory = self._directory / name
        directory.mkdir()
        return EngineNodes(self.network, self._bus, self._config, directory, self._servers, name)

    def start(self, node: int) -> None:
        """Starts a node's service, by the command that people type."""
        scratch = self._scratch / f"n{node}"
        scratch.mkdir(exist_ok=True)
        environment = {
            **self._servers,
            "MYXO_RUN": self._config.run.name,
            "MYXO_INSTANCE": self._name,
            "MYXO_NODE_RANK": str(node),
            "MYXO_LOG_DIR": str(self._directory),
            "TMPDIR": str(scratch),
            "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # the core of each rank; SGLang wants to be told where there is one NUMA node
        }
        self.services[node] = self.network.start(node, self.log(node), environment, "-m", "services.rollout")

    def log(self, node: int) -> Path:
        return self._directory / f"service-{node}.log"

    def said(self, node: int, event: str) -> list[dict[str, Any]]:
        lines = self.log(node).read_text(errors="replace").splitlines() if self.log(node).exists() else []
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == event]

    async def until(self, what: str, condition: Callable[[], Any]) -> Any:
        try:
            return await until(condition, what, SECONDS, 0.2)
        except AssertionError as error:
            logs = sorted(self._directory.glob("*.log"))
            words = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
            raise AssertionError(f"{error}\n{words}") from None

    async def until_ready(self, times: int) -> None:
        """Waits until the engine has become ready so many times, and is in the registry with both of its ranks."""

        def ready() -> bool:
            assert not any(service.poll() for service in self.services.values()), "a service has ended"
            return len(self.said(0, "engine_ready")) >= times

        await self.until(f"engine number {times}", ready)
        statuses = await Registry(self._bus, self._config.run.name).alive("rollout")
        assert [status.ranks for status in statuses if status.instance == self._name] == [2]

    async def ask(self, verb: str, message: Message, kind: type[Message]) -> Any:
        subject = self._subjects.replica_weights(self._name, verb)
        return await self._bus.request(subject, message, kind, deadline=SECONDS, awaited_from=self._name)

    async def push(self, tensors: Tensors, version: int) -> Pushed:
        """Pushes to both ranks over one channel, and has them compare what they hold with what was sent."""
        group = WeightsGroup(f"push-{next(NUMBERS)}", 3, self.network.head)
        manifest = manifest_of(tensors)
        known = digest.version_digest(known_of(manifest, tensors))
        await self.ask("prepare", WeightsPrepare(version=version, channels=[group.address], rank=1, deadline=SECONDS), WeightsReady)
        await asyncio.to_thread(group.join, SECONDS)
        for number, check in ((1, False), (2, True)):
            group.announce(number, manifest, SECONDS)
            order = WeightsReceive(version=version, push=number, channels=[group.name], check=check, deadline=SECONDS)
            sending = asyncio.create_task(asyncio.to_thread(group.push, manifest, tensors))
            received = await self.ask("receive", order, WeightsReceived)
            await sending
            assert received.digest == known and received.differences == {}
        await self.ask("commit", WeightsCommit(version=version, digest=known, deadline=SECONDS), WeightsServed)
        group.die()
        return Pushed(version, known)

    async def announce(self, pushed: Pushed) -> None:
        """Says in the run's bucket what is live, as the trainer does after a push."""
        served_by = {"replicas": [self._name], "seconds": 1.0, "bytes": 0}
        live = WeightsLive(version=pushed.version, digest=pushed.digest, at=time.time(), **served_by)
        await self._bus.put(self._subjects.weights_bucket, "live", live.encode())

    async def draws(self, trainer: TinyTrainer, version: int, samples: int = 1) -> None:
        """Asserts that the engine draws by the trainer's policy: its log-probs are the trainer's."""
        (directory,) = (self._scratch / "n0").glob("myxo-engine-*")
        prompt = np.arange(5, 20, dtype=np.int32)
        async with await EngineClient.connect(directory) as client:
            sampling = Sampling(temperature=1.0, max_new_tokens=24)
            requests = [GenerationRequest(prompt, 24, ignore_eos=True) for _ in range(samples)]
            group = await client.generate_group(requests, sampling)
        for drawn in group:
            assert {span.version for span in drawn.spans} == {version}
            assert np.abs(trainer.log_probs(prompt, drawn.tokens) - drawn.log_probs).max() < EXACT

    def engine_pids(self, node: int) -> list[int]:
        """Returns the processes in a node's namespace, its service left out."""
        listed = subprocess.run(["ip", "netns", "pids", self.network.names[node]], capture_output=True, text=True, check=True)
        return [pid for pid in map(int, listed.stdout.split()) if pid != self.services[node].pid]

    def heard(self, node: int) -> set[str]:
        """Returns the addresses at which anything on a node listens, loopback left out."""
        lines = Path(f"/proc/{self.services[node].pid}/net/tcp").read_text().splitlines()[1:]
        listening = [line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"]
        return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in listening} - {"127.0.0.1"}

    def stop(self) -> None:
        for service in self.services.values():
            service.kill()
            service.wait(30)
        shutil.rmtree(self._scratch, ignore_errors=True)


@pytest.fixture
def flags() -> dict[str, Any]:
    """SGLang's own, beside the number of nodes."""
    return {}


@pytest.fixture
async def nodes(
    network: NodeNetwork, valkey: EmbeddedValkey, tmp_path: Path, run_name: str, flags: dict[str, Any]
) -> AsyncIterator[EngineNodes]:
    nats = HeadNats(tmp_path / "nats", network.head)
    nats.start()
    write_jsonl(tmp_path / "prompts.jsonl")
    if SHARED_EXPERTS in flags:
        make_checkpoint("qwen3_moe", tmp_path / "model")
        character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path / "model")
    else:
        write_tiny_model(tmp_path / "model", seed=0)
    config = run_config(
        tmp_path,
        run={"name": run_name},
        model={"hf_checkpoint": str(tmp_path / "model")},
        rollout={
            "rollout_num_gpus_per_engine": 2,
            "rollout_device": "cpu",
            "engine_start_timeout": SECONDS,
            "sglang": {"nnodes": 2, **flags},
        },
        bus={"lease_duration": 5.0},
    )
    bus = await Bus.connect(nats.url, "trainer")
    await runs.create(bus, config, valkey.url)
    made = EngineNodes(network, bus, config, tmp_path, {"NATS_URL": nats.url, "REDIS_URL": valkey.url})
    yield made
    made.stop()
    await bus.close()
    nats.stop()


@pytest.fixture
def trainer(nodes: EngineNodes, tmp_path: Path) -> Iterator[TinyTrainer]:
    yield TinyTrainer(tmp_path / "model")
    runtime.stop()


async def test_pushes_reach_both_nodes_and_a_killed_follower_is_replaced(nodes: EngineNodes, trainer: TinyTrainer) -> None:
    """What both ranks compute together is what the trainer computes, before a loss and after it, and what a second engine on the two nodes
    computes, whose ranks had their weights from those of the first."""
    for node in range(2):
        nodes.start(node)
    await nodes.until_ready(1)
    await nodes.push(trainer.step(), 1)
    await nodes.draws(trainer, 1)
    for node in range(2):  # nobody else reaches the ranks: they listen at the private address and at loopback
        assert nodes.heard(node) == {nodes.network.addresses[node]}

    nodes.services[1].send_signal(signal.SIGKILL)
    nodes.services[1].wait(30)
    await nodes.until("the follower's name", lambda: [told for told in nodes.said(0, "node_lost") if "node 1 (" in told["detail"]])
    (fenced,) = await nodes.until("the fence", lambda: nodes.said(0, "fenced"))
    assert re.search(r"the engine died: .*(node 1|by peer|remote worker)", fenced["reason"]), fenced
    nodes.start(1)
    await nodes.until_ready(2)
    live = await nodes.push(trainer.step(), 2)
    await nodes.draws(trainer, 2)

    await nodes.announce(live)
    second = nodes.another("rollout-1")
    try:
        for node in range(2):
            second.start(node)
        await second.until_ready(1)
        (caught_up,) = await second.until("the weights of a peer", lambda: second.said(0, "caught_up"))
        assert (caught_up["source"], caught_up["replica"], caught_up["version"]) == ("peer", NAME, 2)
        await second.draws(trainer, 2)
        assert second.said(0, "peer_failed") == []
    finally:
        second.stop()

    nodes.services[0].send_signal(signal.SIGTERM)  # the leader leaves in order: nothing of the engine stays on either node
    assert await asyncio.to_thread(nodes.services[0].wait, SECONDS) == 0
    await nodes.until("the end of the follower's part", lambda: not nodes.engine_pids(1))
    assert nodes.services[1].poll() is None, "a follower waits for the next leader"


@pytest.mark.parametrize("flags", [{"enable-dp-attention": True, "dp-size": 2}])
async def test_ranks_that_share_no_attention_take_pushes_and_draw_by_them(nodes: EngineNodes, trainer: TinyTrainer) -> None:
    """Each rank has sequences of its own, which come to it over sockets between the nodes; a stranger's message there is not read."""
    await pushed(nodes, trainer, lambda: strange_messages(nodes, 0))


@pytest.mark.parametrize("flags", [{SHARED_EXPERTS: 2}, {"pp-size": 2}])
async def test_ranks_with_half_of_experts_or_layers_each_take_pushes_and_draw_by_them(nodes: EngineNodes, trainer: TinyTrainer) -> None:
    await pushed(nodes, trainer, lambda: None)


async def pushed(nodes: EngineNodes, trainer: TinyTrainer, meanwhile: Callable[[], None]) -> None:
    """Pushes to an engine on two nodes, and asserts that it draws as the trainer's one process does."""
    for node in range(2):
        nodes.start(node)
    await nodes.until_ready(1)
    await nodes.push(trainer.step(), 1)
    for node in range(2):
        assert nodes.heard(node) == {nodes.network.addresses[node]}
    meanwhile()
    for _ in range(2):  # one sequence for each rank at least
        await nodes.draws(trainer, 1, samples=4)
    assert nodes.said(0, "fenced") == []


def strange_messages(nodes: EngineNodes, node: int) -> None:
    """Sends a message that is no pickle to every port of a node's from outside of it."""
    lines = Path(f"/proc/{nodes.services[node].pid}/net/tcp").read_text().splitlines()[1:]
    own = "".join(f"{int(part):02X}" for part in reversed(nodes.network.addresses[node].split(".")))
    ports = {int(line.split()[1].split(":")[1], 16) for line in lines if line.split()[3] == "0A" and line.split()[1].startswith(own)}
    with zmq.Context() as context:
        for port in ports:
            socket = context.socket(zmq.PUSH)
            socket.connect(f"tcp://{nodes.network.addresses[node]}:{port}")
            socket.send(b"no pickle")
            socket.close(linger=500)
    assert len(ports) > 2
