"""A replica of `rollout.eval_replicas` takes held-out prompts alone, and the others none."""

from pathlib import Path

import pytest

from myxo.launch.service_plan import plan
from services.rollout.request_slots import RequestSlots, evaluates
from shared.config.devices import engine_of
from shared.config.environment_variables import EVAL_VARIABLE
from shared.runtime.errors import ConfigError
from tests.integration.engine.bench import NewBench
from tests.support.run_config import run_config

EVALUATED = "eval.heldout.00000000.00000003"
SETS = {"eval_prompt_data": {"heldout": "heldout.jsonl"}, "eval_interval": 4}


@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.extra)])
async def test_each_fleet_leaves_the_others_prompts_alone(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch, evaluates: bool) -> None:
    monkeypatch.setenv(EVAL_VARIABLE, "1" if evaluates else "0")
    bench = await new_bench(rollout={"rollout_replicas": 2, "eval_replicas": 1}, eval=SETS)
    assert bench.rollout._slots._trains is not evaluates
    own, others = ("eval.heldout.00000000.0000000{}", "g0000000{}")[:: 1 if evaluates else -1]
    for number in range(3):  # the others' come first each time
        await bench.task(others.format(number))
        await bench.task(own.format(number))
        group, _ = await bench.generated()
        assert group.group == own.format(number)
    assert not bench.rollout.running
    assert bench.service.status().gauges["eval_replica"] == float(evaluates)


def test_the_last_replicas_evaluate_and_a_variable_that_nothing_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ({"rollout_replicas": 3}, {"engine_groups": [{"replicas": 2}, {"replicas": 1}]}):
        config = run_config(tmp_path, rollout={**own, "eval_replicas": 1}, eval=SETS)
        for spec in [spec for spec in plan(config, "nats://host:1") if spec.service == "rollout"]:
            monkeypatch.setenv("MYXO_INSTANCE", spec.instance)
            of_group = engine_of(config, spec.instance)[1]
            assert evaluates(of_group) is (spec.instance == "rollout-2") and RequestSlots.of(of_group).slots
    monkeypatch.setenv(EVAL_VARIABLE, "0")
    assert evaluates(config) is False
    monkeypatch.setenv(EVAL_VARIABLE, "1")
    assert evaluates(config) is True
    with pytest.raises(ConfigError, match="eval_replicas = 0"):
        evaluates(run_config(tmp_path))


def test_fleets_that_nothing_would_use_are_refused(tmp_path: Path) -> None:
    for rollout, sets, words in (
        ({"eval_replicas": 1}, SETS, "fewer than rollout_replicas = 1"),
        ({"eval_replicas": 1, "rollout_replicas": 2}, {}, "does not both train and evaluate"),
    ):
        with pytest.raises((ConfigError, ValueError), match=words):
            run_config(tmp_path, rollout=rollout, eval=sets)
