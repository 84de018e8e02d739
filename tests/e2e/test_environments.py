"""An environment of the package verifiers, in its own virtual environment, trains a policy in a whole run that one command starts.

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
from pathlib import Path

import pytest

from shared.process.embedded_servers import free_port
from tests.e2e.conftest import write_small_run
from tests.e2e.launched import ROOT, LaunchedRun
from tests.support.rollout_reader import RolloutReader
from tests.support.tiny_model import TinyModelShape, write_tiny_model

RUN_SECONDS = 900.0

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


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 900)
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
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
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
