"""Groups that agents play, over a real store and real processes; the turns are written by the agents themselves."""

import asyncio
import sys
import time
from typing import Any

import pytest

from shared.hooks import HookFailed
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.errors import ConfigError
from shared.schema.sample import Sample
from shared.sessions.session_store import SessionStore
from tests.integration.agents.conftest import AgentBench, NewAgentBench
from tests.support.agents import ASKED, SAID, SAID_THEN, TOOL, opens
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)

SHORT_S = 4
"""Of an agent that has little time: it is up while its engine sleeps."""


async def test_each_rollout_is_a_session_and_its_turns_are_a_sample(bench: NewAgentBench) -> None:
    desk = await bench("two_turns")
    samples, stopped = await desk.play(metadata={"level": 3})
    assert stopped is None
    for index, sample in enumerate(samples):
        assert (sample.index, sample.rollout, sample.finish, sample.label) == (index, index, "stop", "42")
        assert sample.prompt.tolist() == ASKED
        assert sample.response.tolist() == [*SAID, *TOOL, *SAID_THEN]
        assert sample.mask.tolist() == [1] * 2 + [0] * 3 + [1] * 3
        assert sample.log_probs.tolist() == [-0.5] * 2 + [0.0] * 3 + [-0.5] * 3
        assert sample.segments == [(0, 5, 0), (5, 8, 1)]
        assert sample.given_reward == {"reward": float(index), "format": 0.5}
        assert sample.metadata == {"round_number": 2, "level": 3}
        assert sample.text == desk.groups.tokenizer.decode(sample.response, skip_special_tokens=True)
    called = sorted(desk.calls(), key=lambda call: call["rollout"])
    assert [call["messages"] for call in called] == [[{"role": "user", "content": "40+2="}]] * 2
    assert [(call["label"], call["metadata"], call["evaluation"], call["group"]) for call in called] == [
        ("42", {"level": 3}, False, "g00000007")
    ] * 2
    assert len({call["api_key"] for call in called}) == 2
    assert not await opens(called[0]["base_url"], called[0]["api_key"]), "the session is over and its key opens it"


async def test_the_sessions_of_a_set_have_its_own_variables_for_the_chat_template(bench: NewAgentBench) -> None:
    own, run = {"enable_thinking": True}, {"enable_thinking": False, "date": "today"}
    sets = {"sets": [{"name": "own", "path": "p", "apply_chat_template_kwargs": own}, {"name": "runs", "path": "p"}]}
    desk = await bench("two_turns", data={"apply_chat_template_kwargs": run}, eval=sets)
    for group, variables in (("eval.own.0.0", {**own, "date": None}), ("eval.runs.0.0", {}), ("g00000007", {})):
        task = desk.task(group=group)
        session, _ = desk.groups.new_session(task, 0, 0)
        assert (session.variables, session.environment) == (variables, task.environment)


async def test_a_store_that_is_away_ends_no_group(bench: NewAgentBench, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionStore.__init__, "__defaults__", (0.1,))
    desk = await bench("plain")
    valkey.stop()
    playing = asyncio.create_task(desk.play())
    await asyncio.sleep(1.0)
    valkey.start()
    assert len((await playing)[0]) == 2


async def test_plain_functions_play_too(bench: NewAgentBench) -> None:
    desk = await bench("plain")
    samples, _ = await desk.play()
    assert [(sample.rollout, sample.given_reward, sample.response.tolist()) for sample in samples] == [(0, 1.0, SAID), (1, 1.0, SAID)]


