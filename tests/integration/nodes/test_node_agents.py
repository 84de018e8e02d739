"""Agents of a trainer over two nodes, with ranks that meet through torchrun and train nothing."""

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared.bus.registry import Registry
from tests.integration.nodes.conftest import RUN_SECONDS, Cluster

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
    assert await asyncio.to_thread(met.agents[1].wait, 60) == 0, met.words()
    await met.until("the attempt's end", lambda: any("asked to stop" in told["detail"] for told in met.said(0, "attempt_ended")))
    met.agents[0].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(met.agents[0].wait, 60) == 0, met.words()


def addresses(run: Cluster, node: int) -> set[str]:
    """Returns where a node listens, but for its agent, which answers health checks at loopback."""
    lines = Path(f"/proc/{run.agents[node].pid}/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1].split(":")[0] for line in lines if line.split()[3] == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in listening} - {"127.0.0.1"}
