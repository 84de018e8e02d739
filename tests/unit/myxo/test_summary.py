"""What a run came to, from records and events written by hand."""

import asyncio
import contextlib
import io
import json
import math
import shutil
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from myxo.commands import status
from myxo.commands.status import REWARD, list_runs
from myxo.launch.exit_report import never_trained, table
from myxo.run.run_directory import READING, RunDirectory
from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.data.metric_files import METRIC_LINES
from shared.runtime.errors import ConfigError
from shared.schema.digests import attest
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalEnded,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    VersionLive,
    group_id,
)
from shared.schema.messages import SampleMeta, ScoredGroup, Trained
from shared.schema.service_messages import ServiceEvent, WarmStartEnded
from shared.view.alarms import AlarmKind
from shared.view.run_summary import GroupCounts, SummaryTally
from tests.support import tables
from tests.support.attested_ledger import attested
from tests.support.run_config import run_config
from tests.support.valid_messages import example


@pytest.mark.parametrize(
    ("sections", "metric", "mark", "state"),
    [
        ({}, "train/loss", None, "finished"),  # a function of the user's logs the rewards
        ({}, "rollout/raw_reward", None, "finished"),
        ({"rollout": {"num_rollout": 9}}, "train/loss", None, "stopped"),
        ({"rollout": {"num_rollout": 0}, "sft": {"sft_data": "s.jsonl"}}, "sft/loss", None, "stopped"),
        ({"rollout": {"num_rollout": 0}, "sft": {"sft_data": "s.jsonl"}}, "sft/loss", 0, "finished"),
        ({"rollout": {"num_rollout": 0}, "eval": {"eval_prompt_data": ["a", "a.jsonl"]}}, "eval/a", None, "–"),
    ],
)
def test_a_list_of_runs_knows_what_is_finished(
    sections: dict[str, dict[str, Any]], metric: str, mark: int | None, state: str, tmp_path: Path
) -> None:
    config, output = run_config(tmp_path, **sections), io.StringIO()
    for name in ("tensorboard", "hf") if mark is not None else ("tensorboard",):
        (config.trained / name).mkdir(parents=True)
    files = RunDirectory(config.run.root)
    runs.freeze(files.root, config)
    (config.trained / "tensorboard" / METRIC_LINES).write_text(json.dumps([5.0, 3, {metric: 0.5}]) + "\n")
    if mark is not None:
        (config.trained / "hf" / "trained.json").write_text(json.dumps({"steps": mark}))

    def listed() -> str:
        output.truncate(output.seek(0))
        assert list_runs(config.run.dir, Console(file=output), True) == 0
        [run] = json.loads(output.getvalue())
        return run["state"]

    assert listed() == ("–" if state == "stopped" else state), "nothing is known of services of `myxo submit`"
    files.logs.mkdir()
    files.log("launcher").touch()
    with files.held(READING):
        assert listed() == state, "as by `myxo console`"
    with files.held():
        assert listed() == "running"


def test_a_list_of_copies_shows_what_they_have_and_not_the_original(tmp_path: Path) -> None:
    config, output = run_config(tmp_path), io.StringIO()
    (config.trained / "tensorboard").mkdir(parents=True)
    lines = config.trained / "tensorboard" / METRIC_LINES
    lines.write_text(json.dumps([5.0, 3, {REWARD: 0.5}]) + "\n")
    runs.freeze(config.run.root, config)
    copy = tmp_path / "backup" / config.run.name
    shutil.copytree(config.run.root, copy)
    lines.write_text(json.dumps([9.0, 8, {REWARD: 0.9}]) + "\n")
    assert list_runs(copy.parent, Console(file=output), True) == 0
    assert [(run["step"], run["reward"]) for run in json.loads(output.getvalue())] == [(4, 0.5)]


def scored(number: int, rewards: tuple[float, float], oldest: int, started: float, ended: float, tokens: int = 5) -> ScoredGroup:
    samples = [SampleMeta(tokens=tokens, trained=tokens - 1, oldest=oldest, newest=oldest, finish="stop") for _ in rewards]
    return example(ScoredGroup, group=group_id(number), samples=samples, rewards=list(rewards), started=started, ended=ended)


def evaluation(version: int, mean: float, samples: int = 4) -> EvalEnded:
    versions = {"version": version, "oldest": version, "newest": version, "live": version}
    return EvalEnded(at=0.0, dataset="heldout", **versions, prompts=4, failed=4 - samples, samples=samples, mean_reward=mean)


