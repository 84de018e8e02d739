"""Files in slime's manner, run as they are by the rollout and the reward service over a real engine; slime's own where they are at hand.

``SLIME_EXAMPLES=DIRECTORY pytest tests/integration/engine/test_compat.py`` runs the examples of a checkout of slime, too.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.reward.custom_functions import Functions
from shared.schema.messages import Sampling
from shared.schema.sample import Sample, Score
from tests.integration.engine.bench import Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.reference import log_probs
from tests.support.service_process import ROOT

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
SLIME = os.environ.get("SLIME_EXAMPLES")
SHORT = Sampling(temperature=1.0, max_new_tokens=12, stop_token_ids=[])

Generated = Callable[..., Awaitable[tuple[Bench, list[Sample]]]]


@pytest.fixture
async def search_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """A server of documents; what it was asked."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"result": [[{"document": {"contents": "forty-two"}}, {"document": {"contents": "a number"}}]]})

    app = web.Application()
    app.router.add_post("/retrieve", answer)
    server = TestServer(app)
    await server.start_server()
    monkeypatch.setenv("SEARCH_URL", str(server.make_url("/retrieve")))
    yield asked
    await server.close()


@pytest.fixture
def generated(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> Generated:
    """``await generated(path, directories, n=2, **rollout)``: the samples of a group by that function."""

    async def run(path: str, directories: tuple[Path, ...] = (), n: int = 2, **rollout: Any) -> tuple[Bench, list[Sample]]:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (*directories, ROOT))))
        named = ["SEARCH_URL"] if "SEARCH_URL" in os.environ else []
        rollout |= {"custom_generate_function_path": path, "generate_workers": 1}
        desk = await new_bench(rollout=rollout, reward={"rm_type": "math", "worker_environment": named})
        await desk.task(n=n, sampling=SHORT)
        _, samples = await desk.generated()
        return desk, samples

    return run


def check(checkpoint: Checkpoints, samples: list[Sample]) -> None:
    """Trained tokens have the engine's log-probs for exactly the tokens before them."""
    for one in samples:
        assert one.problem() is None
        assert one.mask.any()
        reference = np.where(one.mask, log_probs(checkpoint(0).model, one.prompt, one.response), 0)
        assert np.abs(reference - one.log_probs).max() < EXACT


async def scores(desk: Bench, path: str, samples: list[Sample], key: str | None = None) -> list[Score]:
    """What the reward function of the same file gives them."""
    settings = json.loads(desk.service.config.model_dump_json())
    settings["reward"] |= {"custom_rm_path": path}
    return await Functions(type(desk.service.config).model_validate(settings)).score(samples, key)


async def test_search(generated: Generated, checkpoint: Checkpoints, search_server: list[Any]) -> None:
    desk, samples = await generated("examples.compat.search.generate")
    check(checkpoint, samples)
    assert search_server[:2] == [{"queries": ["40+2="], "topk": 2}] * 2
    for one in samples:
        assert "forty-two" in one.prompt_text and one.attributes["searches"] == 0
    assert [score.reward for score in await scores(desk, "examples.compat.search.reward_func", samples)] == [0.0, 0.0]


async def test_calculator(generated: Generated, checkpoint: Checkpoints) -> None:
    desk, samples = await generated("examples.compat.calculator.generate")
    check(checkpoint, samples)
    for one in samples:
        assert one.attributes["payload_text"] == "40+2=" + one.text
    for score in await scores(desk, "examples.compat.calculator.reward_func", samples, "score"):
        assert score.reward <= -0.6 and score.parts["acc"] == 0.0


async def test_debate(generated: Generated, checkpoint: Checkpoints) -> None:
    _, samples = await generated("examples.compat.debate.generate_with_debate", rollout_max_response_len=12)
    check(checkpoint, samples)
    assert [one.rollout for one in samples] == [0] * 4 + [1] * 4
    assert [sorted(one.attributes["role"] for one in samples[at : at + 4]) for at in (0, 4)] == [["judge", *["solver"] * 3]] * 2
    assert all(one.given_reward is not None for one in samples)


OF_SLIME = {
    "search-r1": ("generate_with_search.generate", ("search-r1",)),
    "retool": ("generate_with_retool.generate", ("retool",)),
    "multi_agent": ("examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents", ("..",)),
    "strands_sglang": ("examples.strands_sglang.generate_with_strands.generate", ("..",)),
}


@pytest.mark.skipif(SLIME is None, reason="SLIME_EXAMPLES names no directory")
@pytest.mark.parametrize("name", OF_SLIME)
async def test_examples_of_slimes_own(generated: Generated, checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    path, places = OF_SLIME[name]
    (tmp_path / "examples").symlink_to(Path(str(SLIME)).resolve())  # beside slime's examples lies slime itself, which would win
    directories = tuple(tmp_path if place == ".." else Path(str(SLIME)).resolve() / place for place in places)
    longest = {} if name == "retool" else {"rollout_max_context_len": 256}  # its prompt alone has more characters, each a token here
    _, samples = await generated(path, directories, rollout_max_response_len=12, **longest)
    check(checkpoint, samples)
