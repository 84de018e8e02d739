"""A trainer over two nodes: it computes what one process computes, agents lead its ranks, and it continues once a lost node is back."""

import asyncio
import os
import pickle
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer.parallel import runtime
from shared.bus.registry import Registry
from shared.runtime import exit_codes
from tests.integration.nodes.conftest import RUN_SECONDS, Cluster
from tests.support.network_nodes import NodeNetwork
from tests.support.node_ranks import CASES
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_layouts import assert_equal
from tests.unit.trainer.megatron.tiny import make_checkpoint

STEPS = 4
FAULTS = ("kill", "cut", "another address")


def named(cluster: Cluster, other: int, victim: int) -> list[dict[str, Any]]:
    """What a node has said of the loss of another."""
    return [record for record in cluster.said(other, "node_lost") if f"node {victim} (" in record["detail"]]


@pytest.mark.timeout(3 * RUN_SECONDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extra) for seed in range(1, 10))])
async def test_a_lost_node_is_named_and_the_others_go_on_with_it(seed: int, cluster: Callable[..., Any]) -> None:
    """The fault, the node and the moment are drawn; seed 0 cuts the link of the second node."""
    drawn = random.Random(seed)
    fault, victim, moment = drawn.choice(FAULTS), drawn.randrange(2), drawn.uniform(0, STEPS - 2.5)
    if seed == 0:
        fault, victim = "cut", 1
    # TP2 inside of each node, and PP2 or DP2 across; in CI a rank a node, which takes a third of the time
    share = 1 if seed == 0 else 2
    ranks = {
        "actor_num_gpus_per_node": share,
        "tensor_model_parallel_size": share,
        "sequence_parallel": share > 1,
        "pipeline_model_parallel_size": 1 + drawn.randrange(2),
    }
    run: Cluster = await cluster(STEPS, **ranks)
    for node in range(2):
        run.start(node)
    await run.player.work_until(2)
    await run.until_trained(1)
    other, began = 1 - victim, 0.0
    async with run.generating():
        await asyncio.sleep(moment)
        began = time.monotonic()
        if fault == "kill":
            run.kill(victim)
        else:
            run.network.cut(victim)
        await run.until(f"the name of node {victim}", lambda: named(run, other, victim), 60)
        seconds = time.monotonic() - began
        print(f"seed {seed}: {fault} of node {victim}, named after {seconds:.1f} s: {named(run, other, victim)[0]['detail']}")
        if fault == "another address":
            run.kill(victim)
            run.network.readdress(victim)
        if fault != "kill":
            run.network.mend(victim)
        if fault != "cut":
            run.start(victim)
        await run.until_ended()
    begun = run.said(0, "attempt_begun")
    assert len(begun) >= 2 and begun[-1]["detail"].endswith(tuple(f"{run.network.addresses[0]}:{port}" for port in range(65536)))
    assert run.said(0, "resumed"), "it began anew"
    report = await run.player.audit()
    assert (report.violations, report.steps) == ([], STEPS)


AGENT = (
    "import sys; from shared.service.service_base import exit_code; from services.trainer.trainer_node import run_node; "
    "sys.exit(exit_code('trainer', lambda: run_node('trainer', 'actor', int(sys.argv[1]), 'tests.support.meeting_rank')))"
)


@pytest.fixture
async def met(cluster: Callable[..., Awaitable[Cluster]]) -> Cluster:
    """Two nodes whose ranks have met."""
    run = await cluster(4)
    run.words_of_agent = ("-c", AGENT)
    for node in range(2):
        run.start(node)
    await run.until("the first meeting", lambda: meetings(run) == 2)
    return run


def meetings(run: Cluster) -> int:
    """Returns how many ranks have met in all attempts."""
    return sum(run.log(node).read_text().count("met ") for node in range(2) if run.log(node).exists())


async def parted(run: Cluster, meetings_after: int) -> None:
    """Cuts the link between the nodes, of which each reaches the bus, and waits until it is named; mends it, and waits for a meeting."""
    began = time.monotonic()
    run.network.part()
    await run.until("the name of the link", lambda: run.said(0, "link_lost"))
    seconds = time.monotonic() - began
    print(f"link between the nodes cut, named after {seconds:.1f} s")
    (told,) = run.said(0, "link_lost")
    assert all(f"node {node} (" in told["detail"] and run.network.addresses[node] in told["detail"] for node in range(2))
    await run.until("the wait for the link", lambda: any("for the link between" in said["detail"] for said in run.said(0, "node_state")))
    assert not run.said(0, "node_lost") and meetings(run) == meetings_after - 2
    run.network.join()
    await run.until("a meeting over the mended link", lambda: meetings(run) == meetings_after)


