"""The rollout service with a function of the user's own, over real servers and a real engine."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.hooks import arithmetic
from shared.runtime.errors import ConfigError
from tests.integration.engine.bench import PROMPT, Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.reference import log_probs
from tests.support import generate_hooks
from tests.support.generate_hooks import FIRST_TURN, SECOND_TURN, TOOL
from tests.support.service_process import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-5


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    """Each test's own events; at its end nothing waits for them any longer."""
    generate_hooks.between.clear()
    generate_hooks.go_on.clear()
    generate_hooks.calls.clear()
    yield
    generate_hooks.go_on.set()


@pytest.fixture
def bench(new_bench: NewBench) -> NewBench:
    """``bench("function")``: at work with that function of `tests.support.generate_hooks`, or of the module before a colon."""

    async def make(function: str, **sections: dict[str, Any]) -> Bench:
        path = function if ":" in function else f"tests.support.generate_hooks:{function}"
        sections.setdefault("rollout", {})["custom_generate_function_path"] = path
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
        reference = np.where(one.mask, log_probs(checkpoint(0).model, PROMPT, one.response), 0)
        assert np.abs(reference - one.log_probs).max() < EXACT
    assert samples[0].response.tolist() != samples[1].response.tolist()


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
    monkeypatch.syspath_prepend(str(tmp_path))
    desk = await bench("documented_hook:generate")
    await desk.task()
    _, samples = await desk.generated()
    assert [one.mask.all() for one in samples] == [True, True]
    assert [one.prompt.tolist() for one in samples] == [PROMPT.tolist()] * 2


@pytest.mark.parametrize(("policy", "trained"), [("truncate", FIRST_TURN), ("mask", 0)])
async def test_a_sample_longer_than_a_micro_batch_is_cut(bench: NewBench, policy: str, trained: int) -> None:
    longest = len(PROMPT) + 1 + FIRST_TURN
    desk = await bench("fanned_out", rollout={"overlong_samples": policy}, trainer={"max_tokens_per_gpu": longest})
    await desk.task()
    group, samples = await desk.generated()
    assert group.payload.tokens == (longest,) * 4
    assert [int(one.mask.sum()) for one in samples] == [FIRST_TURN, trained] * 2
    assert [one.problem() for one in samples] == [None] * 4


async def test_a_group_with_a_sample_longer_than_a_micro_batch_is_dropped(bench: NewBench) -> None:
    longest = len(PROMPT) + 1 + FIRST_TURN
    desk = await bench("fanned_out", rollout={"overlong_samples": "drop"}, trainer={"max_tokens_per_gpu": longest})
    await desk.task()
    assert f"sample g00000007/1 has {longest + 2} tokens, a micro-batch holds at most {longest}: raise max_tokens" in await desk.failure()


async def test_one_rollout_may_give_several_samples(bench: NewBench) -> None:
    desk = await bench("fanned_out")
    await desk.task()
    group, samples = await desk.generated()
    assert group.rollouts == (0, 0, 1, 1)
    assert [(one.index, one.rollout) for one in samples] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [one.metadata for one in samples] == [{"turn": FIRST_TURN}, {"turn": SECOND_TURN}] * 2
    assert [one.prompt.tolist()[-1] for one in samples] == [FIRST_TURN, SECOND_TURN] * 2
    assert [meta.tokens for meta in group.samples] == [FIRST_TURN, SECOND_TURN] * 2


@pytest.mark.parametrize(
    ("function", "segments"),
    [
        ("two_turns_with_a_break", [(0, FIRST_TURN, 0), (FIRST_TURN, FIRST_TURN + SECOND_TURN, 1)]),
        ("of_unknown_version", [(0, FIRST_TURN + SECOND_TURN, 0)]),
    ],
)
async def test_a_push_between_two_turns(bench: NewBench, function: str, segments: list[tuple[int, int, int]]) -> None:
    desk = await bench(function)
    await desk.task(n=1)
    await until(generate_hooks.between.is_set, "the end of the first turn")
    await desk.serve(1)
    generate_hooks.go_on.set()
    group, [one] = await desk.generated()
    assert one.segments == segments
    assert group.samples[0].oldest == 0


