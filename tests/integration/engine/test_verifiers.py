"""An environment of the package `verifiers`, in its own virtual environment, plays rollouts over the gateway, token by token.

    VERIFIERS_PYTHON=VENV/bin/python VERIFIERS_TASKSET=glossary python -m pytest -m extra tests/integration/engine/test_verifiers.py

The environment has verifiers 0.4, uv (for its harnesses) and the taskset's package; docs/agents.md says how to make it. VERIFIERS_ENV is
more of its ``[env]`` section in JSON, by default one agent with the harness null; VERIFIERS_ROLES the agents that play together, in JSON. A
harness with tools takes a model that has a renderer of its own, which the tiny one has not.
"""

import asyncio
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from shared.schema.messages import Sampling
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.reference import log_probs
from tests.support.service_process import ROOT

PYTHON, TASKSET = os.environ.get("VERIFIERS_PYTHON", ""), os.environ.get("VERIFIERS_TASKSET", "")
SERVE = ROOT / "examples" / "environments" / "verifiers" / "serve.py"
CONFIG = os.environ.get("VERIFIERS_ENV", '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}')
ROLES = json.loads(os.environ.get("VERIFIERS_ROLES", "[]"))
ENVIRONMENT = ["--taskset", TASKSET, "--env", CONFIG]

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (PYTHON and TASKSET), reason="VERIFIERS_PYTHON and _TASKSET"),
]


async def test_an_environment_plays_as_it_is(room: NewHall, checkpoint: Checkpoints, tmp_path: Path) -> None:
    listed = await asyncio.create_subprocess_exec(PYTHON, str(SERVE), "tasks", *ENVIRONMENT, "--count", "2", stdout=asyncio.subprocess.PIPE)
    rows = [json.loads(line) for line in (await listed.communicate())[0].splitlines()]
    assert len(rows) == 2
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    served = await asyncio.create_subprocess_exec(
        *(PYTHON, str(SERVE), "serve", *ENVIRONMENT, "--port", "0", "--tokenizer", str(checkpoint(0).path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
    )
    try:
        assert served.stdout is not None
        said = (await asyncio.wait_for(served.stdout.readline(), 300)).decode()
        url = re.search(r"http://\S+/play", said)
        assert url, said
        rollout = {"agent_options": {"url": url[0]}, "agent_timeout": 600, "agent_roles": ROLES}
        desk = (await room("shared.agents.http_agent:play", rollout=rollout)).desk
        row = rows[1]
        await desk.task(prompt=row["prompt"], metadata=row["metadata"], sampling=Sampling(temperature=1.0, max_new_tokens=12))
        _, samples = await desk.generated()
        assert len(samples) >= 2 and {one.rollout for one in samples} == {0, 1}
        assert {one.role for one in samples} <= set(ROLES or [""])
        for one in samples:
            assert isinstance(one.given_reward, dict) and isinstance(one.given_reward["reward"], float)
            trained = one.mask.astype(bool)
            assert trained.any() and one.segments == [(0, len(one.response), 0)]
            expected = log_probs(checkpoint(0).model, one.prompt, one.response)
            np.testing.assert_allclose(one.log_probs[trained], expected[trained], atol=1e-4)
            print(desk.rollout._tokenizer.decode(one.prompt)[-300:], "|", one.text, one.given_reward)
    finally:
        served.terminate()
        await served.wait()
