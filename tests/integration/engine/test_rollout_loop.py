"""slime's own loop as a rollout function: filters that see a whole batch, and held-out sets, over a real engine."""

import json
from pathlib import Path

import pytest

from shared.schema.messages import Discarded, Evaluated, Wanted
from tests.integration.engine.bench import NewBench
from tests.integration.engine.test_producer import generated, given
from tests.support.run_config import write_jsonl

pytestmark = pytest.mark.timeout(600)

FUNCTIONS = "tests.support.rollout_functions"


@pytest.mark.extra
async def test_filters_see_a_whole_batch_and_sets_are_evaluated(
    new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    heldout = write_jsonl(tmp_path / "heldout.jsonl", [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(3)])
    desk = await new_bench(
        rollout={
            "rollout_function_path": "shared.hooks.slime.rollout_loop.generate_rollout",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 5,
            "dynamic_sampling_filter_path": f"{FUNCTIONS}.keeps_even",
            "rollout_sample_filter_path": f"{FUNCTIONS}.removes_the_first",
            "rollout_all_samples_process_path": f"{FUNCTIONS}.sees_all",
        },
        eval={"sets": [{"name": "sums", "path": f"{heldout}@[1:]", "n_samples_per_eval_prompt": 2, "max_response_len": 3}]},
        reward={"rm_type": "exact"},
    )
    await given(desk, 0, 1)
    wanted = await desk.outcome()
    assert isinstance(wanted, Wanted), "the dynamic filter drops one of the two"
    await given(desk, 2)
    [(_, (first, second))] = (await generated(desk, 1)).values()
    assert (first.group, first.mask.any(), second.mask.all(), second.given_reward) == ("g00000002", False, True, 0.0)
    assert json.loads((tmp_path / "seen").read_text()) == [[number, [0.0, 0.0]] for number in range(3)]
    ended = {one.group: one.reason for one in [await desk.outcome(), await desk.outcome()] if isinstance(one, Discarded)}
    assert ended == {"g00000000": "every sample of it was removed", "g00000001": "the rollout function did not hand it in"}
    await desk.evaluation()
    evaluated = await desk.outcome()
    assert isinstance(evaluated, Evaluated) and evaluated.result.dataset == "sums"
    result = evaluated.result
    assert (result.prompts, result.samples, result.reason, result.mean_reward) == (2, 4, "", 0.0)
    assert result.lengths["max"] <= 3 and (result.oldest, result.newest) == (0, 0) and result.truncated > 0
