"""Whole runs whose rollouts are played elsewhere: an environment of the package verifiers, a game, a rollout function of slime's.

VERIFIERS_PYTHON names the Python of such an environment (docs/agents.md); without it one is made, where pip reaches an index. The game is
`examples/environments/verifiers/duel.py`, or VERIFIERS_TASKSET, an installed taskset such as the package's own example kuhn_poker, with the
names of its agents in VERIFIERS_ROLES ([]: one plays) and more of its section in VERIFIERS_ENV, both in JSON. What an environment itself
needs, such as a server of OpenEnv's or NeMo-Gym's, is started before. With the tiny model a token is a character: CONTEXT are the most.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.environments.guessing.guessing import MOST_GUESSES
from shared.data.rollout_files import DIRECTORY
from shared.process.embedded_servers import free_port
from tests.e2e.conftest import write_small_run
from tests.e2e.launched import ROOT, LaunchedRun, trained
from tests.integration.environments.live import EnvironmentProcess
from tests.support.rollout_reader import RolloutReader
from tests.support.tiny_model import TinyModelShape, write_tiny_model

VERIFIERS_SECONDS = 900.0

CONTEXT = 8192

HERE = ROOT / "examples" / "environments" / "verifiers"
TASKSET = os.environ.get("VERIFIERS_TASKSET", "duel")
ROLES = json.loads(os.environ.get("VERIFIERS_ROLES", '["left", "right"]'))
CONFIG = os.environ.get("VERIFIERS_ENV", "{}")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment with verifiers 0.4 and uv."""
    if given := os.environ.get("VERIFIERS_PYTHON"):
        return given
    directory = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    installing = [str(directory / "bin" / "pip"), "install", "-q", "verifiers==0.4.0", "uv"]
    if subprocess.run(installing, timeout=600).returncode:
        pytest.skip("pip cannot install verifiers 0.4.0 here; VERIFIERS_PYTHON names an environment that has it")
    return str(directory / "bin" / "python")


@pytest.mark.extra(each=True)
@pytest.mark.timeout(VERIFIERS_SECONDS + 900)
def test_an_environment_of_verifiers_trains_from_its_own_environment(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, shape=TinyModelShape(max_positions=CONTEXT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(HERE))))
    monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    config, steps, port = write_small_run(tmp_path, model, "environment", steps=3, staleness=1), 3, free_port()
    own = [python, str(HERE / "serve.py")]
    environment = ["--taskset", TASKSET, "--env", CONFIG]
    rows = subprocess.run([*own, "tasks", *environment, "--count", "40"], check=True, capture_output=True, text=True, timeout=300)
    (tmp_path / "tasks.jsonl").write_text(rows.stdout)
    own_section = {
        "agent": "shared.agents.http_agent:play",
        "agent_service": [*own, "serve", *environment, "--tokenizer", str(model), "--port", str(port)],
        "agent_roles": ROLES,
    }
    text = config.read_text().replace("train.jsonl", "tasks.jsonl").replace("rollout_shuffle = true", 'label_key = ""')
    text = text.replace("[rollout]", "\n".join(["[rollout]", *(f"{name} = {json.dumps(value)}" for name, value in own_section.items())]))
    text = re.sub(r"\[eval\]\n.*\n", "", text) + f'[rollout.agent_options]\nurl = "http://127.0.0.1:{port}/play"\n'
    config.write_text(text)
    with LaunchedRun(config, tmp_path / "runs" / "environment", "environment") as run:
        summary = run.ended(steps, VERIFIERS_SECONDS)
    assert summary["groups"]["trained"] == 4 * steps
    records = list(RolloutReader(tmp_path / "runs" / "environment" / "rollouts").records(lambda head: head.status == "trained"))
    assert len(records) == 4 * steps
    rewards = [sample.parts for record in records for sample in record.samples]
    seen = [role for role in ROLES if any(role in parts for parts in rewards)]
    assert seen or not ROLES, "one that forfeits at once leaves the other without a turn"
    assert all(sample.reward is not None for record in records for sample in record.samples)
    print(f"{TASKSET}: {summary}", *(f"{one.rollout} {one.response!r} {one.parts}" for one in records[-1].samples), sep="\n")
    if TASKSET == "duel":  # in which both play, and what one wins the other loses
        assert seen == ROLES
        assert all(len(record.samples) == 2 * 4 for record in records)
        assert sum(sample.reward or 0.0 for record in records for sample in record.samples) == 0.0
        assert any(sample.reward for record in records for sample in record.samples)


RUN_SECONDS = 900
TURN_TOKENS = 2


@pytest.mark.extra(each=True)  # integration/engine plays episodes on an engine, integration/environments the game
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_episodes_are_trained(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The environment begins after the run, which waits for it."""
    steps, port, root = 2, free_port(), tmp_path / "runs" / "episodes"
    config = small_run("episodes", steps=steps, staleness=1)
    game = "examples.environments.guessing.guessing:GuessingGame"
    flags = ["--episode-url", f"http://127.0.0.1:{port}", "--episode-turn-tokens", str(TURN_TOKENS), "--rollout-max-response-len", "40"]
    with LaunchedRun(config, root, "episodes", flags) as run:
        served = [sys.executable, "-m", "myxo.main", "env", "run", game, "--port", str(port)]
        with EnvironmentProcess(served, tmp_path / "game.log", {}):
            summary = run.ended(steps, RUN_SECONDS)
    assert summary["mean_abs_logprob_diff"] < 1e-3
    trained = [record for record in RolloutReader(root / DIRECTORY).records() if record.step is not None]
    assert len(trained) == 4 * steps
    played = [(record.metadata if one.metadata is None else one.metadata, one) for record in trained for one in record.samples]
    for metadata, sample in played:
        turns = metadata["turns"]
        assert 1 <= turns <= MOST_GUESSES and len(sample.response) >= turns - 1, "an answer of the game stands between two turns"
        assert sample.reward == pytest.approx(1.0 - (turns - 1) / MOST_GUESSES) or (sample.reward, turns) == (0.0, MOST_GUESSES)


FLAGS = (
    "--rollout-function-path",
    "examples.compat.fully_async_rollout.generate_rollout",
    "--custom-rm-path",
    "examples.compat.fully_async_rollout.score",
    "--eval-function-path",
    "slime.rollout.sglang_rollout.generate_rollout",
)


@pytest.mark.extra(each=True)
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_a_fully_asynchronous_rollout_function_trains_and_its_deaths_lose_no_group(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 of the function's process, twice, and of the whole rollout service, while the run trains."""
    steps = 20
    config = small_run("kills", steps=steps, staleness=2)
    with LaunchedRun(config, tmp_path / "runs" / "kills", "kills", (*FLAGS, "--max-deliver", "20")) as run:
        reached = 0.0
        for victim in ("producer_process", "services.rollout", "producer_process"):
            cards = run.until(f"step {reached + 1}", lambda cards, reached=reached: trained(cards) > reached, RUN_SECONDS)
            reached = trained(cards)
            assert reached < steps, "the run ended before: make it longer"
            kill(run, victim)
        summary = run.ended(steps, RUN_SECONDS)
    assert summary["groups"]["trained"] == 4 * steps
    assert summary["max_staleness_seen"] <= 2
    assert any("rollout_function_ended" in log.read_text() for log in (tmp_path / "runs" / "kills" / "logs").glob("rollout*.log"))


def kill(run: LaunchedRun, victim: str) -> None:
    """Kills the process once it is there: it may just be starting again."""
    end = time.monotonic() + RUN_SECONDS
    while True:
        try:
            return run.kill(run.child(victim) if victim.startswith("services") else run.descendant(victim))
        except (AssertionError, ProcessLookupError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
