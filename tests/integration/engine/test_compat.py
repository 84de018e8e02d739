"""Files in slime's manner, run as they are by the rollout and the reward service over a real engine; slime's own where they are at hand.

``SLIME_EXAMPLES=DIRECTORY pytest tests/integration/engine/test_compat.py`` runs the examples of a checkout of slime, too. What they need
besides (strands-agents and strands-sglang 0.4.2) may lie in a directory of its own, ``SLIME_PACKAGES``; without it their tests are skipped.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.reward.custom_functions import Functions
from shared.schema.messages import Sampling
from shared.schema.sample import Sample, Score
from shared.sessions.session_store import OPENED_SECONDS
from tests.integration.engine.bench import Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.reference import log_probs
from tests.support.service_process import ROOT

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
SLIME, PACKAGES = os.environ.get("SLIME_EXAMPLES"), os.environ.get("SLIME_PACKAGES")
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
    """``await generated(path, directories, n=2, prompt, **rollout)``: the samples of a group by that function."""

    async def run(
        path: str,
        directories: tuple[Path, ...] = (),
        n: int = 2,
        prompt: str = "40+2=",
        variables: Sequence[str] = (),
        metadata: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> tuple[Bench, list[Sample]]:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (*directories, ROOT))))
        named = [*variables, *(["SEARCH_URL"] if "SEARCH_URL" in os.environ else [])]
        rollout |= {"custom_generate_function_path": path, "generate_workers": 1}
        desk = await new_bench(rollout=rollout, reward={"rm_type": "math", "worker_environment": named})
        await desk.task(n=n, sampling=SHORT, prompt=prompt, **({} if metadata is None else {"metadata": metadata}))
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


@pytest.mark.extra(each=True)
async def test_calculator(generated: Generated, checkpoint: Checkpoints) -> None:
    desk, samples = await generated("examples.compat.calculator.generate")
    check(checkpoint, samples)
    for one in samples:
        assert one.attributes["payload_text"] == "40+2=" + one.text
    for score in await scores(desk, "examples.compat.calculator.reward_func", samples, "score"):
        assert score.reward <= -0.6 and score.parts["acc"] == 0.0


@pytest.mark.extra(each=True)
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


slimes_own = pytest.mark.skipif(SLIME is None, reason="SLIME_EXAMPLES names no directory")

TAU_BENCH = {
    "tau_bench/types.py": """
from pydantic import BaseModel, ConfigDict


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="allow")
    temperature: float = 0.0


class Action(BaseModel):
    name: str
    kwargs: dict


class Info(BaseModel):
    source: str = "user"


class Observed(BaseModel):
    observation: str
    info: Info = Info()
    reward: float = 0.0
    done: bool = False
""",
    "tau_bench/agents/base.py": "class Agent: pass\n",
    "tau_bench/agents/tool_calling_agent.py": """
from tau_bench.agents.base import Agent

RESPOND_ACTION_NAME = "respond"


class ToolCallingAgent(Agent):
    def __init__(self, tools_info, wiki, model, provider, temperature=0.0):
        self.tools_info, self.wiki, self.model, self.provider, self.temperature = tools_info, wiki, model, provider, temperature
""",
    "tau_bench/envs/__init__.py": """
from tau_bench.types import Observed


class Env:
    def __init__(self, task_index):
        call = {"name": "cancel", "description": "cancels", "parameters": {"type": "object", "properties": {}}}
        self.tools_info, self.wiki, self.task, self.turns = [{"type": "function", "function": call}], "rules", task_index, 0

    def reset(self, task_index):
        return Observed(observation=f"task {task_index}")

    def step(self, action):
        self.turns += 1
        done = self.turns == 2
        return Observed(observation="and?", reward=0.5 if done else 0.0, done=done)


def get_env(task_index, **_):
    return Env(task_index)
""",
    "tau_bench/__init__.py": "",
    "tau_bench/agents/__init__.py": "",
    "sitecustomize.py": """
import sys
import types


class FunctionCallParser:
    def __init__(self, tools, tool_call_parser):
        assert tool_call_parser == "qwen25" and [tool.function.name for tool in tools] == ["cancel"]

    def parse_non_stream(self, text):
        return text, []


class Fields(types.SimpleNamespace):
    pass