def names(*numbers: int) -> list[str]:
    return [group_id(number) for number in numbers]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Four steps of two groups of two samples, bound 1."""
    return run_config(tmp_path, eval={"eval_prompt_data": "heldout.jsonl"})


RECORDS = attested(
    [
        VersionLive(version=0, at=100.0),
        evaluation(0, 0.25).model_copy(update={"at": 101.0}),
        GroupsAdmitted(first=0, count=4, version=0, at=102.0),
        GroupsScored(groups=[scored(0, (0.0, 1.0), 0, 102.0, 104.0), scored(1, (0.0, 0.0), 0, 103.0, 105.0)], at=105.0),
        BatchFormed(step=0, version=0, groups=names(0, 1), at=105.0),
        GroupsScored(groups=[scored(2, (1.0, 1.0), 0, 105.0, 107.0), scored(3, (1.0, 0.0), 0, 105.0, 112.0)], at=112.0),
        BatchTrained(step=0, version=0, started=106.0, ended=110.0, attestation=attest([]), at=110.0),
        VersionLive(version=1, at=110.0),
        GroupsAdmitted(first=4, count=3, version=1, at=110.0),
        GroupDead(group=group_id(4), reason="rollout-0: too long", at=111.0),
        GroupsDropped(groups=names(5), reason="stale", at=111.0),
        BatchFormed(step=1, version=1, groups=names(2, 3), at=112.0),
        BatchTrained(step=1, version=1, started=112.0, ended=113.0, attestation=attest([]), at=113.0),
        evaluation(2, 0.75).model_copy(update={"at": 115.0}),
        CheckpointDurable(steps=2, at=116.0),
    ]
)


def tally(config: RunConfig, records: list[LedgerRecord]) -> SummaryTally:
    result = SummaryTally(config)
    for record in records:
        result.apply(record)
    return result


def test_a_long_run_whose_first_events_are_dropped_is_judged_by_its_ledger(tmp_path: Path) -> None:
    long = SummaryTally(run_config(tmp_path))
    long.rewards, long.flow.finished, long.flow.rewards = [0.5] * 12, True, {11: 0.5}
    assert [alarm.kind for alarm in long.alarms()] == [AlarmKind.NOT_RISEN]
    long.rewards[0] = math.nan  # what was before is not known
    assert not long.alarms()


NEVER = "57 % of prompts were never trained"


@tables.table(
    ("dead", "said"),
    [
        ({}, ""),
        ({"reward-0: reward.custom_rm_path = my:score: my.py:3, in score: KeyError: 1": 4}, f"{NEVER}: your reward failed"),
        ({"reward-0: eval.sets.a.custom_rm_path = my:score: x": 4}, f"{NEVER}: your reward failed"),
        ({"rollout-0: rollout.custom_generate_function_path = m:f: x": 3, "long": 1}, f"{NEVER}: your generate function failed for 3 of 4"),
        ({"reward-0: rollout.dynamic_sampling_filter_path = my:f: x": 4}, f"{NEVER}: your filter failed"),
        ({"rollout-0: rollout.agent_command = ./play: it ended with 1": 4}, f"{NEVER}: your agent failed"),
        ({"buffer: too long": 4}, NEVER),
        ({"buffer: too long": 4000}, "99 % of prompts were never trained"),
    ],
)
def test_the_share_of_prompts_that_were_never_trained_names_what_failed(dead: dict[str, int], said: str) -> None:
    assert never_trained(GroupCounts(9, 2, {"stale": 1}, dead, 2)) == said


def test_every_figure(config: RunConfig) -> None:
    summary = tally(config, RECORDS).summary()
    assert summary.run == "test"
    assert summary.steps == 2
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    assert (summary.max_staleness, summary.max_staleness_seen, summary.mean_staleness) == (1, 1, 0.5)
    assert summary.staleness_histogram == {"0": 4, "1": 4}
    # generation covers 102–105 and 105–112, training 106–110 and 112–113
    assert summary.generation_seconds == pytest.approx(10.0)
    assert summary.training_seconds == pytest.approx(5.0)
    assert summary.overlap_seconds == pytest.approx(4.0)
    assert (summary.reward_first, summary.reward_last) == (0.25, 0.75)
    assert summary.mean_abs_logprob_diff is None
    assert summary.trained_tokens == 2 * 2 * 2 * 4, "as attested: one token of each response is a tool's"
    assert summary.wall_seconds == pytest.approx(16.0)
    assert (summary.groups.admitted, summary.groups.trained, summary.groups.in_flight) == (7, 4, 1)
    assert summary.groups.dropped == {"stale": 1}
    assert summary.groups.dead == {"rollout-0: too long": 1}
    assert summary.audit == "ok"
    assert not summary.finished
    assert [(found.version, found.step, found.mean_reward) for found in summary.evaluations] == [(0, 0, 0.25), (2, 2, 0.75)]


def test_every_held_out_set_is_kept_apart(config: RunConfig) -> None:
    """Before and after are those of the config's own set."""
    other = [evaluation(version, mean).model_copy(update={"dataset": "extra"}) for version, mean in ((0, -1.0), (2, -0.5))]
    summary = tally(config, [*RECORDS, *other]).summary()
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    found = [(found.dataset, found.version, found.mean_reward) for found in summary.evaluations]
    assert found == [("extra", 0, -1.0), ("extra", 2, -0.5), ("heldout", 0, 0.25), ("heldout", 2, 0.75)]
    out = io.StringIO()
    Console(file=out, width=120).print(table(summary))
    for line in ("eval/extra", "-1.000 → -0.500 (v0 → v2), mean reward", "eval/heldout", "0.250 → 0.750"):
        assert line in out.getvalue()


