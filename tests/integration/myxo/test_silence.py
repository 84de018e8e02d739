"""Nothing fails in silence: what goes wrong, is frozen or full is told while a run continues and as it ends; what is hopeless ends it."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from myxo.run.run_directory import RunDirectory
from shared.runtime import exit_codes
from tests.integration.myxo.command import COMMAND_SECONDS, Myxo, children, ended, wait_for
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.timeout(4 * COMMAND_SECONDS)


ConfigFile = Callable[..., Path]


TOLD_SECONDS = 15.0

PROMPT_TOO_LONG = "input and 4096 new tokens are more than the 2048 tokens of the model's context"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the run that `config_file` describes."""
    path = tmp_path / "runs" / "test"
    path.mkdir(parents=True)
    return path


def line_with(process: subprocess.Popen[str], *words: str) -> str:
    """The first line that holds all the words and that was printed while the run continued, not in the report at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if "what went wrong" in line:
            break
        if all(word in line for word in words):
            return line
    raise AssertionError(f"{words!r} was never told; {process.communicate()}")


def begun(root: Path) -> Callable[[], bool]:
    return lambda: (root / "checkpoints" / "steps").is_file()


def test_groups_that_all_fail_are_told_and_end_the_run_which_goes_on_when_called_again(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    (root / "refuse").write_text(PROMPT_TOO_LONG)
    config = config_file(rollout={"num_rollout": 2, "max_dead_in_a_row": 8}, eval={"skip_eval_before_train": True})
    code, out, err = myxo.run("up", config, standins=True)
    assert code == exit_codes.RUN_FAILED, f"{out}\n{err}"
    assert "myxo: run test failed: " in err and "groups in a row failed (rollout.max_dead_in_a_row = 8)" in err
    assert PROMPT_TOO_LONG in err
    assert "stopped: 8 groups in a row failed" in out
    report = out[out.index("what went wrong") :]
    assert "dead" in report and PROMPT_TOO_LONG[:50] in " ".join(report.split())
    assert not (root / "servers.json").exists()

    code, out, _ = myxo.run("status", root)
    assert code == 0 and PROMPT_TOO_LONG in out
    code, out, _ = myxo.run("status", root, "--json")
    told = json.loads(out)
    assert (told["phase"], told["running"]) == ("failed", False)
    assert PROMPT_TOO_LONG in told["reason"] and sum(told["dead"].values()) >= 8

    (root / "refuse").unlink()
    code, out, err = myxo.run("up", config, standins=True)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    assert "step 2/2" in out


def test_dead_groups_are_told_at_once_by_lines_and_status_and_when_the_run_is_interrupted(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    config = config_file(rollout={"num_rollout": 1000, "max_dead_in_a_row": 0})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", begun(root))
    (root / "refuse").write_text(PROMPT_TOO_LONG)
    began = time.monotonic()
    assert PROMPT_TOO_LONG[:40] in line_with(process, "dead ")
    assert time.monotonic() - began < TOLD_SECONDS
    code, out, _ = myxo.run("status", root, "--json")
    told = json.loads(out)["troubles"]
    assert code == 0 and told["dead"] > 0 and PROMPT_TOO_LONG in told["dead_reason"] and told["dead_per_minute"] > 0
    process.terminate()
    code, out, err = ended(process)
    assert (code, err) == (143, ""), f"{out}\n{err}"
    assert "what went wrong" in out and PROMPT_TOO_LONG in " ".join(out.split())  # it is a table: texts are broken into lines
    assert "Stopped by SIGTERM" in out


@pytest.mark.extra
def test_a_service_that_dies_of_the_same_again_and_again_ends_the_run_although_it_was_ready(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    (root / "pause").write_text("5")
    config = config_file(rollout={"num_rollout": 1000})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", begun(root))
    (root / "die").write_text("No space left on device: rollouts")
    began = time.monotonic()
    assert "rollout-0" in line_with(process, "OSError: [Errno 28] No space left on device")
    assert time.monotonic() - began < TOLD_SECONDS
    code, out, err = ended(process)
    assert code == exit_codes.RUN_FAILED, f"{out}\n{err}"
    assert "stopped: rollout-0 ended 3 times with the same error" in out, "the progress tells it"
    assert "myxo: rollout-0 ended 3 times with the same error, and no training step in between: exit code 1: " in err
    assert "No space left on device" in out[out.index("what went wrong") :]
    code, out, _ = myxo.run("status", root)
    assert code == 0 and "Run test failed: rollout-0 ended 3 times" in out


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


@pytest.mark.extra
def test_a_full_store_holds_the_run_back_and_it_goes_on_when_there_is_room(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "test"
    root.mkdir(parents=True)
    (root / "pause").write_text("5")
    config = config_file(rollout={"num_rollout": 12}, store={"max_bytes": 12 << 20})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", begun(root))
    servers = RunDirectory(root).servers()
    assert servers is not None
    client = redis.Redis.from_url(servers.redis_url)
    junk = 0
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        while True:
            client.set(f"junk:{junk}", bytes(64 << 10))
            junk += 1
    line_with(process, "buffer-0 holds back: the store is", "no new group is admitted")
    (root / "pause").unlink()
    code, out, _ = myxo.run("status", root)
    assert code == 0 and "holds back" in out
    for number in range(junk):
        client.unlink(f"junk:{number}")
    code, out, err = ended(process)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    assert "step 12/12" in out
    code, out, _ = myxo.run("audit", root)
    assert code == 0, out


@pytest.mark.extra
def test_a_disk_that_is_full_before_services_start_is_waited_for(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    """One that is full before that is refused."""
    root = tmp_path / "runs" / "test"
    with small_disk(root, "256m") as disk:
        (root / "pause").write_text("0")
        process = myxo.start("up", config_file(store={"max_bytes": 64 << 20}), standins=True)
        wait_for("the launch", (root / "logs" / "launcher.log").exists)
        disk.fill()
        line_with(process, "for room", "No space left on device")
        (root / "pause").unlink()
        disk.clear()
        code, out, err = ended(process)
    assert code == 0, f"{out}\n{err}"


@pytest.mark.parametrize("appendfsync", ["everysec", pytest.param("always", marks=pytest.mark.extra)])
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    myxo: Myxo, config_file: ConfigFile, tmp_path: Path, appendfsync: str
) -> None:
    root = tmp_path / "runs" / "test"
    with small_disk(root, "256m") as disk:
        (root / "pause").write_text("5")
        config = config_file(rollout={"num_rollout": 12}, bus={"ack_wait": 5.0}, store={"max_bytes": 64 << 20, "appendfsync": appendfsync})
        process = myxo.start("up", config, standins=True)
        wait_for("the first checkpoint", begun(root))
        disk.fill()
        (root / "pause").unlink(missing_ok=True)
        line_with(process, "waiting for room on the disk (No space left on device", str(root), "once there is room")
        assert process.poll() is None
        disk.clear()
        code, out, err = ended(process)
        assert code == 0, f"{out}\n{err}"
        assert "step 12/12" in out
        report = " ".join(out[out.index("Run test") :].split())
        assert "for room on the disk (No space left on device" in report and "nats-server 1, last after no space was left" in report
        summary = json.loads((root / "summary.json").read_text())
        assert summary["groups"]["dead"] == {} and summary["audit"] == "ok", "no group dies of a full disk"
        assert "waiting_for" in (root / "logs" / "launcher.log").read_text()
        code, out, _ = myxo.run("audit", root)
        assert code == 0, out


@pytest.mark.extra
def test_a_run_whose_disk_stays_full_goes_on_on_another_one(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "runs" / "test", tmp_path / "elsewhere"
    with small_disk(root.parent, "256m") as disk:
        root.mkdir()
        (root / "pause").write_text("5")
        config = config_file(rollout={"num_rollout": 8}, bus={"ack_wait": 5.0}, store={"max_bytes": 64 << 20})
        process = myxo.start("up", config, standins=True)
        wait_for("the first checkpoint", begun(root))
        disk.fill()
        line_with(process, "No space left on device")
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 128 + signal.SIGINT
        (root / "pause").unlink()
        code, _, err = myxo.run("move", root, root.parent)
        assert code == 2 and "a directory outside of" in err
        code, out, err = myxo.run("move", root, elsewhere)
        assert (code, err) == (0, "") and f"--dir {elsewhere}" in out
        assert not root.exists()
        code, out, err = myxo.run("up", config, "--dir", elsewhere, standins=True)
        assert code == 0, f"{out}\n{err}"
        assert "step 8/8" in out
        assert myxo.run("audit", elsewhere / "test")[0] == 0