sys.modules["sglang.srt.function_call.function_call_parser"] = types.SimpleNamespace(FunctionCallParser=FunctionCallParser)
sys.modules["sglang.srt.managers.io_struct"] = types.SimpleNamespace(Function=Fields, Tool=Fields)
""",
}
"""tau-bench's own modules as far as slime's example uses them, with a user who says the same whatever he is told; and SGLang's tool parser,
which cannot be imported where there is no GPU, as it reads a text without calls."""


@slimes_own
@pytest.mark.parametrize("name", OF_SLIME)
async def test_examples_of_slimes_own(generated: Generated, checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    path, places = OF_SLIME[name]
    (tmp_path / "examples").symlink_to(Path(str(SLIME)).resolve())  # beside slime's examples lies slime itself, which would win
    if name == "strands_sglang" and PACKAGES is None:
        pytest.skip("SLIME_PACKAGES names no directory with strands-agents and strands-sglang")
    directories = tuple(tmp_path if place == ".." else Path(str(SLIME)).resolve() / place for place in places)
    directories += () if PACKAGES is None else (Path(PACKAGES),)
    longest = {} if name == "retool" else {"rollout_max_context_len": 256}  # its prompt alone has more characters, each a token here
    _, samples = await generated(path, directories, rollout_max_response_len=12, **longest)
    check(checkpoint, samples)


@slimes_own
async def test_slimes_search_with_its_log_probs_switched_off(generated: Generated, tmp_path: Path) -> None:
    (tmp_path / "switched_off.py").write_text(
        "import generate_with_search as search\nsearch.SEARCH_R1_CONFIGS['return_logprob'] = False\ngenerate = search.generate\n"
    )
    places = (tmp_path, Path(str(SLIME)).resolve() / "search-r1")
    _, samples = await generated("switched_off.generate", places, rollout_max_response_len=12, rollout_max_context_len=256, max_staleness=0)
    check_without_log_probs(samples)


E2B = {
    "e2b/__init__.py": """
import types

import aiohttp


class AsyncSandbox:
    sandbox_id = "box"

    @classmethod
    async def create(cls, **_):
        box = cls()
        box.commands = box.files = box
        return box

    async def kill(self):
        pass

    async def write(self, path, content, **_):
        pass

    async def run(self, command, user, envs=None, **_):
        if "setsid" in command and envs:
            await converse(envs["ANTHROPIC_BASE_URL"], envs["ANTHROPIC_AUTH_TOKEN"])
        found = "0" if command.startswith("test -f") else "a diff" if "diff" in command else ""
        return types.SimpleNamespace(exit_code=0, stdout=found, stderr="")


async def converse(url, key):
    messages = [{"role": "user", "content": "40+2="}]
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as session:
        for _ in range(2):
            async with session.post("/v1/messages", json={"model": "any", "max_tokens": 6, "messages": messages}) as answer:
                assert answer.status == 200, await answer.text()
                messages.append({"role": "assistant", "content": (await answer.json())["content"]})
            messages.append({"role": "user", "content": "and 1?"})
""",
    "e2b/sandbox/__init__.py": "",
    "e2b/sandbox/commands/__init__.py": "",
    "e2b/sandbox/commands/command_handle.py": "class CommandExitException(Exception): pass\n",
}
"""E2B's sandboxes as far as slime's agents use them: all commands do well, and the coding agent is a client of two turns."""


@slimes_own
async def test_slimes_coding_agents(hall: NewHall, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`slime.agent` is slime's own, from its checkout: what its adapters ask at the address of the engines are turns of the gateway."""
    for name, text in E2B.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tarball = tmp_path / "any.tgz"
    tarball.write_bytes(b"")
    variables = {"ADAPTER_PUBLIC_HOST": "127.0.0.1", "ADAPTER_PORT": "0", "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": "image"}
    variables |= {"SLIME_AGENT_NODE_TARBALL": str(tarball), "SLIME_AGENT_CC_TARBALL": str(tarball)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, Path(str(SLIME)).resolve().parent, ROOT))))
    metadata = {"image": "any", "workdir": "/repository", "eval_cmd": "true"}
    function = {"custom_generate_function_path": "examples.coding_agent_rl.generate.generate", "generate_workers": 1}
    worker = {"rm_type": "math", "worker_environment": list(variables)}
    room = await hall(gateway={"gateway_replicas": None}, rollout={**function, "rollout_max_context_len": 512}, reward=worker)
    await room.desk.task(n=2, sampling=SHORT, prompt="40+2=", metadata=metadata)
    _, samples = await room.desk.generated()
    check(checkpoint, samples)
    assert all(set(one.versions()[one.mask.astype(bool)].tolist()) == {0} for one in samples)
    opened = await room.sessions.opened(int(time.time() // OPENED_SECONDS), 0, 30)
    assert len(opened) == 2, "a session for each rollout"
    assert [one.given_reward for one in samples] == [1.0] * len(samples) and {one.rollout for one in samples} == {0, 1}
    assert all(one.metadata["agent_exit_code"] == 0 for one in samples)


@slimes_own
async def test_slimes_tau_bench(generated: Generated, tmp_path: Path) -> None:
    for name, text in TAU_BENCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    places = (tmp_path, Path(str(SLIME)).resolve() / "tau-bench")
    _, samples = await generated("generate_with_tau.generate", places, prompt="7", rollout_max_context_len=1024, max_staleness=0)
    check_without_log_probs(samples)
    assert [one.given_reward for one in samples] == [0.5, 0.5]
    assert all(0 in one.mask and "task 7" in one.prompt_text for one in samples), "two turns, and the user's words between them"


def check_without_log_probs(samples: list[Sample]) -> None:
    for one in samples:
        assert one.problem() is None
        assert one.mask.any() and one.log_probs is None