def test_the_warm_start_is_summed_up(config: RunConfig) -> None:
    result = tally(config, RECORDS)
    assert result.summary().warm_start is None
    result.warm_start = WarmStartEnded.of([4.0 - step / 100 for step in range(300)])
    summary = result.summary()
    assert summary.warm_start is not None and len(result.warm_start.losses) == 150
    assert (summary.warm_start.steps, summary.warm_start.loss_first) == (300, pytest.approx(3.855))
    assert summary.warm_start.loss_last == pytest.approx(1.155)
    out = io.StringIO()
    Console(file=out, width=120).print(table(summary))
    assert "300 SFT steps, loss 3.855 → 1.155" in out.getvalue()


def test_a_step_without_known_rewards_is_a_gap(config: RunConfig) -> None:
    """It does not move the later steps' rewards to the left."""
    first, second = (BatchTrained(step=step, version=step, started=0.0, ended=1.0, at=112.0) for step in (0, 1))
    result = tally(config, [*RECORDS[:6], first])
    result.apply(second)  # of a batch that no record tells of
    result.apply(second)
    assert result.rewards[0] == 0.25 and math.isnan(result.rewards[1]) and len(result.rewards) == 2
    json.dumps(asdict(result.summary()), allow_nan=False)


def test_an_empty_ledger_has_a_summary(config: RunConfig) -> None:
    summary = tally(config, []).summary()
    assert (summary.steps, summary.wall_seconds, summary.trained_tokens) == (0, 0.0, 0)
    assert summary.accuracy_before is summary.accuracy_after is summary.reward_first is summary.mean_staleness is None
    assert summary.audit == "ok"


def test_accuracy_is_unknown_where_no_evaluation_says_it(config: RunConfig) -> None:
    only_first = tally(config, [evaluation(0, 0.25)]).summary()
    assert (only_first.accuracy_before, only_first.accuracy_after) == (0.25, None)
    only_last = tally(config, [evaluation(4, 0.5)]).summary()
    assert (only_last.accuracy_before, only_last.accuracy_after) == (None, 0.5)
    all_failed = tally(config, [evaluation(0, 0.0, samples=0)]).summary()
    assert all_failed.accuracy_before is None, "a mean of nothing is no accuracy"


def test_versions_become_steps(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"num_rollout": 5}, weights={"update_weights_interval": 2})
    evaluations = tally(config, [evaluation(0, 0.1), evaluation(1, 0.2), evaluation(3, 0.3)]).summary().evaluations
    assert [found.step for found in evaluations] == [0, 2, 5]


def test_violations_are_listed(config: RunConfig) -> None:
    summary = tally(config, [*RECORDS, BatchTrained(step=1, version=1, started=0.0, ended=1.0, at=120.0)]).summary()
    assert isinstance(summary.audit, list)
    assert "step 1 was trained after 2 steps" in summary.audit[0]


