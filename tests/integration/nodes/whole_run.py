"""A run of two nodes by `myxo up` on each, from its start to its end."""

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.network_nodes import NodeNetwork
from tests.support.waiting import until

STOP_SECONDS = 120.0


async def summary_of_run(
    network: NodeNetwork, servers: Mapping[str, str], config: Path, flags: Sequence[str], run: Path, seconds: float
) -> dict[str, Any]:
    """The summary of a run that both nodes have ended well. ``servers``: their environment; ``run``: its directory."""
    logs = [config.with_name(f"node-{node}.log") for node in range(2)]
    started: list[subprocess.Popen[bytes]] = []

    def words() -> str:
        found = [*logs, *sorted((run / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in found)

    try:
        for node in (1, 0):  # the second waits for the first
            command = ("-m", "myxo.main", "up", str(config), *flags, "--node-rank", str(node))
            started.append(network.start(node, logs[node], dict(servers), *command))
        try:
            await until(lambda: all(each.poll() is not None for each in started), "the end of both nodes", seconds, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{words()}") from None
    finally:
        for each in started:
            if each.poll() is None:
                each.terminate()
                await asyncio.to_thread(each.wait, STOP_SECONDS)
    assert [each.returncode for each in started] == [0, 0], words()
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary
