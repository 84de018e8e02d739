"""A run whose store or disk is full: it says so, waits, loses nothing, and continues by itself once there is room."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from myxo.run.run_directory import RunDirectory
from tests.integration.myxo.command import COMMAND_SECONDS, Myxo, ended, wait_for
from tests.support.small_disk import small_disk

ConfigFile = Callable[..., Path]

pytestmark = pytest.mark.timeout(4 * COMMAND_SECONDS)


def line_with(process: subprocess.Popen[str], *words: str) -> str:
    """The first line of progress that holds all the words."""
    assert process.stdout is not None
    for line in process.stdout:
        if all(word in line for word in words):
            return line
    raise AssertionError(f"{words!r} was never told; {process.communicate()}")


def begun(root: Path) -> Callable[[], bool]:
    return lambda: (root / "checkpoints" / "steps").is_file()


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
