"""Agents over the whole way: the rollout service opens sessions, its agents ask a real gateway, and that a real engine."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.agents import openai_calculator
from examples.coding import coding_agent
from examples.search import search_agent
from services.gateway.chat_tokens import ChatTokens
from services.gateway.replicas import REFRESH_SECONDS
from shared.config import devices
from shared.sandbox import coding_tools
from shared.schema.messages import Generated, Interrupted, Sampling
from shared.schema.sample import Sample
from shared.schema.weight_messages import WeightsAsleep, WeightsReady, WeightsSleep, WeightsWake
from tests.integration.engine.bench import Bench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import Hall, NewHall
from tests.integration.engine.reference import log_probs
from tests.integration.sandbox.conftest import box  # noqa: F401
from tests.support import agents
from tests.support.taught_model import Conversation, teach, write_tools_tokenizer
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4

MCP_CALCULATOR = [sys.executable, "-m", "examples.agents.mcp_calculator"]

SHORT = {"sampling": Sampling(temperature=1.0, max_new_tokens=10)}


def exact(sample: Sample, model: torch.nn.Module) -> None:
    """Asserts that the trained tokens' log-probs are the model's."""
    assert sample.problem() is None
    expected = log_probs(model, sample.prompt, sample.response)
    trained = sample.mask.astype(bool)
    assert trained.any()
    np.testing.assert_allclose(sample.log_probs[trained], expected[trained], atol=EXACT)


EXAMPLES: dict[str, dict[str, Any]] = {
    "anthropic_calculator": {"agent": "examples.agents.anthropic_calculator:run"},
    "panel": {"agent": "examples.agents.panel:run"},
    "command": {"agent_command": [sys.executable, "examples/agents/command_agent.py"]},
    "mcp": {"agent": "shared.agents.mcp_agent:play", "agent_options": {"servers": {"calculator": MCP_CALCULATOR}}},
    "search": {"agent": "examples.search.search_agent:run", "agent_options": {"results": 1}},
    "coding": {"agent": "examples.coding.coding_agent:run"},
}
"""Each plays a set of its own. The training groups have openai_calculator."""

REWARDS = {
    "": {"reward", "right", "turns"},
    "anthropic_calculator": {"reward", "right", "turns"},
    "panel": {"reward", "solved"},
    "command": {"reward", "length"},
    "mcp": None,
    "search": {"reward", "right", "searches"},
}


@pytest.fixture
async def examples(room: NewHall, checkpoint: Checkpoints, tmp_path: Path) -> tuple[Hall, ChatTokens]:
    """All of the examples in one run, whose model's chat form has tools; and that form."""
    model = tmp_path / "model"
    model.mkdir()
    checkpoint(0).model.save_pretrained(model)
    chat = write_tools_tokenizer(model)
    corpus = tmp_path / "documents.jsonl"
    corpus.write_text('{"text": "kim is tall"}\n{"text": "tom is wise"}\n')
    EXAMPLES["search"]["agent_options"]["corpus"] = str(corpus)
    sets = [{"name": name, "path": "heldout.jsonl", **agent} for name, agent in EXAMPLES.items()]
    return await room("examples.agents.openai_calculator:run", eval={"sets": sets}, model={"hf_checkpoint": str(model)}), chat


async def came(desk: Bench, count: int) -> dict[str, tuple[Generated, list[Sample]]]:
    """The next groups, by the name of their example."""
    found = [await desk.generated() for _ in range(count)]
    return {group.group.split(".")[1] if group.group.startswith("eval") else "": (group, samples) for group, samples in found}


@pytest.mark.extra
@pytest.mark.usefixtures("box")
async def test_the_examples_play(examples: tuple[Hall, ChatTokens], checkpoint: Checkpoints) -> None:
    """First with a model that says anything, then with one that has learned to use their tools."""
    room, chat = examples
    desk = room.desk
    for name in REWARDS:
        await desk.task(f"eval.{name}.0.0" if name else "g00000007", **SHORT)
    drawn = await came(desk, len(REWARDS))
    assert drawn.keys() == REWARDS.keys()
    for name, (group, samples) in drawn.items():
        assert {one.rollout for one in samples} == {0, 1} and len(group.samples) == len(samples)
        for one in samples:
            exact(one, checkpoint(0).model)
            assert one.segments == [(0, len(one.response), 0)]
            assert (one.prompt_text, one.label, one.metadata["level"]) == ("40+2=", "42", 3)
            assert (set(one.given_reward) if isinstance(one.given_reward, dict) else one.given_reward) == REWARDS[name]
    for name in ("", "anthropic_calculator"):
        check_three_turns(desk, drawn[name][1])
    group, samples = drawn["panel"]
    assert group.rollouts == (0, 0, 0, 1, 1, 1)
    assert samples[0].prompt.tolist() == samples[1].prompt.tolist() != samples[2].prompt.tolist()
    assert [one.rollout for one in drawn["command"][1]] == [0, 1]

    played = scripts(chat)
    model = teach(checkpoint(0).model, [script for script, _, _ in played.values()])
    await room.pushed(model, 1)
    greedy = Sampling(temperature=0.0, max_new_tokens=150)
    for name, (script, label, _) in played.items():
        prompt = next(one["content"] for one in script.messages if one["role"] == "user")
        await desk.task(f"eval.{name}.1.0" if name else "g00000008", n=1, prompt=prompt, label=label, min_version=1, sampling=greedy)
    for name, (_, [sample]) in (await came(desk, len(played))).items():
        script, _, reward = played[name]
        tokens, learned = script.tokens()
        assert [*sample.prompt.tolist(), *sample.response.tolist()] == tokens, "one trajectory, of the very tokens"
        assert sample.mask.tolist() == learned[len(sample.prompt) :]
        assert sample.given_reward == reward


