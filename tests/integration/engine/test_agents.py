"""Agents over the whole way: the rollout service opens sessions, its agents ask a real gateway, and that a real engine."""

import sys
from pathlib import Path

import numpy as np
import pytest

from shared.schema.messages import Interrupted, Sampling
from shared.schema.sample import Sample
from tests.integration.engine.bench import Bench
from tests.integration.engine.conftest import Checkpoint, Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.reference import log_probs
from tests.support import agents
from tests.support.service_process import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4

MCP_CALCULATOR = [sys.executable, str(ROOT / "tests" / "support" / "mcp_calculator.py")]

SHORT = {"sampling": Sampling(temperature=1.0, max_new_tokens=10)}


def exact(sample: Sample, checkpoint: Checkpoint) -> None:
    """Asserts that the trained tokens' log-probs are the model's."""
    assert sample.problem() is None
    expected = log_probs(checkpoint.model, sample.prompt, sample.response)
    trained = sample.mask.astype(bool)
    assert trained.any()
    np.testing.assert_allclose(sample.log_probs[trained], expected[trained], atol=EXACT)


async def test_the_examples_play(room: NewHall, checkpoint: Checkpoints) -> None:
    """Each in a set of its own, but for the first, which plays the training groups."""
    command = [sys.executable, "examples/agents/command_agent.py"]
    own = {name: {"agent": f"examples.agents.{name}:run"} for name in ("anthropic_calculator", "panel")} | {
        "command": {"agent_command": command}
    }
    own["mcp"] = {"agent": "shared.agents.mcp_agent:play", "agent_options": {"servers": {"calculator": MCP_CALCULATOR}}}
    sets = [{"name": name, "path": "heldout.jsonl", **agent} for name, agent in own.items()]
    desk = (await room("examples.agents.openai_calculator:run", eval={"sets": sets})).desk
    for group in ("g00000007", *(f"eval.{name}.0.0" for name in own)):
        await desk.task(group, **SHORT)
    came = {
        found[0].group.split(".")[1] if found[0].group.startswith("eval") else "": found
        for found in [await desk.generated() for _ in range(1 + len(own))]
    }
    assert came.keys() == {"", *own}
    for name, (group, samples) in came.items():
        assert {one.rollout for one in samples} == {0, 1} and len(group.samples) == len(samples)
        for one in samples:
            exact(one, checkpoint(0))
            assert one.segments == [(0, len(one.response), 0)]
            assert (one.prompt_text, one.label, one.metadata["level"]) == ("40+2=", "42", 3)
            assert (set(one.given_reward) if isinstance(one.given_reward, dict) else one.given_reward) == REWARDS[name]
    for name in ("", "anthropic_calculator"):
        check_three_turns(desk, came[name][1])
    group, samples = came["panel"]
    assert group.rollouts == (0, 0, 0, 1, 1, 1)
    assert samples[0].prompt.tolist() == samples[1].prompt.tolist() != samples[2].prompt.tolist()
    assert [one.rollout for one in came["command"][1]] == [0, 1]


REWARDS = {
    "": {"reward", "right", "turns"},
    "anthropic_calculator": {"reward", "right", "turns"},
    "panel": {"reward", "solved"},
    "command": {"reward", "length"},
    "mcp": None,
}


def check_three_turns(desk: Bench, samples: list[Sample]) -> None:
    for rollout in (0, 1):
        own = [one for one in samples if one.rollout == rollout]
        assert {one.given_reward["turns"] for one in own} == {3.0}
        assert 3 <= sum(int(one.mask.sum()) for one in own) <= 30, "three turns were drawn, each token of them is trained once"
        assert " no. 40+2=" in "".join(desk.rollout._tokenizer.decode(one.prompt) + one.text for one in own)


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


async def test_a_group_that_is_too_old_ends_in_the_engine_too(room: NewHall) -> None:
    desk = (await room("examples.agents.openai_calculator:run", rollout={"max_staleness": 0})).desk
    await desk.task(sampling=Sampling(temperature=1.0, max_new_tokens=1800, min_new_tokens=1700))
    await until(lambda: desk.client.generating == 2, "both rollouts in the engine", 240)
    await desk.serve(1)
    outcome = await desk.outcome()
    assert isinstance(outcome, Interrupted) and outcome.stale and outcome.payload is None
    await until(lambda: desk.client.generating == 0, "the end of its requests in the engine", 60)
