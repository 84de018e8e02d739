"""The rollout service with a function of the user's own, over real servers and a real engine."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from examples.hooks import arithmetic
from services.rollout import custom_generate
from services.rollout.agent_groups import UNRECORDED, CallSession
from shared.runtime.errors import ConfigError
from shared.schema import sample
from shared.schema.messages import Failed, Generated, Interrupted, Sampling
from shared.schema.sample import Sample
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.load import load
from tests.integration.engine.reference import log_probs
from tests.support import generate_hooks
from tests.support.generate_hooks import FIRST_TURN, SECOND_TURN, TOOL, calls, tell, told
from tests.support.scripted_replica import scripted_replica
from tests.support.service_process import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-5


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test and its functions tell each other what they do."""
    monkeypatch.setenv(generate_hooks.DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def bench(new_bench: NewBench) -> NewBench:
    """``bench("function")``: at work with that function of `tests.support.generate_hooks`, or of the module before a colon."""

    async def make(function: str, **sections: dict[str, Any]) -> Bench:
        path = function if ":" in function else f"tests.support.generate_hooks:{function}"
        sections.setdefault("rollout", {})["custom_generate_function_path"] = path
        sections["rollout"].setdefault("generate_workers", 1)
        sections.setdefault("reward", {}).setdefault("worker_environment", [generate_hooks.DIRECTORY])
        return await new_bench(**sections)

    return make


async def test_turns_and_a_tool_between_them(bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await bench("two_turns")
    await desk.task()
    group, samples = await desk.generated()
    assert (group.group, group.rollouts, group.replica) == ("g00000007", (), "rollout-1")
    length = FIRST_TURN + len(TOOL) + SECOND_TURN
    assert [meta.tokens for meta in group.samples] == [length] * 2
    for number, one in enumerate(samples):
        assert (one.index, one.rollout, one.label, one.prompt_text) == (number, number, "42", "40+2=")
        assert one.metadata == {"level": 3, "turns": 2}
        assert one.prompt.tolist() == PROMPT.tolist()
        assert one.response[FIRST_TURN : FIRST_TURN + len(TOOL)].tolist() == TOOL
        assert one.mask.tolist() == [1] * FIRST_TURN + [0] * len(TOOL) + [1] * SECOND_TURN
        assert one.segments == [(0, length, 0)]
        assert (one.finish, "[tool]" in one.text) == ("length", True)
        assert len(one.turns) == 2 and one.text == "[tool]".join(one.turns), "what is scored is the model's own"
        reference = np.where(one.mask, log_probs(checkpoint(0).model, PROMPT, one.response), 0)
        assert np.abs(reference - one.log_probs).max() < EXACT
    assert samples[0].response.tolist() != samples[1].response.tolist()


@pytest.mark.parametrize("function", ["two_turns", None])
async def test_sample_hooks_see_what_was_generated_one_after_another(new_bench: NewBench, function: str | None) -> None:
    """By the user's function or by the engine alone."""
    here = "tests.support.generate_hooks"
    rollout: dict[str, Any] = {"rollout_sample_hook_path": [f"{here}:noting_hook", f"{here}.masking_hook"], "generate_workers": 1}
    rollout |= {"custom_generate_function_path": f"{here}:{function}"} if function else {}
    desk = await new_bench(rollout=rollout, reward={"worker_environment": [generate_hooks.DIRECTORY]})
    await desk.task(sampling=Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=[]))
    _, samples = await desk.generated()
    step = 7 // desk.service.config.rollout.rollout_batch_size
    for one in samples:
        ended = "truncated" if one.finish == "length" else "completed"
        assert one.metadata["seen"] == [step, False, ended]
        assert not one.mask[0] and one.mask[1] and len(one.log_probs) == len(one.response)


REFUSED = {
    "shifted_by_two": f"response_length is {FIRST_TURN}, but tokens has {FIRST_TURN + 2} behind the prompt",
    "tool_without_mask": f"loss_mask: 2 trained tokens, the first at {FIRST_TURN} of the response, are none that the engine sampled",
    "without_log_probs": "rollout_log_probs is missing",
    "nothing": "gave a NoneType; expected a slime.utils.types.Sample",
    "raising": "ValueError: the tool is broken; it failed 5 times in a row",
    "leaving": "SystemExit: 3",
    "cancelling": "cancelled itself",
}
"""Functions, and why their groups are given up."""


async def test_what_does_not_fit_costs_its_group_with_the_reason(bench: NewBench) -> None:
    """What is not what the engine sampled is refused by its field; what fails is tried again first."""
    desk = await bench("of_label")
    ids = {f"g{number:08d}": function for number, function in enumerate(REFUSED)}
    with capture_logs() as logs:
        for group, function in ids.items():
            await desk.task(group, n=1, label=function)
        ended = [await desk.outcome() for _ in ids]
    assert all(isinstance(one, Failed) for one in ended) and {one.group for one in ended} == set(ids), ended
    for one in ended:
        function = ids[one.group]
        assert REFUSED[function] in one.reason, one.reason
        named = "rollout.custom_generate_function_path = tests.support.generate_hooks:of_label: "
        assert function == "without_log_probs" or named in one.reason
        assert ("sample " in one.reason) == (function in list(REFUSED)[:3])
        if function not in list(REFUSED)[:2]:
            assert {line["log_level"] for line in logs if REFUSED[function].partition(";")[0] in line.get("error", "")} == {"error"}


async def played(desk: Bench, given: dict[str, int]) -> dict[str, tuple[Generated, list[Sample]]]:
    """Groups of so many rollouts each, by the function that made them."""
    for number, (function, n) in enumerate(given.items()):
        await desk.task(f"g{number:08d}", n=n, label=function)
    return {list(given)[int(group.group[1:])]: (group, samples) for group, samples in [await desk.generated() for _ in given]}


async def test_what_the_engine_sampled_may_be_masked_out_or_several_samples(bench: NewBench) -> None:
    """A turn that is masked out is the model's own all the same."""
    found = await played(await bench("of_label"), {"masked_as_stale": 1, "fanned_out": 2})
    [masked] = found["masked_as_stale"][1]
    assert int(masked.mask.sum()) == SECOND_TURN and masked.text == "[tool]".join(masked.turns)
    group, samples = found["fanned_out"]
    assert group.rollouts == (0, 0, 1, 1)
    assert [(one.index, one.rollout) for one in samples] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [one.metadata for one in samples] == [{"turn": FIRST_TURN}, {"turn": SECOND_TURN}] * 2
    assert [one.prompt.tolist()[-1] for one in samples] == [FIRST_TURN, SECOND_TURN] * 2
    assert [meta.tokens for meta in group.samples] == [FIRST_TURN, SECOND_TURN] * 2


async def test_failures_and_aborts_are_tried_again_and_what_users_of_slime_give_is_kept(bench: NewBench) -> None:
    found = await played(await bench("of_label"), {"failing_once": 2, "of_other_enums": 1})
    assert [one.response.tolist() for one in found["failing_once"][1]] == [[7, 8], [7, 8]], "from the beginning"
    assert len(calls()) == 6
    [one] = found["of_other_enums"][1]
    assert (one.finish, one.given_reward, one.response.tolist()) == ("length", {"score": 0.5}, [7, 8])
    kept = {"tool_call_count": 3, "payload_text": "a payload", "train_metadata": {"loss": "own"}, "non_generation_time": 1.5}
    assert kept.items() <= one.attributes.items() and "lock" not in one.attributes


@pytest.mark.extra
async def test_a_failed_call_costs_no_tokens_of_those_before(bench: NewBench) -> None:
    desk = await bench("failing_later", rollout={"staleness_policy": "continue"})
    await desk.task(n=1)
    await desk.generated()
    assert [call["response_length"] for call in calls()] == [0, 1, 1]


@pytest.mark.extra
async def test_the_example_tells_a_wrong_answer_so(bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await bench("examples.hooks.arithmetic:second_try")
    await desk.task(n=4)
    _, samples = await desk.generated()
    twice = [one for one in samples if one.metadata.get("tries") == 2]
    assert twice, "a random model added right four times"
    for one in twice:
        before, words, _ = one.text.partition(" no. 40+2=")
        assert words and arithmetic.answer(before) != "42"
        assert 0 < int(one.mask.sum()) == len(one.mask) - len(words)
        reference = np.where(one.mask, log_probs(checkpoint(0).model, PROMPT, one.response), 0)
        assert np.abs(reference - one.log_probs).max() < EXACT
    assert {one.finish for one in samples} <= {"stop", "length"}


async def test_the_function_of_the_documentation(bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "documented_hook.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    desk = await bench("documented_hook:generate")
    await desk.task()
    _, samples = await desk.generated()
    assert [one.mask.all() for one in samples] == [True, True]
    assert [one.prompt.tolist() for one in samples] == [PROMPT.tolist()] * 2


async def test_a_sample_longer_than_a_micro_batch_is_cut(bench: NewBench) -> None:
    longest = len(PROMPT) + 1 + FIRST_TURN
    desk = await bench("fanned_out", rollout={"overlong_samples": "truncate"}, trainer={"max_tokens_per_gpu": longest})
    await desk.task()
    group, samples = await desk.generated()
    assert group.payload.tokens == (longest,) * 4
    assert [int(one.mask.sum()) for one in samples] == [FIRST_TURN] * 4
    assert [one.problem() for one in samples] == [None] * 4


@pytest.mark.parametrize(
    ("function", "segments"),
    [
        ("two_turns_with_a_break", [(0, FIRST_TURN, 0), (FIRST_TURN, FIRST_TURN + SECOND_TURN, 1)]),
        pytest.param("of_unknown_version", [(0, FIRST_TURN + SECOND_TURN, 0)], marks=pytest.mark.extra),
    ],
)
async def test_a_push_between_two_turns(bench: NewBench, function: str, segments: list[tuple[int, int, int]]) -> None:
    desk = await bench(function)
    await desk.task(n=1)
    await until(lambda: told("between"), "the end of the first turn")
    await desk.serve(1)
    tell("go_on")
    group, [one] = await desk.generated()
    assert one.segments == segments
    assert group.samples[0].oldest == 0


async def test_what_was_generated_before_a_fence_is_thrown_away(bench: NewBench) -> None:
    desk = await bench("two_turns_with_a_break")
    await desk.task(n=1)
    await until(lambda: told("between"), "the end of the first turn")
    await desk.replica.fence("a push failed")
    await desk.serve(1)  # within the bound: nobody stops it for its age
    tell("go_on")
    _, [one] = await desk.generated()
    assert one.segments == [(0, FIRST_TURN + SECOND_TURN, 1)]


async def test_a_plain_function_gets_what_slimes_get(bench: NewBench) -> None:
    desk = await bench("recorded")
    await desk.task("eval.heldout.3.12", n=1)
    _, [one] = await desk.generated()
    assert one.metadata["evaluation"] is True
    assert one.metadata["thread"] != "MainThread"
    parameters = one.metadata["parameters"]
    assert (parameters["temperature"], parameters["max_new_tokens"], parameters["no_stop_trim"]) == (1.0, 20, True)
    [given] = calls()
    assert [given[name] for name in ("group_index", "index", "rollout_id", "prompt", "label")] == [12, 12, 12, "40+2=", "42"]
    assert given["tokens"][: len(PROMPT)] == PROMPT.tolist()
    await desk.task("g00000008", n=1)
    _, [one] = await desk.generated()
    assert one.metadata["evaluation"] is False


@pytest.mark.extra
async def test_a_function_that_blocks_holds_up_nothing_else(bench: NewBench) -> None:
    desk = await bench("blocking")
    await desk.task(n=1)
    await until(lambda: told("between"), "the call")
    assert desk.replica.serving
    tell("go_on")
    _, [one] = await desk.generated()
    assert one.text == "ok"


@pytest.mark.parametrize(
    ("label", "seconds", "left", "calls_of_each"),
    [
        ("crash always", 60.0, [0, 2], ([2, 2, 2], [2, 2])),
        pytest.param("raise always", 60.0, [0, 2], ([1, 5, 1], [1, 1]), marks=pytest.mark.extra),
        pytest.param("cancel once", 60.0, [0, 1, 2], ([1, 2, 1], [1, 1]), marks=pytest.mark.extra),
        pytest.param("give up always", 60.0, [0, 1, 2], ([1, 1, 1], [1, 1]), marks=pytest.mark.extra),
        pytest.param("abort always", 60.0, [0, 2], ([1, 5, 1], [1, 1]), marks=pytest.mark.extra),
        pytest.param("hang always", 10.0, [0, 2], ([1, 1, 1], [1, 1]), marks=pytest.mark.extra),
        pytest.param("give what does not fit always", 60.0, [0, 2], ([1, 1, 1], [1, 1]), marks=pytest.mark.extra),
    ],
)
async def test_a_rollout_that_misbehaves_costs_itself(
    bench: NewBench, label: str, seconds: float, left: list[int], calls_of_each: tuple[list[int], list[int]]
) -> None:
    desk = await bench("misbehaving", rollout={"generate_timeout": seconds, "n_samples_per_prompt": 3})
    await desk.task("g00000007", n=3, label=label)
    await desk.task("g00000008", n=2, label="wait always")
    found = {group.group: samples for group, samples in [await desk.generated(), await desk.generated()]}
    assert [one.rollout for one in found["g00000007"]] == left
    assert [one.index for one in found["g00000007"]] == list(range(len(left)))
    assert [one.rollout for one in found["g00000008"]] == [0, 1]
    assert all(one.text == "ok" for one in [*found["g00000007"], *found["g00000008"]])
    made = [[sum(call["index"] == group * n + index for call in calls()) for index in range(n)] for group, n in ((7, 3), (8, 2))]
    assert made == list(calls_of_each)
    assert desk.rollout._custom.lost == 3 - len(left)
    rewards = [one.given_reward for one in found["g00000007"]]
    assert rewards == ([None, 0.25, None] if label == "give up always" else [None] * len(left))


@pytest.mark.extra
async def test_a_group_with_too_few_rollouts_left_is_dead_and_so_is_a_held_out_one_that_lacks_any(bench: NewBench) -> None:
    tell("misbehaved")
    desk = await bench("misbehaving", rollout={"n_samples_per_prompt": 3, "min_rollouts": 3})
    await desk.task("g00000007", n=3, label="raise always")
    await desk.task("g00000008", n=2, label="wait always")
    assert "ValueError: the tool is broken; it failed 5 times in a row" in await desk.failure()
    await desk.task("eval.heldout.3.7", n=3, label="give what does not fit always")
    assert "with a response_length of 10000" in await desk.failure()


@pytest.mark.extra
@pytest.mark.parametrize("function", ["hanging_plainly", "hanging"])
async def test_a_function_that_hangs_loses_its_group_at_its_deadline(bench: NewBench, function: str) -> None:
    desk = await bench(function, rollout={"generate_timeout": 1.0}, bus={"max_deliver": 2})
    await desk.task(n=1)
    assert await desk.failure() == "given up after 2 deliveries"
    assert len(calls()) == 2


@pytest.mark.extra
async def test_a_call_that_has_ended_waits_for_its_record(bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def recorded(_session: CallSession, _samples: object) -> tuple[int, bool]:
        await asyncio.sleep(9.0)
        return UNRECORDED

    monkeypatch.setattr(CallSession, "recorded", recorded)
    monkeypatch.setattr(custom_generate, "GRACE_SECONDS", 0.5)
    desk = await bench("two_turns", rollout={"generate_timeout": 8.0}, gateway={"gateway_replicas": 1})
    await desk.task()
    assert (await desk.generated())[0].group == "g00000007", "the store was away for longer than a call may take"


async def test_the_prompt_is_the_rendered_text_where_the_template_is_applied(bench: NewBench) -> None:
    desk = await bench("recorded", data={"apply_chat_template": True})
    await desk.task(n=1)
    await desk.generated()
    [given] = calls()
    assert given["prompt"] == desk.rollout._tokenizer.decode(PROMPT, skip_special_tokens=False) != "40+2="


LONG_TASK: dict[str, Any] = {"n": 16, "sampling": Sampling(temperature=1.0, max_new_tokens=400, stop_token_ids=[], stop=[])}


@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.extra)])
async def test_a_rollout_goes_on_from_its_tokens_at_another_replica(bench: NewBench, goes_on: bool, checkpoint: Checkpoints) -> None:
    desk = await bench("of_partial_rollouts", rollout={"staleness_policy": "continue" if goes_on else "drop"})
    group = await in_the_middle(desk)
    await desk.client.resume()
    await desk.rollout.in_flight.leave(desk.client)
    left = await desk.outcome()
    assert isinstance(left, Interrupted) and not left.stale
    parts = [] if left.payload is None else sample.decode(await desk.service.store.read(left.payload))
    assert any(one.finish == "abort" for one in parts) == goes_on
    desk.rollout.in_flight.leaving = False  # as in the next replica
    before = len(calls())
    await desk.task(group=group, attempt=1, partial=left.payload, **LONG_TASK)
    _, samples = await desk.generated()
    again = calls()[before:]
    if not goes_on:
        assert [(call["status"], call["response_length"]) for call in again] == [("pending", 0)] * len(again)
        return
    of_rollout = {part.rollout: part for part in parts}
    assert "aborted" in {call["status"] for call in again} and len(samples) == LONG_TASK["n"]
    for one in samples:
        assert one.finish in ("stop", "length")
        if (part := of_rollout.get(one.rollout)) is None:  # it was stopped before its first token
            continue
        assert one.response[: len(part.response)].tolist() == part.response.tolist()
        assert np.abs(log_probs(checkpoint(0).model, PROMPT, one.response) - one.log_probs).max() < EXACT
        assert one.attributes["parts"] == (2 if part.finish == "abort" else 1)


@pytest.mark.extra
async def test_a_rollout_that_is_too_old_is_stopped(bench: NewBench) -> None:
    desk = await bench("of_partial_rollouts", rollout={"max_staleness": 0, "staleness_policy": "drop"})
    group = await in_the_middle(desk)
    await desk.client.set_weight_version(1)
    await desk.client.resume()
    await desk.replica.serve(1)
    outcome = await desk.outcome()
    assert outcome == Interrupted(group=group, attempt=0, stale=True, replica="rollout-1")


async def in_the_middle(desk: Bench) -> str:
    """Has a group generated until the engine, paused in place, is in the middle of it. Returns its id."""
    for number in range(7, 17):
        group, tokens = f"g{number:08d}", desk.rollout.tokens
        await desk.task(group, **LONG_TASK)

        async def seen(tokens: int = tokens) -> str | None:
            if desk.rollout.tokens > tokens:
                return "over"
            asked = any(requests.rids for requests in desk.replica.proxy.calls.values())
            return "asked" if asked and (await load(desk.client)).used_tokens > len(PROMPT) + 8 else None

        if await until(seen, "requests in the engine", 120) == "asked":
            await desk.client.pause("in_place")
            if (await load(desk.client)).running:
                return group
            await desk.client.resume()
        await desk.generated()  # a test process that was kept waiting came too late
    raise AssertionError("ten groups in a row were over before they were seen in the middle")


async def test_a_path_that_cannot_be_imported_is_refused_at_the_start(bench: NewBench) -> None:
    with pytest.raises(ConfigError, match="has no attribute 'absent'; name a function that is in it") as caught:
        await bench("absent")
    assert caught.value.field == "rollout.custom_generate_function_path"


async def test_named_requests_are_turns_of_gateways_which_survive_kills(
    hall: NewHall, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its turns the gateway is killed and the replica that looks after it loses its weights: others generate the second turn, and
    the sample has the record's versions and log-probs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    function = {"custom_generate_function_path": "tests.support.generate_hooks:named_turns", "generate_workers": 1}
    room = await hall(rollout=function | {"max_staleness": 9}, reward={"worker_environment": [generate_hooks.DIRECTORY]})
    await room.start()
    desk = room.desk
    await desk.task(n=1, sampling=Sampling(temperature=1.0, max_new_tokens=20, min_new_tokens=FIRST_TURN))
    await until(lambda: told("between"), "a first turn", 240)
    room.processes[0].kill()
    await desk.replica.fence("as if its engine had died")
    async with scripted_replica(room.registry, desk.rollout._tokenizer, lambda _: "42" * SECOND_TURN, version=5) as other:
        tell("go_on")
        _, [one] = await desk.generated()
        [(_, second)] = other.given.values()
    assert one.problem() is None
    first, trained = one.response[:FIRST_TURN], one.mask.astype(bool)
    assert one.mask.tolist() == [1] * FIRST_TURN + [0] * len(TOOL) + [1] * SECOND_TURN
    assert one.versions()[trained].tolist() == [0] * FIRST_TURN + [5] * SECOND_TURN
    np.testing.assert_allclose(one.log_probs[:FIRST_TURN], log_probs(checkpoint(0).model, one.prompt, first, banned=[1]), atol=EXACT)
    np.testing.assert_array_equal(one.response[-SECOND_TURN:], second.completion)
    np.testing.assert_array_equal(one.log_probs[-SECOND_TURN:], second.log_probs)
    assert len(calls()) == 1, "nothing was generated anew"
