"""The unmodified Tinker SDK against `myxo serve`: loops learn, clients at once get what each gets alone, kills lose and double nothing."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.e2e.launched import LaunchedRun
from tests.support.service_process import ROOT
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

SDK, KEY = "tinker==0.38.0", "tml-0123456789abcdefghij"
TENANTS = {"default": {"key": KEY}, "bob": {"key": "tml-bobs-0123456789abcdef", "tokens": 300, "models": 2, "bytes": 1}}
CONFIG = """
[run]
name = "serve"
dir = "{directory}/runs"
[model]
hf_checkpoint = "{directory}/model"
[rollout]
rollout_device = "cpu"
[trainer]
train_device = "cpu"
train_dtype = "float32"
lora_rank = 8
[tinker]
tinker_checkpoint_steps = 3
tinker_tenants = "{directory}/tenants.json"
[console]
console = false
"""
# Between a command's checkpoint and its outcome
BEFORE_OUTCOMES = ["after CommandWorker._tried load_weights", "after CommandWorker._tried unload_model"]
Loop = Callable[..., "subprocess.Popen[str]"]


def installed(packages: list[str], *, dependencies: bool = True) -> Path:
    """Returns a directory with packages of other people's clients, made where there is none."""
    path = ROOT / ".venv" / "clients" / packages[0].replace("==", "-")
    if not (path / "ready").is_file():
        installing = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(path), *packages]
        done = subprocess.run(installing + ["--no-deps"] * (not dependencies), capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"the registry does not give {packages[0]}: {done.stderr.strip().splitlines()[-1]}")
        (path / "ready").touch()
    return path


@pytest.fixture(scope="module")
def sdk() -> Path:
    return installed([SDK])


def endpoint(run: LaunchedRun) -> str:
    """Returns a server's URL, once it serves."""
    end = time.monotonic() + 300
    while not (found := re.search(r"TINKER_BASE_URL=(\S+)", run.output.read_text())):
        assert run.process.poll() is None and time.monotonic() < end, run.said()
        time.sleep(0.2)
    return found[1]