async def test_what_an_agent_may_do_with_its_session(bench: NewAgentBench) -> None:
    """Leave scoring to the run; fork, each of whose samples trains its tokens once; end it, whose reward then counts; fail, and begin anew
    in a fresh one."""
    desk = await bench("named")

    async def played(number: int, function: str) -> list[Sample]:
        return (await desk.play(group=f"g{number:08d}", metadata={"as": function}))[0]

    samples = await played(1, "unscored")
    assert [(sample.rollout, sample.given_reward, sample.response.tolist()) for sample in samples] == [(0, None, SAID), (1, None, SAID)]
    samples = await played(2, "forks")
    assert [(sample.index, sample.rollout) for sample in samples] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [sample.given_reward for sample in samples] == [2.0] * 6
    carried, forked, own = samples[:3]
    assert carried.mask.tolist() == [1, 1, 0, 0, 0, 1, 1, 1]
    assert (forked.response.tolist(), forked.mask.tolist()) == ([*SAID, 30, 15], [0, 0, 0, 1])
    assert (own.prompt.tolist(), own.response.tolist(), own.mask.tolist()) == ([40, 41], [16], [1])
    assert [sample.given_reward for sample in await played(3, "ends_itself")] == [0.25, 0.25]
    before = len(desk.calls())
    samples = await played(4, "unlucky")
    assert [(sample.rollout, sample.response.tolist(), sample.given_reward) for sample in samples] == [(0, SAID, 1.0), (1, SAID, 1.0)]
    assert len(desk.calls()) == before + 4
    assert desk.service.metrics.values["agents_failed"] == 2
    assert await desk.left_open() == []


BAD = {
    "raises": "ZeroDivisionError: division by zero",
    "unspeakable": "Unspeakable: its text cannot be had",
    "silent": "it made no model call",
    "nan": "reward is nan; expected a finite number",
    "text": "a reward is 'good'; expected a finite number",
    "unnamed": "no reward is named reward; there are style",
    "hangs": "it did not end within agent_timeout = 2 s",
    "blocks": "it held up its process",
    "leaves": "process",
    "crashes": "process",
}


async def test_a_lost_rollout_costs_itself_alone_and_is_never_a_reward(bench: NewAgentBench) -> None:
    desk = await bench("bad", rollout={"agent_timeout": 2, "agent_tries": 2, "n_samples_per_prompt": 3})
    for number, kind in enumerate(BAD):
        samples, _ = await desk.play(3, group=f"g{number:08d}", metadata={"bad": [kind, [1]]})
        assert [(sample.index, sample.rollout, sample.given_reward) for sample in samples] == [(0, 0, 1.0), (1, 2, 1.0)], kind
    assert await desk.left_open() == []


ROLES = {"agent_roles": ["left", "right"]}


async def test_each_role_has_a_key_and_a_reward_of_its_own(bench: NewAgentBench) -> None:
    desk = await bench("duel", rollout=ROLES)
    samples, _ = await desk.play()
    assert [(sample.rollout, sample.role, sample.response.tolist()) for sample in samples] == [
        (0, "left", [*SAID, *TOOL, *SAID_THEN]),
        (0, "right", SAID),
        (1, "left", [*SAID, *TOOL, *SAID_THEN]),
        (1, "right", SAID),
    ]
    assert [sample.given_reward for sample in samples] == [
        {"left": 1.0, "reward": 1.0},
        {"right": -1.0, "reward": -1.0, "moves": 1.0},
        {"left": -1.0, "reward": -1.0},
        {"right": 1.0, "reward": 1.0, "moves": 1.0},
    ]
    assert [sample.role for sample in samples] == ["left", "right"] * 2
    assert len({key for call in desk.calls() for key in call["roles"].values()}) == 4
    assert len({sample.attributes["session_id"] for sample in samples}) == 4
    assert await desk.left_open() == []


async def test_a_roles_reward_may_be_shared_left_to_the_run_or_given_at_the_gateway(bench: NewAgentBench) -> None:
    desk = await bench("duel", rollout={**ROLES, "agent_tries": 1})
    for given, rewards in {
        "shared": [{"left": 1.0, "reward": 1.0}, {"right": 1.0, "reward": 1.0}],
        "scored": [{"left": 1.0, "reward": 1.0}, None],
        "ends": [{"left": 1.0, "reward": 1.0}, {"right": 0.5, "reward": 0.5}],
    }.items():
        samples, _ = await desk.play(metadata={"duel": given})
        assert [sample.given_reward for sample in samples[:2]] == rewards
    with pytest.raises(HookFailed, match="gave rewards of left; expected one of each role: left, right"):
        await desk.play(metadata={"duel": "half"})
    assert await desk.left_open() == []


