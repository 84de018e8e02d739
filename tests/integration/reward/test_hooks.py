"""The real reward service with functions of the user's own, in processes; the service itself mostly in the process of the tests."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.bus.registry import Registry
from shared.schema.messages import Outcome, Scored
from tests.support.reward_bench import Bench, NewBench
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

HOOKS = "tests.support.reward_hooks"
PATIENT = 60.0


def scored(outcome: Outcome) -> Scored:
    assert isinstance(outcome, Scored), outcome
    return outcome


def rewards(outcome: Outcome) -> list[float]:
    return scored(outcome).rewards


def removed(outcome: Outcome) -> list[bool]:
    group = scored(outcome)
    return [index in group.removed for index in range(len(group.samples))]


async def launched(bench: NewBench, reward: dict[str, Any], process: bool = False, **rollout: Any) -> Bench:
    paths = {field: f"{HOOKS}:{value}" if field.endswith("_path") and value != "nonzero_std" else value for field, value in rollout.items()}
    named = {field: f"{HOOKS}:{value}" if field == "custom_rm_path" else value for field, value in reward.items()}
    desk = await bench(reward={"reward_timeout": PATIENT, **named}, rollout=paths)
    await (desk.launch() if process else desk.serve())
    return desk


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.process.worker_pool.LOOP_SECONDS", 1.0)


async def test_a_function_scores_each_sample_and_what_it_does_is_its_groups_fate(bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "nats://of-the-service")
    monkeypatch.setenv("MYXO_RUN", "also-for-functions")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "hush")
    desk = await launched(bench, {"custom_rm_path": "length", "reward_timeout": 2.0, "worker_environment": ["JUDGE_KEY"]})
    await desk.generated("g0", "four", "", "chatter", label=None)
    outcome = (await desk.outcomes(1))["g0"]
    assert rewards(outcome) == [4.0, 0.0, 7.0]
    assert (scored(outcome).environment, scored(outcome).filtered, scored(outcome).rollouts) == ("custom_rm", None, ())
    where = f"reward.custom_rm_path = {HOOKS}:length"
    file = "tests/support/reward_hooks.py"
    for text, words in {
        "sleep": f"2 rewards did not come from {where} within 2 s; its call was cancelled, the group is given up",
        "spin": f"2 rewards did not come from {where} within 2 s; its process was killed, the group is given up",
        "raise": f"{where}: {file}:N, in length: RuntimeError: cannot read this",
        "exit": f"{where}: {file}:N, in length: SystemExit: 3",
        "die": f"the functions {HOOKS}:length's process ended in the middle of a call",
        "nan": f"{where}: sample 1: a reward is nan; expected a finite number ({file}:N, length)",
        "text": f"{where}: sample 1: a reward is 'much'; expected a finite number ({file}:N, length)",
        "none": f"{where}: sample 1: a reward is None; expected a finite number ({file}:N, length)",
    }.items():
        await desk.generated(f"g-{text}", "a", text)
        assert re.sub(r"\.py:[0-9]+", ".py:N", await desk.failure(f"g-{text}")) == words
    await desk.generated("g1", "four")
    assert rewards((await desk.outcomes(1))["g1"]) == [4.0], "as if nothing had been"


async def test_what_a_function_started_is_killed_with_it(bench: NewBench, tmp_path: Path) -> None:
    desk = await launched(bench, {"custom_rm_path": "leaves_a_child", "reward_timeout": 2.0})
    await desk.generated("g0", "a", label=str(tmp_path / "pid"))
    assert "its process was killed" in await desk.failure("g0")
    pid = int((tmp_path / "pid").read_text())

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # nobody may have waited for it
        except FileNotFoundError:
            return True

    await until(gone, "the end of the child")


@pytest.mark.extra(each=True)
async def test_named_rewards_of_which_one_counts(bench: NewBench) -> None:
    desk = await launched(
        bench, {"custom_rm_path": "seen", "reward_key": "match"}, process=True, dynamic_sampling_filter_path="keep_by_numpy"
    )
    await desk.generated("g0", "42", "41!")
    outcome = scored((await desk.outcomes(1))["g0"])
    assert list(zip(outcome.rewards, outcome.parts, strict=True)) == [
        (1.0, {"match": 1.0, "length": 2.0}),
        (0.0, {"match": 0.0, "length": 3.0}),
    ]
    assert outcome.filtered is None
    await desk.generated("g1", "42", "42")
    assert scored((await desk.outcomes(1))["g1"]).filtered == "keep_by_numpy"


async def test_a_function_of_whole_groups(bench: NewBench) -> None:
    desk = await launched(bench, {"custom_rm_path": "ranks", "group_rm": True})
    await desk.generated("eval.heldout.0.1", "three", "a", "two")
    assert rewards((await desk.outcomes(1))["eval.heldout.0.1"]) == [2.0, 0.0, 1.0]


@pytest.mark.extra(each=True)
async def test_samples_of_one_rollout_are_scored_together(bench: NewBench) -> None:
    desk = await launched(bench, {"custom_rm_path": "sample_or_rollout"})
    await desk.generated("g0", "a", "b", "c", "d", rollouts=(0, 0, 1, 2))
    outcome = scored((await desk.outcomes(1))["g0"])
    assert rewards(outcome) == [2.0, 2.0, 1.0, 1.0]
    assert outcome.rollouts == (0, 0, 1, 2)


async def test_groups_of_equal_rewards_are_not_kept(bench: NewBench) -> None:
    desk = await launched(bench, {"rm_type": "exact"}, dynamic_sampling_filter_path="nonzero_std")
    for group, texts in {"g0": ["42", "41"], "g1": ["42", "42"], "g2": ["40", "41"], "eval.heldout.0.0": ["42", "42"]}.items():
        await desk.generated(group, *texts)
    outcomes = await desk.outcomes(4)
    found = {group: scored(outcome).filtered for group, outcome in outcomes.items()}
    assert found == {"g0": None, "g1": "zero_std_1", "g2": "zero_std_0", "eval.heldout.0.0": None}
    assert rewards(outcomes["g1"]) == [1.0, 1.0]


async def test_rewards_are_compared_within_a_role(bench: NewBench) -> None:
    desk = await launched(bench, {"rm_type": "exact"}, dynamic_sampling_filter_path="nonzero_std")
    await desk.generated("g0", "42", "41", "42", "41", roles=("solver", "critic") * 2)
    assert scored((await desk.outcomes(1))["g0"]).filtered == "zero_std_0"


async def test_filters_and_a_witness_in_slimes_order(bench: NewBench, tmp_path: Path) -> None:
    desk = await launched(
        bench,
        {"custom_rm_path": "length"},
        dynamic_sampling_filter_path="keep_long",
        rollout_sample_filter_path="remove_shortest",
        rollout_all_samples_process_path="write_down",
    )
    await desk.generated("g00000001", "long one", "short")
    await desk.generated("g00000002", "a", "")
    await desk.generated("eval.heldout.0.3", "a", "")
    outcomes = await desk.outcomes(3)
    kept, dropped, heldout = (outcomes[group] for group in ("g00000001", "g00000002", "eval.heldout.0.3"))
    assert (scored(kept).filtered, rewards(kept), removed(kept)) == (None, [8.0, 5.0], [False, True])
    assert (scored(dropped).filtered, rewards(dropped), removed(dropped)) == ("short", [1.0, 0.0], [False, False])
    assert (scored(heldout).filtered, removed(heldout)) == (None, [False, False]), "held-out groups are not filtered"
    lines = sorted((tmp_path / "runs" / "seen.jsonl").read_text().splitlines())
    assert [json.loads(line) for line in lines] == [
        {"group": 1, "samples": [["long one", 8.0, False], ["short", 5.0, True]]},
        {"group": 2, "samples": [["a", 1.0, False], ["", 0.0, False]]},
    ]


@pytest.mark.extra(each=True)
async def test_filters_after_a_verifier(bench: NewBench) -> None:
    desk = await launched(bench, {"rm_type": "exact", "reward_timeout": 2.0}, rollout_sample_filter_path="hang_on_sleep")
    await desk.generated("g0", "42", "sleep")
    where = f"rollout.rollout_sample_filter_path = {HOOKS}:hang_on_sleep"
    assert await desk.failure("g0") == f"a verdict did not come from {where} within 2 s; its process was killed, the group is given up"
    await desk.generated("g1", "42", "41")
    assert rewards((await desk.outcomes(1))["g1"]) == [1.0, 0.0]


@pytest.mark.extra(each=True)
async def test_a_reward_that_a_filter_changes_counts(bench: NewBench) -> None:
    desk = await launched(bench, {"rm_type": "exact"}, rollout_sample_filter_path="double")
    await desk.generated("g0", "42", "41")
    assert rewards((await desk.outcomes(1))["g0"]) == [2.0, 0.0]


async def test_a_service_whose_function_cannot_be_imported_does_not_start(bench: NewBench, tmp_path: Path) -> None:
    desk = await bench(reward={"custom_rm_path": f"{HOOKS}:absent"})
    environment = {"NATS_URL": desk.nats_url, "MYXO_RUN": desk.config.run.name}
    with ServiceProcess("reward", tmp_path / "refused.log", environment) as process:
        assert process.process.wait(120) == 2
        [line] = [line for line in process.words().splitlines() if line.startswith("reward: ")]
        assert line.startswith(f"reward: reward.custom_rm_path = '{HOOKS}:absent': ") and "has no attribute 'absent'" in line
    assert await Registry(desk.bus, desk.config.run.name).alive("reward") == []