def test_a_group_that_was_made_again_counts_with_its_last_rewards(config: RunConfig) -> None:
    records: list[LedgerRecord] = [
        VersionLive(version=0, at=1.0),
        GroupsAdmitted(first=0, count=2, version=0, at=1.0),
        GroupsScored(groups=[scored(0, (0.0, 0.0), 0, 1.0, 2.0), scored(1, (0.0, 0.0), 0, 1.0, 2.0)], at=2.0),
        GroupRequeued(group=group_id(0), attempt=1, reason="payload lost", at=3.0),
        GroupsScored(groups=[scored(0, (1.0, 1.0), 0, 5.0, 6.0)], at=6.0),
        BatchFormed(step=0, version=0, groups=names(0, 1), at=6.0),
        BatchTrained(step=0, version=0, started=6.0, ended=7.0, at=7.0),
    ]
    result = tally(config, records)
    assert result.rewards == [0.5]
    assert result.summary().generation_seconds == pytest.approx(2.0)


def test_edges_are_a_tenth_of_the_steps(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"num_rollout": 30, "rollout_batch_size": 1})
    records: list[LedgerRecord] = [VersionLive(version=0, at=0.0), GroupsAdmitted(first=0, count=30, version=0, at=0.0)]
    for step in range(30):
        records += [
            GroupsScored(groups=[scored(step, (float(step), float(step)), 0, 0.0, 1.0)], at=1.0),
            BatchFormed(step=step, version=0, groups=names(step), at=1.0),
            BatchTrained(step=step, version=0, started=0.0, ended=1.0, at=1.0),
        ]
    summary = tally(config, [*records, RunFinished(steps=30, at=2.0)]).summary()
    assert (summary.reward_first, summary.reward_last) == (1.0, 28.0)
    assert summary.finished


def step_event(step: int, **metrics: float) -> Trained:
    return Trained(step=step, version=step, started=0.0, ended=1.0, metrics=metrics)


def test_agreement_of_engine_and_trainer_is_weighed_by_tokens(config: RunConfig) -> None:
    result = tally(config, RECORDS)
    result.apply_step(step_event(0, agreement_abs_diff=1.0, agreement_tokens=10.0))
    result.apply_step(step_event(1, agreement_abs_diff=0.0, agreement_tokens=30.0))
    assert result.summary().mean_abs_logprob_diff == pytest.approx(0.025)


def test_a_step_that_was_made_again_counts_once(config: RunConfig) -> None:
    result = tally(config, RECORDS)
    result.apply_step(step_event(0, agreement_abs_diff=1.0, agreement_tokens=10.0))
    result.apply_step(step_event(0, agreement_abs_diff=99.0, agreement_tokens=1.0))
    assert result.summary().mean_abs_logprob_diff == pytest.approx(0.1)


def test_no_tokens_in_agreement_is_no_figure(config: RunConfig) -> None:
    result = tally(config, RECORDS)
    result.apply_step(step_event(0, agreement_abs_diff=0.0, agreement_tokens=0.0))
    result.apply_step(step_event(1, loss=1.0))
    assert result.summary().mean_abs_logprob_diff is None


def test_restarts_are_counted_by_instance(config: RunConfig) -> None:
    result = tally(config, RECORDS)
    for instance in ("trainer-0", "rollout-1", "trainer-0"):
        result.flow.failures.take(ServiceEvent(service="x", instance=instance, what="restarted", at=0.0))
    assert result.summary().restarts == {"trainer-0": 2, "rollout-1": 1}


def test_runs_are_compared_once_each_and_a_missing_picture_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.asynccontextmanager
    async def reach(run: str, _: Path) -> AsyncIterator[SimpleNamespace]:
        config = run_config(tmp_path, run={"name": run})
        yield SimpleNamespace(run=run, directory=RunDirectory(config.run.root), bus=None, config=config)

    async def collect(_: None, config: RunConfig) -> SummaryTally:
        return SummaryTally(config)

    monkeypatch.setattr(status, "reach", reach)
    monkeypatch.setattr(status, "collect", collect)

    def compared(*runs: str, **more: Any) -> str:
        wanted = Namespace(**{"runs": list(runs), "dir": tmp_path, "picture": None, "json": False} | more)
        output = io.StringIO()
        assert asyncio.run(status.compare(wanted, Console(file=output))) == 0
        return output.getvalue()

    with pytest.raises(ConfigError, match="RUN = 'a a': at least two runs, each once"):
        compared("a", "a")
    assert "No picture: no step is trained yet." in compared("a", "b")
    assert json.loads(compared("a", "b", json=True))["runs"] == ["a", "b"] and capsys.readouterr().err == ""
    compared("a", "b", json=True, picture=tmp_path / "both.png")
    assert "No picture: no step is trained yet." in capsys.readouterr().err
