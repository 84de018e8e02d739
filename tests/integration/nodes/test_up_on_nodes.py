"""Whole runs on two nodes: by `myxo up` on each of them, and with engines that share their machines with the trainer."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.weight_messages import WeightsPrepare, WeightsPushed
from tests.e2e.conftest import write_small_run
from tests.integration.nodes.whole_run import summary_of_run
from tests.support.network_nodes import HeadNats, NodeNetwork
from tests.support.waiting import until

RUN_SECONDS = 900.0
STEPS = 2
NODES = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1")
CRITIC = ("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--critic-num-nodes", "2", "--critic-num-gpus-per-node", "1")


@pytest.fixture
def head(network: NodeNetwork, tmp_path: Path) -> Iterator[HeadNats]:
    server = HeadNats(tmp_path / "nats", network.head)
    server.start()
    yield server
    server.stop()


@pytest.mark.timeout(2 * RUN_SECONDS)
@pytest.mark.parametrize(("flags", "roles"), [((), ("trainer",)), pytest.param(CRITIC, ("trainer", "critic"), marks=pytest.mark.extra)])
async def test_a_run_on_two_nodes(
    flags: tuple[str, ...],
    roles: tuple[str, ...],
    network: NodeNetwork,
    head: HeadNats,
    valkey: EmbeddedValkey,
    tiny_model: Path,
    tmp_path: Path,
    run_name: str,
) -> None:
    """The actor, and in PPO the critic, have a rank on each node."""
    config, run = write_small_run(tmp_path, tiny_model, run_name, steps=STEPS, staleness=STEPS), tmp_path / "runs" / run_name
    servers = {"NATS_URL": head.url, "REDIS_URL": valkey.url}
    summary = await summary_of_run(network, servers, config, [*flags, *NODES], run, RUN_SECONDS)
    assert (summary["audit"], summary["steps"]) == ("ok", STEPS)
    shutil.rmtree(run / "hf")  # the same commands write it anew
    await summary_of_run(network, servers, config, [*flags, *NODES], run, RUN_SECONDS)
    assert (run / "hf").is_dir()
    for role in roles:
        first, second = ((run / "logs" / f"{role}-{name}.log").read_text() for name in ("0", "node-1"))
        assert "attempt 1 of 2 nodes" in first and "node 1 of 2, attempt 1" in second, (first, second)


COLOCATED_SECONDS = 1500.0
COLOCATED_STEPS = 3
FLAGS = (
    *("--colocate", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--pipeline-model-parallel-size", "2"),
    *("--rollout-replicas", "2", "--check-weight-update-equal", "--save-interval", "10"),
)


@pytest.fixture
async def watched(network: NodeNetwork, tmp_path: Path) -> AsyncIterator[tuple[HeadNats, Bus]]:
    """A NATS server that all nodes reach, and a connection to it."""
    server = HeadNats(tmp_path / "nats", network.head)
    server.start()
    bus = await Bus.connect(server.url, "test")
    yield server, bus
    await bus.close()
    server.stop()


@pytest.mark.extra
@pytest.mark.timeout(2 * COLOCATED_SECONDS)
async def test_each_machine_has_the_weights_of_all_stages_in_its_memory(
    network: NodeNetwork, watched: tuple[HeadNats, Bus], valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path, run_name: str
) -> None:
    """Each rank is the source of one stage and relays the other's."""
    (server, bus), subjects = watched, Subjects(run_name)
    prepared: dict[str, list[WeightsPrepare]] = {"rollout-0": [], "rollout-1": []}
    pushes: list[WeightsPushed] = []
    for engine, told in prepared.items():
        await bus.connection.subscribe(subjects.replica_weights(engine, "prepare"), cb=noted(told, WeightsPrepare))
    await bus.connection.subscribe(subjects.event("weights", "pushed"), cb=noted(pushes, WeightsPushed))
    config = write_small_run(tmp_path, tiny_model, run_name, steps=COLOCATED_STEPS, staleness=0)
    servers = {"NATS_URL": server.url, "REDIS_URL": valkey.url}
    summary = await summary_of_run(network, servers, config, FLAGS, tmp_path / "runs" / run_name, COLOCATED_SECONDS)
    assert (summary["audit"], summary["steps"]) == ("ok", COLOCATED_STEPS)
    assert summary["mean_abs_logprob_diff"] < 1e-3, "the engines drew by other weights than the trainer's"
    for node, told in enumerate(prepared.values()):
        assert told and all(request.rank == 1 for request in told)
        for request in told:
            assert [(channel.kind, channel.address) for channel in request.channels] == 2 * [("memory", network.addresses[node])]
    assert any([replica.replica for replica in push.replicas if not replica.failure] == list(prepared) for push in pushes), pushes


@pytest.mark.extra
@pytest.mark.timeout(2 * COLOCATED_SECONDS)
async def test_an_engine_on_both_machines_reads_each_ones_memory(
    network: NodeNetwork, watched: tuple[HeadNats, Bus], valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path, run_name: str
) -> None:
    """One engine has a rank beside each of the trainer's. Its part on the second machine dies once, and the run continues."""
    (server, bus), subjects, told = watched, Subjects(run_name), list[WeightsPrepare]()
    await bus.connection.subscribe(subjects.replica_weights("rollout-0", "prepare"), cb=noted(told, WeightsPrepare))
    config = write_small_run(tmp_path, tiny_model, run_name, steps=3 * COLOCATED_STEPS, staleness=0)
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # SGLang wants to be told the core of each rank where there is one NUMA node
    servers = {"NATS_URL": server.url, "REDIS_URL": valkey.url, **binding}
    flags = (*FLAGS, "--rollout-replicas", "1", "--rollout-num-gpus-per-engine", "2", "--num-gpus-per-node", "1")
    run = asyncio.create_task(summary_of_run(network, servers, config, flags, tmp_path / "runs" / run_name, COLOCATED_SECONDS))
    await until(lambda: told or run.done(), "a first push", COLOCATED_SECONDS)
    parts = engine_pids(network.names[1])
    assert parts
    for pid in parts:
        os.kill(pid, signal.SIGKILL)
    summary = await run
    assert (summary["audit"], summary["steps"]) == ("ok", 3 * COLOCATED_STEPS)
    assert summary["mean_abs_logprob_diff"] < 1e-3, "the engine drew by other weights than the trainer's"
    addresses = [network.addresses[node] for node in range(2)]
    assert told and all(request.machines == dict.fromkeys(addresses, 1) for request in told)
    assert all({channel.address for channel in request.channels} == set(addresses) for request in told)


def engine_pids(node: str) -> list[int]:
    """Returns the processes of the engine's part in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=True)
    return [pid for pid in map(int, listed.stdout.split()) if b"engine/cpu_launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def noted(found: list, kind: type) -> object:
    async def note(message: object) -> None:
        found.append(kind.decode(message.data))

    return note