async def test_an_agent_that_crashes_takes_no_try_of_those_beside_it(bench: NewAgentBench) -> None:
    desk = await bench("bad", rollout={"agent_tries": 1, "n_samples_per_prompt": 6, "min_rollouts": 5})
    samples, _ = await desk.play(6, metadata={"bad": ["crashes", [2]]})
    assert [sample.rollout for sample in samples] == [0, 1, 3, 4, 5]
    assert desk.service.metrics.values["agents_failed"] == desk.groups.lost == 1
    assert await desk.left_open() == []


async def test_a_group_with_too_few_rollouts_left_is_dead_with_the_reason(bench: NewAgentBench) -> None:
    desk = await bench("bad", rollout={"agent_tries": 2, "n_samples_per_prompt": 3})
    for number, kind in enumerate(("raises", "silent", "unnamed")):
        with pytest.raises(HookFailed, match=BAD[kind]) as caught:
            await desk.play(3, group=f"g{number:08d}", metadata={"bad": [kind, [0, 1]]})
        assert (caught.value.field, caught.value.path) == ("rollout.agent", "tests.support.agents:bad")
        assert "2 times in a row" in caught.value.reason
    assert await desk.left_open() == []


async def test_a_group_that_has_become_too_old_is_stopped_and_its_sessions_end(bench: NewAgentBench) -> None:
    desk = await bench("waits", rollout={"max_staleness": 0})
    playing = asyncio.create_task(desk.play())
    await until(lambda: len(desk.calls()) == 2 and desk.at_play() == 1, "one rollout at play, the other's end")
    desk.serve(1)
    client: Any = desk.replica.client
    await desk.in_flight.stop_stale(client, 1)
    samples, stopped = await asyncio.wait_for(playing, 60)
    assert stopped is not None and stopped.stale
    assert [(sample.rollout, sample.finish) for sample in samples] == [(0, "stop")]
    await until((desk.directory / "cancelled-1").exists, "the agent's cancellation")
    assert await desk.left_open() == []


@pytest.mark.extra
@pytest.mark.parametrize("command", [False, True])
async def test_no_time_of_an_agent_runs_while_its_engine_sleeps(bench: NewAgentBench, command: bool) -> None:
    """The trainer computes on the engine's GPUs for longer than an agent has; the agent continues then, and its session with it."""
    agent = {"agent_command": [sys.executable, "-m", "tests.support.command_agent"]} if command else {}
    desk = await bench(
        "" if command else "until_told", rollout={**agent, "agent_timeout": SHORT_S, "agent_tries": 1}, trainer={"colocate": True}
    )
    playing = asyncio.create_task(desk.play(metadata={"bad": ["until_told", [0, 1]]}))
    await until(lambda: opened(desk, 2), "sessions of both rollouts")
    desk.replica.served.asleep = True

    async def put_off() -> bool:
        sessions = [await desk.groups.sessions.find(call["api_key"]) for call in desk.calls()]
        return len(sessions) == 2 and all(one.deadline > one.session.deadline for one in sessions)

    await until(put_off, "later deadlines of both sessions, so that a gateway continues, too")
    await asyncio.sleep(1.5 * SHORT_S)
    assert not playing.done()
    (desk.directory / "go-on").touch()
    samples, stopped = await playing
    assert stopped is None and [one.rollout for one in samples] == [0, 1]


