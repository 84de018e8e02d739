"""The console beside a run, and `myxo console` afterwards: whatever becomes of it, the run continues."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.integration.myxo.command import COMMAND_SECONDS, Myxo, children, ended, kill_child, wait_for

pytestmark = pytest.mark.timeout(4 * COMMAND_SECONDS)

URL = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{40,})")


def overview(port: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/overview", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def answers(port: str, token: str, condition: Callable[[dict[str, Any]], bool] = lambda found: True) -> Callable[[], bool]:
    """Whether the console answers, and so."""

    def look() -> bool:
        with contextlib.suppress(OSError):
            return condition(overview(port, token))
        return False

    return look


def first_line(process: Popen[str]) -> tuple[str, str]:
    """The port and token in the first line that a command prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = URL.search(line)
    assert found is not None, line
    return found[1], found[2]


@pytest.mark.extra
@pytest.mark.slow
def test_a_console_beside_a_run_moves_from_a_taken_port_and_its_deaths_change_nothing(
    myxo: Myxo, config_file: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "runs" / "test"
    root.mkdir(parents=True)
    pause = root / "pause"
    pause.write_text("2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = config_file(rollout={"num_rollout": 3}, console={"console": True, "console_port": port}, bus={"frozen_timeout": 10.0})
        process = myxo.start("up", config, standins=True)
        found, token = first_line(process)
        assert found != str(port)
        wait_for("the console", answers(found, token, lambda told: told["phase"] == "running" and told["steps"] == 2))
        assert json.loads((root / "servers.json").read_text())["console"].endswith(token)
        code, out, _ = myxo.run("console", "test", "--dir", tmp_path / "runs")
        there = URL.search(out)
        assert code == 0 and there is not None and there.groups() == (found, token)
        for _ in range(2):
            victim = kill_child(process.pid, "services.console")
            wait_for(
                "another console",
                lambda gone=victim: any("services.console" in line and pid != gone for pid, line in children(process.pid).items()),
            )
            wait_for("the console at its address", answers(found, token, lambda told: told["steps"] == 2))
        frozen = next(pid for pid, line in children(process.pid).items() if "services.console" in line)
        os.kill(frozen, signal.SIGSTOP)
        wait_for("the end of the frozen console", lambda: frozen not in children(process.pid))
        wait_for("the console at its address", answers(found, token, lambda told: told["steps"] == 2))
        pause.unlink()
        code, out, err = ended(process)
    assert code == 0, out + err
    summary = json.loads((root / "summary.json").read_text())
    assert summary["restarts"] == {"console": 3}
    assert "it was frozen, without an answer for" in summary["errors"]["console"]
    refused = [line for line in (root / "nats" / "nats-server.log").read_text().splitlines() if "Violation" in line]
    assert not refused, "the account of the console lacks a right"

    # afterwards: from the stored streams, with other commands beside it, then from the directory alone
    process = myxo.start("console", "test", "--dir", tmp_path / "runs", "--port", "0")
    found, token = first_line(process)
    wait_for("the finished run", answers(found, token, lambda told: told["phase"] == "finished" and told["steps"] == 3))
    assert overview(found, token)["away"] == []
    code, out, err = myxo.run("status", "test", "--dir", tmp_path / "runs")
    assert code == 0, err
    process.terminate()
    assert ended(process)[0] == 0
    for name in ("nats", "valkey"):
        shutil.rmtree(root / name)
    process = myxo.start("console", root, "--port", "0")
    found, token = first_line(process)
    wait_for("the directory", answers(found, token, lambda told: told["live"] is False and told["run"] == "test"))
    assert overview(found, token)["away"] == []
    process.terminate()
    assert ended(process)[0] == 0


@pytest.mark.extra
@pytest.mark.slow
def test_a_run_goes_on_where_its_console_cannot_listen_at_all(myxo: Myxo, config_file: Callable[..., Path]) -> None:
    config = config_file(rollout={"num_rollout": 1}, console={"console": True, "console_host": "192.0.2.7"})
    code, out, err = ended(myxo.start("up", config, standins=True))
    assert code == 0, out + err
    assert "There is no console, the run continues: console.console_host" in err
    assert "Console:" not in out


def test_a_console_of_no_run_and_of_a_port_that_is_none(myxo: Myxo, tmp_path: Path) -> None:
    code, _, err = myxo.run("console", "absent", "--dir", tmp_path)
    assert code == 2 and "no such run" in err
    (tmp_path / "old" / "rollouts").mkdir(parents=True)
    code, _, err = myxo.run("console", "old", "--dir", tmp_path, "--port", "70000")
    assert code == 2 and "--port" in err
