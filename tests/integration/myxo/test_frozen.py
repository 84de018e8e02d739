"""Whoever is frozen is named with what happens next, in the progress, the log and the report, is killed, and the run continues."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.myxo.command import COMMAND_SECONDS, Myxo, children, ended, wait_for

FROZEN = {
    "services.buffer": "buffer-0, whose heartbeat is missing",
    "services.reward": "reward-0, whose heartbeat is missing",
    "standin_rollout": "rollout-0, whose heartbeat is missing",
    "standin_trainer": "trainer-0, whose heartbeat is missing",
    "nats-server": "NATS, which is away: its process runs, and does not answer",
    "valkey-server": "Redis, which is away",
}
"""Words of the command line → how it is waited for."""


@pytest.mark.extra
@pytest.mark.timeout(8 * COMMAND_SECONDS)
def test_each_process_that_is_frozen_is_named_and_killed_and_the_run_goes_on(
    myxo: Myxo, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "runs" / "test"
    config = config_file(rollout={"num_rollout": 1_000_000}, bus={"frozen_timeout": 12.0, "registry_ttl": 5.0, "ack_wait": 5.0})
    process = myxo.start("up", config, standins=True)
    trained = root / "checkpoints" / "steps"
    log = root / "logs" / "launcher.log"
    wait_for("the first checkpoint", trained.is_file)
    assert process.stdout is not None
    for words, awaited in FROZEN.items():
        [victim] = [pid for pid, line in children(process.pid).items() if words in line]
        os.kill(victim, signal.SIGSTOP)
        line = next((line for line in process.stdout if f"waiting for {awaited}" in line), "")
        assert re.search(r"for \d+s \(since \d\d:\d\d:\d\d\); .*(killed and started again|asks again until it is back)", line), line
        wait_for(f"the end of {words}", lambda gone=victim: gone not in children(process.pid))
        before = int(trained.read_text())
        wait_for(f"steps after {words}", lambda goal=before + 10: int(trained.read_text()) >= goal)
        assert awaited in log.read_text(), "the log has the same words"
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == 128 + signal.SIGINT, out + err
    report = " ".join(out[out.index("what went wrong") :].split())
    assert len(re.findall("it was frozen, (?:without a|stopped by a signal)", report)) >= 5, report
    assert "waited" in report and "for NATS, which is away" in report, report
