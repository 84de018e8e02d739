"""`myxo up` on each of two nodes: the first starts everything else, the other its part of the trainer alone; both end with the run."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.runtime.embedded_servers import EmbeddedValkey
from tests.e2e.conftest import write_small_run
from tests.support.network_nodes import HeadNats, NodeNetwork
from tests.support.waiting import until

RUN_SECONDS = 900.0
STEPS = 2
NODES = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--node-rank")
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
    config = write_small_run(tmp_path, tiny_model, run_name, steps=STEPS, staleness=STEPS)
    logs = [tmp_path / f"node-{node}.log" for node in range(2)]
    started: list[subprocess.Popen[bytes]] = []

    def words() -> str:
        found = sorted((tmp_path / "runs").glob("*/logs/*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in (*logs, *found))

    try:
        for node in (1, 0):  # the second waits for the first
            given = {"NATS_URL": head.url, "REDIS_URL": valkey.url}
            started.append(network.start(node, logs[node], given, "-m", "myxo.main", "up", str(config), *flags, *NODES, str(node)))
        try:
            await until(lambda: all(each.poll() is not None for each in started), "the end of both nodes", RUN_SECONDS, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{words()}") from None
    finally:
        for each in started:
            if each.poll() is None:
                each.terminate()
                each.wait(60)
    assert [each.returncode for each in started] == [0, 0], words()
    summary = json.loads((tmp_path / "runs" / run_name / "summary.json").read_text())
    assert (summary["audit"], summary["steps"]) == ("ok", STEPS)
    for role in roles:
        first, second = ((tmp_path / "runs" / run_name / "logs" / f"{role}-{name}.log").read_text() for name in ("0", "node-1"))
        assert "attempt 1 of 2 nodes" in first and "node 1 of 2, attempt 1" in second, (first, second)