@pytest.mark.extra
async def test_an_agents_time_begins_once_its_sessions_are_open(bench: NewAgentBench, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = await bench("until_told", rollout={"agent_timeout": SHORT_S, "agent_tries": 1})
    begun, base_url = time.time(), desk.groups.gateways.base_url

    async def late() -> str:
        await asyncio.sleep(1.5)
        return await base_url()

    monkeypatch.setattr(desk.groups.gateways, "base_url", late)
    playing = asyncio.create_task(desk.play(n=1, metadata={"bad": ["until_told", [0]]}))
    await until(lambda: desk.calls(), "a call")
    [call] = desk.calls()
    assert (await desk.groups.sessions.find(call["api_key"])).deadline > begun + SHORT_S + 1.5
    (desk.directory / "go-on").touch()
    assert len((await playing)[0]) == 1


async def opened(desk: AgentBench, count: int) -> bool:
    names = desk.service.subjects.session_keys
    keys = [key async for key in desk.service.store._client.scan_iter(names)]
    return len([key for key in keys if b".opened-" not in key]) == count


async def test_a_replica_that_leaves_hands_on_whole_rollouts_and_the_others_begin_anew(bench: NewAgentBench) -> None:
    desk = await bench("waits")
    playing = asyncio.create_task(desk.play())
    await until(lambda: len(desk.calls()) == 2 and desk.at_play() == 1, "one rollout at play, the other's end")
    await desk.in_flight.leave(None)
    kept, stopped = await asyncio.wait_for(playing, 60)
    assert stopped is not None and not stopped.stale
    assert [(sample.rollout, sample.finish) for sample in kept] == [(0, "stop")]
    desk.in_flight.leaving = False
    desk.groups.settings.agent = "tests.support.agents:one_turn"
    samples, stopped, _ = await desk.group(desk.task(attempt=1), kept)
    assert stopped is None and [sample.rollout for sample in samples] == [0, 1]
    assert [call["rollout"] for call in desk.calls()] == [0, 1, 1], "the rollout that had ended was played again"


@pytest.mark.parametrize(("kind", "failed", "aborted"), [("hangs", 0, 1), ("raises", 1, 0)])
async def test_a_surplus_rollout_takes_the_place_of_a_late_one_and_of_one_that_failed(
    bench: NewAgentBench, kind: str, failed: int, aborted: int
) -> None:
    desk = await bench("bad", rollout={"n_samples_per_prompt": 2, "surplus_rollouts": 1})
    samples, stopped = await desk.play(2, metadata={"bad": [kind, [1]]})
    assert stopped is None and [(sample.index, sample.rollout, sample.given_reward) for sample in samples] == [(0, 0, 1.0), (1, 2, 1.0)]
    assert sorted(call["rollout"] for call in desk.calls()) == [0, 1, 2], "one that fails is not tried again while another is there"
    assert desk.played is not None
    came_to = (desk.played.aborted, desk.groups.lost, desk.service.metrics.values.get("agents_failed", 0))
    assert came_to in ((aborted, failed, failed), (1, 0, 0)), "the group may be complete before one has failed"
    assert await desk.left_open() == []
    samples, _ = await desk.play(2, group="eval.heldout.0.7", metadata={"bad": [kind, []]})
    assert [sample.rollout for sample in samples] == [0, 1], "held-out prompts have no surplus"


async def test_what_is_handed_on_counts_towards_a_complete_group(bench: NewAgentBench) -> None:
    desk = await bench("waits", rollout={"n_samples_per_prompt": 2, "surplus_rollouts": 2})
    playing = asyncio.create_task(desk.play())
    await until(lambda: len(desk.calls()) == 4 and desk.at_play() == 3, "three rollouts at play, the fourth one's end")
    await desk.in_flight.leave(None)
    kept, stopped = await asyncio.wait_for(playing, 60)
    assert stopped is not None and [sample.rollout for sample in kept] == [0]
    desk.in_flight.leaving = False
    desk.groups.settings.agent = "tests.support.agents:one_turn"
    samples, stopped, aborted = await desk.group(desk.task(attempt=1), kept)
    assert stopped is None and len(samples) == 2 and samples[0].rollout == 0 and aborted == 2
    assert await desk.left_open() == []


async def test_an_agent_that_cannot_be_called_is_refused_at_the_start(bench: NewAgentBench) -> None:
    with pytest.raises(ConfigError, match=r"expected a function of \(data, base_url, api_key\): too many positional arguments") as caught:
        await bench(rollout={"agent": "tests.support.agents:two_arguments"})
    assert caught.value.field == "rollout.agent"