@pytest.fixture(scope="module", params=[CONFIG])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[LaunchedRun, str]]:
    """A server, and its URL."""
    directory = tmp_path_factory.mktemp("serve")
    write_tiny_model(directory / "model")
    (directory / "serve.toml").write_text(request.param.format(directory=directory))
    (directory / "tenants.json").write_text(json.dumps(TENANTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests/support/kill_points"))
        patch.setenv("KILL_POINTS", str(directory / "kill"))
        with LaunchedRun(directory / "serve.toml", directory / "runs" / "serve", "serve", command="serve") as run:
            yield run, endpoint(run)


@pytest.fixture
def loop(sdk: Path, served: tuple[LaunchedRun, str]) -> Loop:
    run, url = served

    def start(name: str, steps: int) -> "subprocess.Popen[str]":
        command = [sys.executable, str(ROOT / "tests/clients/tinker_loops.py"), url, str(run.root.parents[1] / "model"), name, str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(sdk), "TINKER_TELEMETRY": "0"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=run.root)

    return start


def result(process: "subprocess.Popen[str]") -> Any:
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error[-4000:]
    return json.loads(out.splitlines()[-1])


def settled(run: LaunchedRun) -> dict[str, Any]:
    """Returns the audit's report once no command waits: the trainer may have died before it answered the last one, an unload."""
    end = time.monotonic() + 180
    while (report := audited(run))["waiting"] and time.monotonic() < end:
        time.sleep(1)
    return report


def audited(run: LaunchedRun) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "myxo", "audit", str(run.root), "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_loops_learn(loop: Loop) -> None:
    losses, margins = result(loop("supervised", 8)), result(loop("preferred", 5))
    assert losses[-1] < 0.5 * losses[0], losses
    assert margins[-1] > 2.0 > abs(margins[0]), margins


@pytest.mark.extra
def test_a_loop_of_rewards_learns(loop: Loop) -> None:
    rewards = result(loop("reinforced", 12))
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.15, rewards


def test_refusals_name_the_field_and_leave_the_client_at_work(loop: Loop) -> None:
    found = result(loop("refused", 1))
    assert found.pop("after") is True
    words = {
        "loss": "loss_fn: gspo", "token": "target_tokens: 700", "shape": "weights: shape", "setting": "loss_fn_config.beta",
        "step": "no gradient", "name": "path: '../up'", "rank": "lora_config.rank: 64", "model": "base_model: another",
        "weights": "no such weights", "key": "X-API-Key",
    }  # fmt: skip
    assert {name: text for name, text in found.items() if words[name] not in text} == {}
    assert all("user" in text.partition(":")[0] for name, text in found.items() if name != "key"), found


def test_a_server_that_no_client_asks_waits_for_commands(served: tuple[LaunchedRun, str]) -> None:
    """It has no buffer, and lacks none."""
    run, _ = served
    end, found = time.monotonic() + 60, ""
    while found != "commands of clients" and time.monotonic() < end:
        done = subprocess.run([sys.executable, "-m", "myxo", "status", str(run.root), "--json"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)["waiting_for"].partition(",")[0]
    assert found == "commands of clients"


def test_tenants_stay_apart_and_no_request_stops_the_server(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    run, _ = served
    found = result(loop("attacked", 1))
    # at once, of 300 tokens by 60, of 2 models, and of a byte: one state, which may be replaced
    saves = [True, False, False, False, True]
    assert found.pop("accepted") == {"forward": 5, "create_model": 2, "save_state": saves, "again": 2}
    assert found.pop("expired").startswith("RequestFailedError") and found.pop("whole_context") > 0
    words = {
        "their_state": "no such weights", "their_sampler": "no such weights", "their_session": "no such thing",
        "their_future": "no such thing", "their_samples": "no such thing", "their_model": "no such thing", "rank": "has rank and parts",
        "behind_unload": "it was unloaded",
        "nan": "advantages: nan",
        "lengths": "logprobs: shape", "long_name": "at most 128 bytes", "long_stop": "at most 65536", "empty_stop": "stop: ''",
        "same_number": "with another content",
    }  # fmt: skip
    assert {name: text for name, text in found.items() if words[name] not in text} == {}
    assert audited(run)["violations"] == []


@pytest.mark.extra(each=True)
def test_what_cannot_be_written_or_read_fails_its_command_alone(loop: Loop) -> None:
    found = result(loop("broken", 1))
    assert "save_weights: NotADirectoryError" in found["written"] and "the trainer ended at each attempt" in found["read"], found
    assert found["loss"] > 0 and found["saved"].endswith("/weights/y")


def test_an_adapter_that_a_given_up_request_has_loaded_is_served(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    run, _ = served
    process = loop("given_up", 1)
    assert process.stdout is not None
    path = next(run.root.rglob(f"sampler_weights/{process.stdout.readline().split('/')[2]}/s")).resolve()
    command = Path(f"/proc/{run.engine_of(run.child('services.rollout'))}/cmdline").read_text()
    directory = re.search(r"/[^\s\0:=]+/myxo-engine-\w+", command)
    assert directory is not None, command
    name = hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()
    with httpx.Client(transport=httpx.HTTPTransport(uds=f"{directory[0]}/http.sock"), timeout=60) as engine:
        assert engine.post("http://engine/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).json()["success"]
    (run.root / "loaded").touch()
    assert result(process) == 1


def answers(run: LaunchedRun) -> int:
    """Returns how many commands were carried out for the first time."""
    return sum(log.read_text(errors="replace").count('"replayed": false') for log in run.root.glob("logs/trainer*.log"))


def killed(run: LaunchedRun, process: "subprocess.Popen[str]", kills: int, rng: random.Random) -> int:
    """Kills endpoint or trainer until a loop has ended, as they start too; behind each third kill they get to answer. Returns how often."""
    done = 0
    while process.poll() is None and done < kills:
        time.sleep(rng.uniform(0.2, 2.0))
        assert run.process.poll() is None, run.said()
        try:
            run.kill(run.child(rng.choice(["services.gateway", "services.trainer"])))
        except (AssertionError, ProcessLookupError):
            continue  # it is being started
        done += 1
        before, end = answers(run), time.monotonic() + 180
        while done % 3 == 0 and process.poll() is None and answers(run) <= before:
            assert run.process.poll() is None and time.monotonic() < end, f"no answer behind kill {done}\n{run.said()}"
            time.sleep(0.2)
    return done


def killed_at(run: LaunchedRun, process: "subprocess.Popen[str]", points: list[str]) -> int:
    """Kills endpoint or trainer at each of some points, one after the other. Returns at how many."""
    point = run.root.parents[1] / "kill"
    for following in points:
        point.with_name("next").write_text(following)
        point.with_name("next").rename(point)
        end = time.monotonic() + 180
        while point.exists():
            runs = process.poll() is None or "unload_model" in following  # a client does not wait for its last command
            assert runs and time.monotonic() < end, f"{following}: not passed\n{run.said()}"
            time.sleep(0.05)
    return len(points)


def differences(found: list[Any], alone: list[Any]) -> list[str]:
    """Returns where each client got something else than alone: the first value and how many of its entries differ."""
    said = []
    for client, (own, expected) in enumerate(zip(found, alone, strict=True), 1):
        wrong = [(one, other) for one, other in zip(own, expected, strict=True) if one != other]
        if wrong:
            place = next(index for index, pair in enumerate(zip(*wrong[0], strict=True)) if pair[0] != pair[1])
            first = f"value {place} is {wrong[0][0][place]!r}, alone {wrong[0][1][place]!r}"
            said.append(f"client {client}, {wrong[0][0][0]}: {first}; {len(wrong)} of {len(own)} entries differ")
    return said


def compare(run: LaunchedRun, loop: Loop, steps: int, alone: list[Any], kill: Callable[["subprocess.Popen[str]"], int]) -> None:
    """Compares what two clients get at once, through kills, with what each got alone."""
    at_once = loop("together", steps)
    assert at_once.stdout is not None
    at_once.stdout.readline()  # the SDK gives up sooner where it begins than later
    done = kill(at_once)
    assert differences(result(at_once), alone) == [], f"after {done} kills\n{run.said()}"
    report = settled(run)
    assert (report["ok"], report["waiting"], report["violations"]) == (True, 0, [])
    assert "replay_differs" not in run.said()


@pytest.mark.extra
def test_two_clients_at_once_killed_at_chosen_points_get_what_each_gets_alone(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    run, _ = served
    alone = result(loop("alone", 8))
    assert any("gradient norm is" in each[1] and "no gradient" in each[2] for each in alone[0] if "refusals" in each[0]), alone[0]
    points = [
        "after CommandWorker._tried optim_step",  # its outcome is lost
        "after CommandLog.append save_weights_for_sampler",  # the SDK sends it again, and numbers the sampler anew
        "before CommandWorker._checkpoint",
        *BEFORE_OUTCOMES,
    ]
    compare(run, loop, 8, alone, lambda process: killed_at(run, process, points))


@pytest.mark.extra
def test_twenty_kills_lose_and_double_nothing(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    alone = result(loop("alone", 120))
    compare(served[0], loop, 120, alone, lambda process: killed(served[0], process, 20, random.Random(5)))


@pytest.mark.extra
def test_a_stop_and_a_start_continue_every_client(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    run, _ = served
    servers = run.directory.servers()
    assert servers is not None
    with redis.Redis.from_url(servers.redis_url) as store:  # a request that has its outcome is freed
        kept = [key.decode() for key in store.scan_iter(f"{run.run}:command:*:request-*")]
    assert [key for key in kept if ":sample:" in key] == [], kept
    before = audited(run)
    run.kill(run.child("services.trainer"))
    run.kill(run.child("services.gateway"))
    assert result(loop("supervised", 2))
    assert audited(run)["commands"] > before["commands"]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(120) == 128 + signal.SIGTERM


@pytest.mark.extra(each=True)
@pytest.mark.parametrize("served", [CONFIG.replace("lora_rank = 8\n", "")], indirect=True)
def test_one_client_trains_the_whole_model_through_kills(served: tuple[LaunchedRun, str], loop: Loop) -> None:
    run, _ = served
    alone = result(loop("whole", 10))
    assert alone["losses"][-1] < 0.2 * alone["losses"][0], alone
    assert alone["answers"] == [[20 + left + right] for left in range(4) for right in range(4)]
    assert alone["apart"] < 1e-4 and alone["same"] and "user" in alone["second"] and "the whole model is trained" in alone["second"], alone
    through = loop("whole", 10)
    assert through.stdout is not None
    through.stdout.readline()
    done = killed_at(run, through, ["after CommandWorker._tried optim_step", *BEFORE_OUTCOMES])
    found = result(through)
    assert (found["losses"], found["answers"], found["same"]) == (alone["losses"], alone["answers"], True), f"after {done} kills"
    report = settled(run)
    assert done == 3 and (report["ok"], report["waiting"]) == (True, 0) and "replay_differs" not in run.said()
