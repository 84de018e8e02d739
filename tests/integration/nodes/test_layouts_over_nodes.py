"""Two ranks on each of two nodes compute what one process computes: tensor parallel inside, pipeline, data or expert parallel across."""

import os
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer.parallel import runtime
from tests.support.network_nodes import NodeNetwork
from tests.support.node_ranks import CASES
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_layouts import assert_equal
from tests.unit.trainer.megatron.tiny import make_checkpoint

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
