"""An agent over OpenAI's SDK trains a policy, in a whole run on real engines; and a judge beside it that agents ask."""

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.schema import codec
from shared.schema.messages import Batch
from shared.schema.sample import Sample, decode
from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, trained
from tests.support.model_hooks import ANSWERS

RUN_SECONDS = 900

FLAGS = ("--agent", "examples.agents.openai_calculator:run", "--surplus-rollouts", "1", "--eval-interval", "5", "--rollout-replicas", "2")

GOING = (("services.gateway", signal.SIGKILL), ("services.rollout", signal.SIGTERM)) * 2 + (("services.rollout", signal.SIGKILL),)
"""Who goes, and how: a replica that is asked to go leaves in order, and another one comes."""


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_an_agent_trains_while_gateways_and_replicas_come_and_go(small_run: Callable[..., Path], tmp_path: Path) -> None:
    steps = 2 * len(GOING) + 2
    config = small_run("agents", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "agents", "agents", FLAGS) as run:
        for number, (program, word) in enumerate(GOING):
            run.until("a step", lambda cards, step=2 * number + 1: trained(cards) >= step, RUN_SECONDS)
            os.kill(run.child(program), word)
        summary = run.ended(steps, RUN_SECONDS)
    assert summary["groups"]["trained"] == 4 * steps
    assert summary["max_staleness_seen"] <= 1


CROWD = ("--agent", "tests.support.agents:three_turns", "--n-samples-per-prompt", "5", "--rollout-max-response-len", "24")


@pytest.mark.extra(each=True)
@pytest.mark.timeout(3 * RUN_SECONDS)
def test_two_hundred_rollouts_are_trained_over_deaths_and_pushes(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """A push after each step, in place; a tenth of the clients are gone in the middle; the gateway is killed five times.

    Each turn of each rollout is trained once, and the ledger accounts for all."""
    steps, config = 10, small_run("crowd", steps=10, staleness=2)
    config.write_text(re.sub(r"\[sft\].*?(?=\[bus\])", "", config.read_text(), flags=re.DOTALL))  # version 0 is the checkpoint itself
    dumps = tmp_path / "dumps"
    kept = ("--save-debug-rollout-data", f"{dumps}/{{rollout_id}}")
    with LaunchedRun(config, tmp_path / "runs" / "crowd", "crowd", (*CROWD, *kept)) as run:
        for step in range(1, steps, 2):
            run.until(f"step {step}", lambda cards, step=step: trained(cards) >= step and has_gateway(run), RUN_SECONDS)
            run.kill(run.child("services.gateway"))
        summary = run.ended(steps, RUN_SECONDS)
    assert summary["groups"]["trained"] == 4 * steps
    samples = [sample for step in range(steps) for sample in dumped(dumps / str(step))]
    rollouts = len({(sample.group, sample.rollout) for sample in samples})
    turns = [turn for sample in samples for turn in drawn_turns(sample)]
    assert rollouts >= 4 * steps * 4 and len(turns) == 3 * rollouts, "each turn is trained once"


def has_gateway(run: LaunchedRun) -> bool:
    """Whether the one that was killed has been started again."""
    try:
        return run.child("services.gateway") > 0
    except AssertionError:
        return False


def dumped(path: Path) -> list[Sample]:
    """The samples of a dumped batch."""
    content = codec.unpack(path.read_bytes())
    groups = Batch.decode(content["batch"]).groups
    return [sample for group in groups for sample in decode([content["blobs"][key] for key in group.payload.keys])]


def drawn_turns(sample: Sample) -> Iterator[tuple[Any, Any, Any, list[tuple[int, int]]]]:
    """Yields of each turn that a sample trains: prompt, completion, log-probs, and (version, end) of its spans."""
    tokens, versions = np.concatenate([sample.prompt, sample.response]), sample.versions()
    edges = np.flatnonzero(np.diff(sample.mask.astype(int), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        cuts = [start, *(np.flatnonzero(np.diff(versions[start:end])) + start + 1), end]
        spans = [(int(versions[begin]), int(stop - start)) for begin, stop in itertools.pairwise(cuts)]
        yield tokens[: len(sample.prompt) + start], sample.response[start:end], sample.log_probs[start:end], spans


STEPS = 12


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
        summary = run.ended(STEPS, RUN_SECONDS)
    assert summary["groups"]["dead"] == {}, summary
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


@pytest.mark.extra(each=True)
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
