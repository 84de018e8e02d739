"""A trainer over two nodes loses one: it is named, and training continues where it was once the node is back."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.nodes.conftest import RUN_SECONDS, Cluster

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