async def lost(run: Cluster, by: int, victim: int, fault: Callable[[int], None]) -> None:
    """Does ``fault`` to a node, and waits until another has named it."""

    def named() -> int:
        return sum(f"node {victim} (" in told["detail"] for told in run.said(by, "node_lost"))

    before, began = named(), time.monotonic()
    fault(victim)
    await run.until(f"the name of node {victim}", lambda: named() > before)
    print(f"{fault.__name__} of node {victim}, named by node {by} after {time.monotonic() - began:.1f} s")


@pytest.mark.timeout(3 * RUN_SECONDS)
async def test_a_cut_link_a_death_and_another_address(met: Cluster) -> None:
    """Each time the other node says who is lost, and both meet again; at last all leave in order."""
    statuses = {status.instance: status for status in await Registry(met.player.bus, met.player.config.run.name).alive("node")}
    assert set(statuses) == {"trainer-node-0", "trainer-node-1"}
    await met.until("a meeting point", lambda: bool(addresses(met, 0)))
    assert addresses(met, 0) == {met.network.addresses[0]}, "a store listens elsewhere"

    await parted(met, 4)

    await lost(met, 0, 1, met.network.cut)
    met.network.mend(1)
    await met.until("a third meeting", lambda: meetings(met) == 6)

    await lost(met, 0, 1, met.kill)
    met.network.readdress(1)
    met.start(1)
    await met.until("a fourth meeting, with another address", lambda: meetings(met) == 8)

    await lost(met, 1, 0, met.kill)
    met.network.readdress(0)
    met.start(0)
    await met.until("a fifth meeting, at another address", lambda: meetings(met) == 10)
    assert met.network.addresses[0] in met.said(0, "attempt_begun")[-1]["detail"]

    met.agents[1].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(met.agents[1].wait, 60) == exit_codes.STOPPED, met.words()
    await met.until("the attempt's end", lambda: any("asked to stop" in told["detail"] for told in met.said(0, "attempt_ended")))
    met.agents[0].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(met.agents[0].wait, 60) == exit_codes.STOPPED, met.words()


def addresses(run: Cluster, node: int) -> set[str]:
    """Returns where a node listens, but for its agent, which answers health checks at loopback."""
    lines = Path(f"/proc/{run.agents[node].pid}/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in listening} - {"127.0.0.1"}


SECONDS = 400


@pytest.fixture
def kinds(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """The directory of a tiny checkpoint, by kind."""
    for kind in {kind for kind, _ in CASES.values()}:
        make_checkpoint(kind, tmp_path / "hf" / kind)
    yield lambda kind: tmp_path / "hf" / kind
    runtime.stop()


@pytest.mark.timeout(2 * SECONDS)
def test_layouts_over_two_nodes_equal_one_process(network: NodeNetwork, kinds: Callable[[str], Path], tmp_path: Path) -> None:
    """Through torchrun, as a node's agent starts it, over a cable between two network namespaces."""
    found = outcomes(network, tmp_path)
    for name, (kind, _) in CASES.items():
        assert_equal(rank_steps.reinforce(kinds(kind), {}), found[name])


def outcomes(network: NodeNetwork, directory: Path) -> dict[str, list[Any]]:
    """Runs all cases on two nodes of two ranks. Returns, by case, what each rank found."""
    place, ranks = directory / "meeting", ("tests.support.node_ranks", str(directory))
    place.mkdir()
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(2):
            port = "0" if node == 0 else wait_for(place / "port", nodes)
            words = ("-m", "services.trainer.torchrun", str(place), str(node), "2", "2", network.addresses[0], port, *ranks)
            nodes.append(network.start(node, directory / f"node-{node}.log", environment, *words))
        codes = [node.wait(SECONDS) for node in nodes]
    finally:
        for process in nodes:
            process.kill()
    assert codes == [0, 0], "\n".join((directory / f"node-{node}.log").read_text()[-3000:] for node in range(2))
    return {name: [pickle.loads((directory / f"{name}-{rank}").read_bytes()) for rank in range(4)] for name in CASES}


def wait_for(path: Path, nodes: list[subprocess.Popen[bytes]]) -> str:
    """Returns the port that node 0 has written."""
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert nodes[0].poll() is None and time.monotonic() < end, os.listdir(path.parent)
        time.sleep(0.1)
    return path.read_text()
