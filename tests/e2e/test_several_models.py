"""Two models under one run: the policy is trained, and a judge stays as it was, asked by rewards and agents."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun
from tests.e2e.test_agents import drawn_turns, dumped
from tests.support.model_hooks import ANSWERS

RUN_SECONDS, STEPS = 900, 12


def models(statuses: list[ServiceStatus], state: str = "ready") -> list[ServiceStatus]:
    return [status for status in statuses if status.service == "model" and status.state == state]


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_frozen_judge_answers_rewards_and_agents_over_its_engines_death(
    small_run: Callable[..., Path], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = tmp_path / "answers.jsonl"
    monkeypatch.setenv(ANSWERS, str(answers))
    judge = tmp_path / "judge"
    shutil.copytree(tiny_model, judge)
    config = small_run("judged", steps=STEPS, staleness=1)
    flags = ["--models", json.dumps({"judge": {"hf_checkpoint": str(judge)}}), "--custom-rm-path", "tests.support.model_hooks:judged"]
    flags += ["--worker-environment", ANSWERS, "--lr", "1e-2", "--reward-timeout", "400"]
    flags += ["--use-opd", "--opd-type", "sglang", "--opd-kl-coef", "0.05", "--opd-teachers", "{'first': 'judge'}"]
    flags += ["--agent", "tests.support.model_hooks:advised", "--save-debug-rollout-data", f"{tmp_path}/dumps/{{rollout_id}}"]
    with LaunchedRun(config, tmp_path / "runs" / "judged", "judged", flags) as run:
        [status] = models(run.until("the judge's first answer", lambda cards: bool(models(cards)) and answers.exists(), RUN_SECONDS))
        assert (status.instance, status.model, status.version) == ("model-judge-0", "judge", 0)
        run.kill(run.engine_of(status.pid))
        run.until("its engine's return", lambda cards: any(one.incarnation != status.incarnation for one in models(cards)), RUN_SECONDS)
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", STEPS)
    assert summary["groups"]["dead"] == {}, summary  # type: ignore[index]
    samples = [sample for step in range(STEPS) for sample in dumped(tmp_path / "dumps" / str(step))]
    assert len(samples) == 16 * STEPS and all(len(list(drawn_turns(sample))) == 1 for sample in samples), "the judge's turns are trained"
    assert all("teacher_log_probs" in sample.attributes for sample in samples)
    told = [json.loads(line) for line in answers.read_text().splitlines()]
    assert all(answer["names"] == ["judge"] for answer in told if answer["asker"] == "reward")
    heard = [answer for answer in told if answer["asker"] == "agent"]
    assert len(heard) >= 16 * STEPS and {answer["model"] for answer in heard} == {"judge"} and all(answer["alike"] for answer in heard)
    assert heard[0]["served"] == [tiny_model.name, "judge"] and "did you mean judge" in heard[0]["refusal"]
    spread = [answer["log_prob"] for answer in told if "log_prob" in answer]
    assert len(spread) >= 16 * STEPS and max(spread) - min(spread) < 1e-3, "the judge's weights have changed"


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_engines_of_unlike_groups_get_the_same_pushes(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, groups = small_run("unlike", steps=30, staleness=1), tmp_path / "engines.yaml"
    own = "{mem_fraction_static: 0.5, max_running_requests: 9}"
    groups.write_text(
        f"""sglang:
  - {{name: default, server_groups: [{{worker_type: regular, num_gpus: 1}}, {{num_gpus: 1, overrides: {own}}}]}}
  - {{name: ref, update_weights: false, server_groups: [{{num_gpus: 1}}, {{worker_type: placeholder, num_gpus: 2}}]}}
"""
    )
    with LaunchedRun(config, tmp_path / "runs" / "unlike", "unlike", ["--sglang-config", str(groups)]) as run:
        served = lambda cards: [one.version >= 1 for one in cards if one.service == "rollout"] == [True] * 2 and bool(models(cards))  # noqa: E731
        cards = run.until("both engines with pushed weights, and the frozen one", served, RUN_SECONDS)
        assert [(one.instance, one.model, one.version) for one in models(cards)] == [("model-ref-0", "ref", 0)]
        assert run.wait(RUN_SECONDS) == 0, run.said()
    assert run.summary()["audit"] == "ok"
    logs = [(run.root / "logs" / f"rollout-{index}-engine.log").read_text() for index in range(2)]
    assert ["max_running_requests=9" in log for log in logs] == [False, True]
