"""`myxo up` on each of two nodes: the first starts everything else, the other its part of the trainer alone; both end with the run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.process.embedded_servers import EmbeddedValkey
from tests.e2e.conftest import write_small_run
from tests.integration.nodes.whole_run import summary_of_run
from tests.support.network_nodes import HeadNats, NodeNetwork

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