async def test_what_was_generated_before_a_fence_is_thrown_away(bench: NewBench) -> None:
    desk = await bench("two_turns_with_a_break")
    await desk.task(n=1)
    await until(generate_hooks.between.is_set, "the end of the first turn")
    await desk.replica.fence("a push failed")
    await desk.serve(2)
    generate_hooks.go_on.set()
    _, [one] = await desk.generated()
    assert one.segments == [(0, FIRST_TURN + SECOND_TURN, 2)]


async def test_a_plain_function_gets_what_slimes_get(bench: NewBench) -> None:
    desk = await bench("recorded")
    await desk.task("eval.heldout.3.12", n=1)
    _, [one] = await desk.generated()
    assert one.metadata["evaluation"] is True
    assert one.metadata["thread"] != "MainThread"
    parameters = one.metadata["parameters"]
    assert (parameters["temperature"], parameters["max_new_tokens"], parameters["no_stop_trim"]) == (1.0, 20, True)
    [given] = generate_hooks.calls
    assert (given.group_index, given.index, given.rollout_id, given.prompt, given.label) == (12, 0, 0, "40+2=", "42")
    assert given.tokens[: len(PROMPT)] == PROMPT.tolist()
    await desk.task("g00000008", n=1)
    _, [one] = await desk.generated()
    assert one.metadata["evaluation"] is False


async def test_a_function_that_blocks_holds_up_nothing_else(bench: NewBench) -> None:
    desk = await bench("blocking")
    await desk.task(n=1)
    await until(generate_hooks.between.is_set, "the call")
    assert desk.replica.serving
    generate_hooks.go_on.set()  # by the service's own loop: on the same one nobody could
    _, [one] = await desk.generated()
    assert one.text == "ok"


async def test_failures_and_aborts_are_tried_again(bench: NewBench) -> None:
    desk = await bench("failing_once")
    await desk.task()
    _, samples = await desk.generated()
    assert [one.response.tolist() for one in samples] == [[7, 8], [7, 8]], "from the beginning"
    assert len(generate_hooks.calls) == 6


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raising", "ValueError: the tool is broken; it failed 5 times in a row"),
        ("leaving", "SystemExit: 3"),
        pytest.param("cancelling", "cancelled itself", marks=pytest.mark.extra),
        pytest.param("nothing", "gave a NoneType; expected a shared.hooks.Sample", marks=pytest.mark.extra),
        ("without_log_probs", "sample g00000007/0: rollout_log_probs is missing"),
    ],
)
async def test_a_function_that_fails_costs_its_group_with_the_reason(bench: NewBench, function: str, words: str) -> None:
    desk = await bench(function)
    await desk.task(n=1)
    reason = await desk.failure()
    assert words in reason
    assert function == "without_log_probs" or f"generate_hooks:{function}" in reason


@pytest.mark.parametrize("function", ["hanging_plainly", pytest.param("hanging", marks=pytest.mark.extra)])
async def test_a_function_that_hangs_loses_its_group_at_its_deadline(bench: NewBench, function: str) -> None:
    desk = await bench(function, rollout={"generate_timeout": 1.0}, bus={"max_deliver": 2})
    await desk.task(n=1)
    assert await desk.failure() == "given up after 2 deliveries"
    assert len(generate_hooks.calls) == 2


async def test_a_path_that_cannot_be_imported_is_refused_at_the_start(bench: NewBench) -> None:
    with pytest.raises(ConfigError, match="has no attribute 'absent'; install the package or put its directory on PYTHONPATH") as caught:
        await bench("absent")
    assert caught.value.field == "rollout.custom_generate_function_path"
