"""``myxo up`` from start to end: real servers, buffer and reward service; rollout and trainer are the quick stand-ins of this directory."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.launch import launcher, service_plan
from myxo.launch.service_plan import ServiceSpec
from myxo.run.run_directory import RunDirectory
from tests.integration.myxo.command import COMMAND_SECONDS, ROOT, STANDINS, Myxo, children, ended, kill_child, wait_for

ConfigFile = Callable[..., Path]

pytestmark = pytest.mark.timeout(4 * COMMAND_SECONDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the run that `config_file` describes."""
    return tmp_path / "runs" / "test"


def summary(root: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((root / "summary.json").read_text())
    return content


@pytest.fixture
def pause(root: Path) -> Path:
    """Has the stand-in trainer stop before step 10 until this file is removed."""
    root.mkdir(parents=True)
    path = root / "pause"
    path.write_text("10")
    return path


def training(root: Path) -> Callable[[], bool]:
    """Whether the run has begun to train."""
    return lambda: (root / "checkpoints" / "steps").is_file()


def on_a_terminal(myxo: Myxo, config: Path) -> tuple[int, str]:
    """Runs ``myxo up`` with a terminal for its output: exit code, and what was shown."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.myxo.standin_myxo", "up", str(config)],
        cwd=ROOT,
        env={**myxo.environment, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "40"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = bytearray()
    with contextlib.suppress(OSError):  # the terminal's other side is closed: everything has been said
        while block := os.read(master, 65536):
            shown += block
    os.close(master)
    return process.wait(COMMAND_SECONDS), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="replace"))


@pytest.mark.slow
def test_a_run_goes_to_its_end_says_so_again_goes_on_and_is_forgotten(myxo: Myxo, config_file: ConfigFile, root: Path) -> None:
    config = config_file(rollout={"num_rollout": 4})
    code, text = on_a_terminal(myxo, config)
    assert code == 0, text
    for part in ("waiting for", "step", "4/4", "trainer-0", "eval/heldout", "audit"):
        assert part in text, part
    assert "Traceback" not in text
    result = summary(root)
    assert (result["steps"], result["audit"], result["restarts"]) == (4, "ok", {})
    assert result["finished"] is True
    assert result["groups"] == {"admitted": 8, "trained": 8, "dropped": {}, "dead": {}, "faults": {}, "in_flight": 0}
    assert result["accuracy_before"] is not None
    assert result["accuracy_after"] is not None
    assert (root / "reward.png").is_file()
    assert not (root / "servers.json").exists()
    assert not RunDirectory(root).is_held()

    code, out, _ = myxo.run("up", config, standins=True)
    assert code == 0
    assert "Run test is finished: 4 steps." in out
    assert "audit" in out

    code, out, err = myxo.run("up", config, "--max-staleness", "3", "--num-rollout", "6")
    assert code == 2
    assert "rollout.max_staleness" in err
    assert "--fresh" in err

    prompts = config.with_name("prompts.jsonl")
    prompts.write_bytes(prompts.read_bytes() + prompts.read_bytes().splitlines(keepends=True)[0])
    code, out, err = myxo.run("up", config, "--num-rollout", "6", standins=True)
    assert code == 2, f"{out}\n{err}"
    assert f"data.prompt_data = {str(prompts)!r}: has changed from 297 to 330 bytes" in err and "--accept-changed-data" in err

    code, out, err = myxo.run("up", config, "--num-rollout", "6", "--accept-changed-data", standins=True)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    assert "step 6/6" in out
    assert (summary(root)["steps"], summary(root)["audit"]) == (6, "ok")

    for step in (0, 5):  # nothing of it is in the store any more
        code, out, err = myxo.run("samples", root, "--step", str(step), "--json")
        assert (code, err) == (0, "")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [(row["status"], row["durable"], len(row["samples"]), row["absent"]) for row in rows] == [("trained", True, 2, None)] * 2
        assert all(sample["text"] for row in rows for sample in row["samples"])
    code, out, _ = myxo.run("samples", "--dir", root.parent, "test", "--eval", "--version", "0", "--json")
    assert (code, [len(json.loads(line)["samples"]) for line in out.splitlines()]) == (0, [1] * 4)

    code, out, _ = myxo.run("logs", root, "-n", "500")
    assert code == 0
    assert "run_finished" in out
    assert "service_started" in out

    (root / "data").mkdir()
    (root / "data" / "precious").write_text("keep")
    first = summary(root)["wall_seconds"]
    code, out, err = myxo.run("up", config, "--fresh", "--max-staleness", "0", "--num-rollout", "2", standins=True)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    result = summary(root)
    assert (result["steps"], result["max_staleness"], result["audit"]) == (2, 0, "ok")
    assert result["wall_seconds"] != first
    assert (root / "data" / "precious").read_text() == "keep"


DIED = {"trainer-0", "buffer-0", "rollout-0"}


def restarted(myxo: Myxo, root: Path) -> set[str]:
    """Which instances a run's events say were started again; none while the bus is away."""
    code, out, _ = myxo.run("status", root, "--json")
    return {error["instance"] for error in json.loads(out)["troubles"]["errors"] if error["restarts"]} if code == 0 else set()


@pytest.mark.slow
def test_a_run_survives_deaths_its_launchers_and_an_interruption(myxo: Myxo, config_file: ConfigFile, root: Path, pause: Path) -> None:
    config = config_file(rollout={"num_rollout": 14})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", training(root))
    mode = (root / "servers.json").stat().st_mode & 0o777
    assert mode == 0o600
    code, out, _ = myxo.run("status", root, "--json")
    assert code == 0
    status = json.loads(out)
    assert status["running"] is True
    assert {line["instance"] for line in status["services"]} >= {"buffer-0", "reward-0", "rollout-0", "trainer-0"}
    code, out, err = myxo.run("up", config)
    assert code == 1
    assert f"in use by process {process.pid}" in err

    for words in ("standin_trainer", "services.buffer", "nats-server", "standin_rollout"):
        victim = kill_child(process.pid, words)
        wait_for(
            f"another {words}", lambda words=words, victim=victim: any(words in c and p != victim for p, c in children(process.pid).items())
        )
    wait_for("the deaths to be told: the launcher takes what it has not published yet with it", lambda: restarted(myxo, root) >= DIED)
    started = list(children(process.pid))
    assert len(started) >= 6
    process.kill()
    process.wait()
    wait_for("the end of what it started", lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))

    process = myxo.start("up", config, standins=True)
    buffer_log = root / "logs" / "buffer-0.log"
    before = buffer_log.read_text().count("recovered")
    wait_for("the run to continue", lambda: buffer_log.read_text().count("recovered") > before)
    started = list(children(process.pid))
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (130, ""), f"{out}\n{err}"
    assert re.search(r"Stopped by SIGINT: no checkpoint yet\n  continue: myxo up (\S+)\n  samples:  myxo samples (\S+)\n", out), out
    assert not (root / "servers.json").exists()
    wait_for("the end of what it started", lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert not (root / "summary.json").exists()
    code, out, _ = myxo.run("status", root)
    assert "is not running" in out
    code, out, _ = myxo.run("list", root.parent, "--json")
    assert (code, [(run["run"], run["state"], run["of"]) for run in json.loads(out)]) == (0, [("test", "stopped", 14)])

    pause.unlink()
    code, out, err = myxo.run("up", config, standins=True)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    result = summary(root)
    assert (result["steps"], result["audit"]) == (14, "ok")
    restarts = result["restarts"]
    assert isinstance(restarts, dict)
    assert restarts.keys() >= DIED
    assert "restarts" in out


@pytest.mark.extra
def test_fresh_on_given_servers(
    myxo: Myxo, config_file: ConfigFile, root: Path, nats: object, valkey: object, run_name: str, tmp_path: Path
) -> None:
    given = {"NATS_URL": nats.url, "REDIS_URL": valkey.url}  # type: ignore[attr-defined]
    config = config_file(run={"name": run_name}, rollout={"num_rollout": 2})
    for _ in range(2):
        code, out, err = myxo.run("up", config, "--fresh", standins=True, environment=given)
        assert (code, err) == (0, ""), f"{out}\n{err}"
        result = summary(tmp_path / "runs" / run_name)
        assert (result["steps"], result["audit"]) == (2, "ok")
        assert result["groups"]["admitted"] == 4  # type: ignore[index]
    assert not (tmp_path / "runs" / run_name / "nats").exists()
    code, out, _ = myxo.run("audit", run_name, environment=given)
    assert code == 0
    assert "4 admitted = 4 trained" in out


def test_bad_input_that_only_a_service_sees_ends_the_run(
    myxo: Myxo, config_file: ConfigFile, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts are fine when they are checked, and gone when the buffer reads them."""
    config = config_file(rollout={"num_rollout": 2})

    def plan(*words: object) -> list[ServiceSpec]:
        (tmp_path / "prompts.jsonl").unlink()
        return service_plan.plan(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "plan", plan)
    for service, module in STANDINS.items():
        monkeypatch.setitem(service_plan.SERVICE_MODULES, service, module)
    code, out, err = myxo.run("up", config)
    assert code == 2, f"{out}\n{err}"
    assert len(err.splitlines()) == 1
    assert err.startswith("myxo: buffer: data.prompt_data = ")
    assert "cannot be read" in err
    assert not RunDirectory(root).is_held()
