"""Groups that a command plays."""

import sys
from pathlib import Path

import pytest

from shared.hooks import HookFailed
from tests.integration.agents.conftest import NewAgentBench
from tests.support.agents import SAID
from tests.support.service_process import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

COMMAND = [sys.executable, "-m", "tests.support.command_agent"]

LONE = {"advantage_estimator": "reinforce_plus_plus"}
"""An objective that does not compare the rollouts of a group."""


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def test_a_command_plays_and_prints_its_reward(bench: NewAgentBench) -> None:
    desk = await bench(rollout={"agent_command": COMMAND})
    samples, _ = await desk.play(3, metadata={"bad": ["nothing", [1]]})
    rewards = [{"reward": 1.0, "format": 0.5}, None, {"reward": 1.0, "format": 0.5}]
    assert [(sample.rollout, sample.response.tolist(), sample.given_reward) for sample in samples] == [
        (index, SAID, reward) for index, reward in enumerate(rewards)
    ]
    assert {call["label"] for call in desk.calls()} == {"42"}
    assert await desk.left_open() == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("words", "its last line is no reward in JSON (a number, an object of numbers, or null): well done"),
        pytest.param("leaves", "ended with exit code 3: no licence", marks=pytest.mark.extra),
    ],
)
async def test_a_command_that_gives_no_reward_loses_its_rollout(bench: NewAgentBench, kind: str, words: str) -> None:
    desk = await bench(rollout={"agent_command": COMMAND, "agent_tries": 1})
    with pytest.raises(HookFailed) as caught:
        await desk.play(metadata={"bad": [kind, [0]]})
    assert words in str(caught.value)
    assert caught.value.field == "rollout.agent_command"


@pytest.mark.extra(each=True)
async def test_a_command_that_hangs_is_killed_with_all_that_it_started(bench: NewAgentBench) -> None:
    desk = await bench(rollout={"agent_command": COMMAND, "agent_tries": 1, "agent_timeout": 30, "min_rollouts": 1}, algorithm=LONE)
    samples, _ = await desk.play(metadata={"bad": ["hangs", [1]]})
    assert [sample.rollout for sample in samples] == [0]
    child = int((desk.directory / "child").read_text())
    await until(lambda: not Path(f"/proc/{child}").exists(), "the end of what the command started")


async def test_a_daemon_of_a_commands_goes_with_it(bench: NewAgentBench) -> None:
    """It has a session of its own, and holds the command's output open."""
    desk = await bench(rollout={"agent_command": COMMAND, "agent_tries": 1})
    samples, _ = await desk.play(metadata={"bad": ["daemon", [1]]})
    assert [sample.given_reward for sample in samples] == [{"reward": 1.0, "format": 0.5}] * 2
    daemon = int((desk.directory / "child").read_text())
    await until(lambda: not Path(f"/proc/{daemon}").exists(), "the end of the daemon")


@pytest.mark.extra(each=True)
async def test_a_command_may_print_whatever_it_likes_before_its_reward(bench: NewAgentBench) -> None:
    desk = await bench(rollout={"agent_command": COMMAND})
    samples, _ = await desk.play(metadata={"bad": ["talks", [0]]})
    assert [sample.given_reward for sample in samples] == [{"reward": 1.0, "format": 0.5}] * 2