def check_three_turns(desk: Bench, samples: list[Sample]) -> None:
    for rollout in (0, 1):
        own = [one for one in samples if one.rollout == rollout]
        assert {one.given_reward["turns"] for one in own} == {3.0}
        assert 3 <= sum(int(one.mask.sum()) for one in own) <= 30, "three turns were drawn, each token of them is trained once"
        assert " no. 40+2=" in "".join(desk.rollout._tokenizer.decode(one.prompt) + one.text for one in own)


def scripts(chat: ChatTokens) -> dict[str, tuple[Conversation, str, Any]]:
    """What the model learns to say to the examples with tools, the label of the prompt, and the reward that it has for it."""

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"name": name, "arguments": arguments}

    def tool(text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "call", "content": text}

    calculator = Conversation(openai_calculator.TOOLS, [user("40+2=")])
    calculator.taught(chat, call("calculate", expression="40+2"), tool("42")).taught(chat, "7", user(" no. 40+2=")).taught(chat, "42")
    mcp = Conversation(openai_calculator.TOOLS, [user("40+2=")])
    mcp.taught(chat, call("calculate", expression="40+2"), tool("42")).taught(chat, "7")
    search = Conversation(search_agent.TOOLS, [user("who is tall?")])
    search.taught(chat, call("search", query="tall"), tool("kim is tall\n")).taught(chat, "kim")
    coding = Conversation(coding_tools.TOOLS, [{"role": "system", "content": coding_agent.SYSTEM}, user("Write add.")])
    coding.taught(chat, call("write_file", path="solution.py", content="def add(a, b): return a - b"), tool("wrote solution.py"))
    coding.taught(chat, call("run_tests"), tool("0 of 1 tests passed\ntest 1 gave another result"))
    coding.taught(chat, call("edit_file", path="solution.py", old="-", new="+"), tool("wrote solution.py")).taught(chat, "Done.")
    third = {"reward": 0.8, "right": 1.0, "turns": 3.0}
    return {
        "": (calculator, "42", third),
        "anthropic_calculator": (calculator, "42", third),
        "mcp": (mcp, "42", None),
        "search": (search, "kim", {"reward": 0.95, "right": 1.0, "searches": 1.0}),
        "coding": (coding, "assert add(1, 2) == 3", {"reward": 1.0, "solved": 1.0, "turns": 4.0}),
    }


async def test_an_episode_goes_on_over_a_push(room: NewHall, checkpoint: Checkpoints, tmp_path: Path) -> None:
    played = await room("tests.support.agents:over_a_push")
    await played.desk.task(n=1, **SHORT)
    await until(lambda: agents.calls(tmp_path), "the end of the first turn", 240)
    await played.pushed(checkpoint(1).model, 1)
    (tmp_path / "go_on").touch()
    _, samples = await played.desk.generated()
    drawn: list[int] = []
    for one in samples:
        versions, trained = one.versions(), one.mask.astype(bool)
        assert one.given_reward is None
        expected = [log_probs(checkpoint(version).model, one.prompt, one.response) for version in (0, 1)]
        wanted = np.where(versions == 0, *expected)
        np.testing.assert_allclose(one.log_probs[trained], wanted[trained], atol=EXACT)
        drawn += versions[trained].tolist()
    assert sorted(set(drawn)) == [0, 1] and drawn == sorted(drawn)


@pytest.mark.extra
async def test_a_turn_waits_while_the_trainer_computes_on_the_engines_device(
    room: NewHall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has released its weights as on a GPU, so that no replica serves, for longer than a turn waits otherwise."""
    monkeypatch.setattr(devices, "engines_release", lambda config: True)
    wait = 0.5
    sections = {"trainer": {"colocate": True, "train_device": "cpu"}, "gateway": {"gateway_wait": wait}}
    played = await room("tests.support.agents:over_a_push", rollout={"rollout_device": "cpu", "max_staleness": 9}, **sections)
    desk = played.desk
    await desk.client.adopt(0, {})
    await desk.task(n=1, **SHORT)
    await until(lambda: agents.calls(tmp_path), "the end of the first turn", 240)
    await desk.ask("sleep", WeightsSleep(lasts=240, deadline=240), WeightsAsleep)
    await asyncio.sleep(4 * REFRESH_SECONDS)  # the gateway knows of no replica any more
    (tmp_path / "go_on").touch()
    await asyncio.sleep(6 * wait)  # its time would be over
    assert len(agents.calls(tmp_path)) == 1 and desk.service.status().engine == ""
    await desk.rollout.weights.colocation.make_room(240)
    await desk.client.set_weight_version(1)  # as a push in the trainer's turn does
    await desk.replica.serve(1)
    await desk.ask("wake", WeightsWake(deadline=240), WeightsReady)
    _, samples = await desk.generated()
    assert len(agents.calls(tmp_path)) == 2, "no rollout began anew"
    assert {version for one in samples for _, _, version in one.segments} == {0, 1}


async def test_a_group_that_is_too_old_ends_in_the_engine_too(room: NewHall) -> None:
    desk = (await room("examples.agents.openai_calculator:run", rollout={"max_staleness": 0})).desk
    await desk.task(sampling=Sampling(temperature=1.0, max_new_tokens=1800, min_new_tokens=1700))
    await until(lambda: desk.client.generating == 2, "both rollouts in the engine", 240)
    await desk.serve(1)
    outcome = await desk.outcome()
    assert isinstance(outcome, Interrupted) and outcome.stale and outcome.payload is None
    await until(lambda: desk.client.generating == 0, "the end of its requests in the engine", 60)
