"""A whole run by `deploy/slurm/run.sbatch` on two nodes, each a network namespace, with SLURM's two commands played by scripts.

Everything that the job starts is real: servers with accounts, buffer, reward, SGLang, a trainer of one rank on each node, `myxo watch`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.process.child_process import with_parent
from tests.e2e.conftest import write_small_run
from tests.support.network_nodes import ROOT, NodeNetwork, node_network
from tests.support.waiting import until

SECONDS = 900

SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' {addresses}
"""

SRUN = """#!/usr/bin/env bash
# starts the command once on each node, as `srun --ntasks-per-node=1` does
while [[ $1 == --* ]]; do shift; done
node=0
for name in {names}; do
  SLURM_NODEID=$node ip netns exec "$name" "$@" &
  node=$((node + 1))
done
wait
"""


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    with node_network(2) as made:
        yield made


class SlurmJob:
    """What ``sbatch --nodes=2 deploy/slurm/run.sbatch CONFIG FLAGS`` would start on the first node."""

    def __init__(self, network: NodeNetwork, directory: Path) -> None:
        self.network, self.log, self._commands = network, directory / "job.log", directory / "bin"
        self._commands.mkdir()
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            path = self._commands / name
            path.write_text(text.format(addresses=" ".join(network.addresses), names=" ".join(network.names)))
            path.chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PATH": f"{self._commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MYXO_PYTHON": sys.executable,
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_ID": "1",
        }
        command = ["ip", "netns", "exec", self.network.names[0], "bash", str(ROOT / "deploy/slurm/run.sbatch"), *words]
        with self.log.open("ab") as output:
            return subprocess.Popen(with_parent(command), cwd=ROOT, env=environment, stdout=output, stderr=output)


@pytest.mark.extra
@pytest.mark.timeout(2 * SECONDS + 60)
async def test_a_job_stopped_in_order_goes_on_when_it_is_submitted_again(network: NodeNetwork, tiny_model: Path, tmp_path: Path) -> None:
    """SIGTERM of the batch script, as before the time limit, has the trainer save on both nodes; the next job finishes the run."""
    config, root = write_small_run(tmp_path, tiny_model, "job", steps=40, staleness=2), tmp_path / "runs" / "job"
    words, job = (str(config), "--actor-num-nodes", "2", "--save-interval", "100"), SlurmJob(network, tmp_path)

    def said() -> str:
        tails = [f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted((root / "logs").glob("*.log"))]
        return "\n".join([job.log.read_text(errors="replace")[-3000:], *tails])

    async def ended(process: subprocess.Popen[bytes]) -> int:
        try:
            await until(lambda: process.poll() is not None, "the job's end", SECONDS, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{said()}") from None
        assert process.returncode is not None
        return process.returncode

    first = job.start(*words)
    try:
        await until(lambda: first.poll() is not None or pushes(root) >= 3, "two pushes after training", SECONDS, 0.5)
        assert first.poll() is None, said()
        first.send_signal(signal.SIGTERM)
        assert await ended(first) == 143, said()
        assert '"attempt_stopping"' in trainer_log(root) and not resumed(root), said()
        second = job.start(*words)
        assert await ended(second) == 0, said()
    finally:
        for process in (first, *([second] if "second" in locals() else [])):
            if process.poll() is None:
                process.terminate()
                process.wait(200)
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["audit"], summary["steps"]) == ("ok", 40), said()
    assert resumed(root), said()
    assert {path.name for path in (root / "logs").iterdir()} >= {"trainer-0.log", "trainer-node-1.log", "rollout-0.log", "nats-server.log"}


def trainer_log(root: Path) -> str:
    log = root / "logs" / "trainer-0.log"
    return log.read_text(errors="replace") if log.exists() else ""


def pushes(root: Path) -> int:
    return trainer_log(root).count('"weights_pushed"')


def resumed(root: Path) -> bool:
    """Returns whether a trainer continued from a step that another one had reached."""
    return re.search(r'"steps": [1-9].*"event": "resumed"', trainer_log(root)) is not None
