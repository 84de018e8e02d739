"""What the end-to-end benchmark computes of a run that replicas join: its times before and after, who trained what, what it says of it."""

import argparse
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.end_to_end import report
from benchmarks.end_to_end.__main__ import refused
from benchmarks.end_to_end.length_distribution import LengthDistribution
from benchmarks.end_to_end.prediction import MeasuredEngine, predicted
from benchmarks.end_to_end.run_record import RunRecord
from benchmarks.end_to_end.scale_record import ScaleRecord, join_after
from shared.schema.ledger import BatchFormed, GroupsScored, group_id
from shared.schema.messages import SampleMeta, ScoredGroup, Trained
from shared.schema.service_messages import MetricsWritten, ServiceEvent, ServiceStatus
from tests.support.valid_messages import example

ENDS = [100.0, 110.0, 120.0, 130.0, 140.0, 170.0, 180.0, 190.0, 194.0, 198.0, 202.0, 206.0]
"""When the steps of the run end: 10 s each, one of 30 s when replicas join at 141, 4 s each once it has settled."""


def group(number: int, replica: str) -> ScoredGroup:
    samples = [example(SampleMeta, tokens=16, trained=16, oldest=0, newest=0)] * 2
    return example(ScoredGroup, group=group_id(number), samples=samples, rewards=[0.0, 1.0], replica=replica)


def run_record() -> RunRecord:
    """A run of two groups a step, the second of which comes from a joiner from step 8 on."""
    record = RunRecord()
    for number, ended in enumerate(ENDS):
        replicas = ("rollout-0", "rollout-0" if number < 8 else "rollout-2")
        groups = [group(2 * number + index, replica) for index, replica in enumerate(replicas)]
        record.scored(GroupsScored(groups=groups, at=ended))
        record.formed(BatchFormed(step=number, version=number, groups=[one.group for one in groups], at=ended))
        record.written(MetricsWritten(role="actor", step=number, values={"rollout/response_tokens": 400.0}, at=ended))
        record.steps.append(Trained(step=number, version=number + 1, started=ended - 3, ended=ended))
    return record


def status(instance: str, state: str, version: int) -> ServiceStatus:
    return example(ServiceStatus, service="rollout", instance=instance, state=state, version=version)


def caught_up(instance: str, detail: str) -> ServiceEvent:
    return ServiceEvent(service="rollout", instance=instance, what="caught_up", detail=detail, at=0.0)


def scale_record(served: float = 172.0) -> ScaleRecord:
    """Two replicas join: one has its weights from a peer, the other, which serves from ``served`` on, by a push."""
    scale = ScaleRecord()
    scale.begun("rollout-1", 141.0)
    scale.begun("rollout-2", 141.5)
    scale.seen([status("rollout-0", "ready", 4), status("rollout-1", "catching up", -1), status("rollout-2", "updating", -1)], 160.0)
    scale.caught_up(caught_up("rollout-1", "version 5 from rollout-0 in 0.7 s"))
    scale.caught_up(caught_up("rollout-0", "version 5 from disk in 9.0 s"))
    scale.seen([status("rollout-1", "ready", 5)], 165.0)
    scale.seen([status("rollout-1", "ready", 6), status("rollout-2", "ready", 6)], served)
    return scale


def test_a_run_is_measured_before_replicas_join_and_after_it_has_settled() -> None:
    record, scale = run_record(), scale_record()
    found = scale.figures(record, bound=1, warm_up=2, engines=3, gpus=4)
    assert (found["after_steps"], scale.settled(record, 1)) == (5, 8), "two steps after the first one since all serve, which ends at 180"
    assert record.figures(2, 2, scale.before(record))["step_seconds"] == found["longest_step_before"] == 10
    after = found["after"]
    assert (after["steps"], after["step_seconds"], after["trained_tokens_per_s"], after["trained_tokens_per_s_per_gpu"]) == (3, 4, 100, 25)
    assert found["joining"] == {"steps": 4, "step_seconds": 10.0, "longest_step": 30.0}, "from the step that was under way when they began"
    assert found["samples_before"] == {"rollout-0": 8}
    assert found["samples_after"] == {"rollout-0": 6, "rollout-2": 6}


def test_a_joiner_is_told_with_the_source_of_its_weights() -> None:
    found = scale_record().figures(run_record(), bound=1, warm_up=2, engines=3, gpus=4)
    peer = {"version": 5, "weights_from": "rollout-0", "weights_seconds": 0.7}
    push = {"version": 6, "weights_from": "push", "weights_seconds": None}
    assert found["joiners"] == [
        {"instance": "rollout-1", "serves_after_s": 24.0, **peer},
        {"instance": "rollout-2", "serves_after_s": 30.5, **push},
    ]


def test_a_run_goes_on_until_it_has_made_its_other_half_after_all_serve() -> None:
    record, scale = run_record(), scale_record()
    assert scale.is_over(record, 1, 3) and not scale.is_over(record, 1, 4)
    assert not scale.is_over(record, 2, 3), "a larger bound takes a step more to settle"
    waiting = ScaleRecord()
    waiting.begun("rollout-1", 141.0)
    assert not waiting.is_over(record, 1, 1) and waiting.settled(record, 1) is None
    assert not ScaleRecord().is_over(record, 1, 1), "none has been started yet"


@pytest.mark.parametrize(("steps", "warm_up", "found"), [(36, 3, 19), (8, 2, 5), (4, 3, 5)])
def test_replicas_join_after_the_warm_up_and_half_of_the_other_steps(steps: int, warm_up: int, found: int) -> None:
    assert join_after(steps, warm_up) == found


def test_a_joiner_that_does_not_come_to_serve_is_told() -> None:
    record, scale = run_record(), ScaleRecord()
    scale.begun("rollout-1", 141.0)
    run = {"bound": 2, **record.figures(2, 2, 5), "scaled": scale.figures(record, 2, 2, 2, 3), "stopped": "its 9 s were over"}
    assert run["scaled"]["joiners"] == [{"instance": "rollout-1", "serves_after_s": None, "weights_seconds": None}]
    assert run["scaled"]["joining"]["longest_step"] == 30 and "problem" in run["scaled"]["after"]
    found = {"colocate": False, "engines": 1, "runs": [run]}
    [missed] = report.misses(found)
    assert "not all of the replicas" in missed and "its 9 s were over" in missed
    assert "rollout-1 did not come to serve." in report.scaled_table(found)


def scaled_run(audit: Mapping[str, Any]) -> dict[str, Any]:
    record, scale = run_record(), scale_record()
    run = {"bound": 1, **record.figures(2, 2, 5), "scaled": scale.figures(record, 1, 2, 3, 4), "audit": audit}
    return {"colocate": False, "engines": 1, "runs": [run]}


def test_the_table_of_a_scaled_run_has_a_line_before_and_one_after() -> None:
    found = scaled_run({"ok": True, "violations": []})
    assert report.misses(found) == []
    text = report.scaled_table(found)
    assert "| 1 | 1 | 10.00 s |" in text and "| 1 | 3, after 8 steps | 4.00 s |" in text
    assert "| rollout-0 6, rollout-2 6 |" in text
    assert "rollout-1 served 24.0 s after its start, version 5, which it had from rollout-0 in 0.7 s." in text
    assert "rollout-2 served 30.5 s after its start, version 6, which it had from a push." in text
    assert "The longest step meanwhile took 30.00 s, before 10.00 s. The audit of the whole run: ok." in text
    assert report.scaled_table({"runs": [{"bound": 1, "step_seconds": 1.0}]}) == ""


def test_an_audit_that_is_not_clean_is_a_miss() -> None:
    assert report.misses(scaled_run({"ok": False, "violations": ["group g1 was trained twice"]})) == [
        "bound 1: its audit: ['group g1 was trained twice']"
    ]


def test_each_engine_draws_its_part_of_a_step() -> None:
    assert report.split(6.0, 1.5, 5.0, gpus=4, shared=False, engines=3) == {
        "generation_seconds": 2.0,
        "training_seconds": 1.5,
        "limit_seconds": 2.0,
        "synchronous_use": 0.375,
    }
    assert report.limit(6.0, 4.0, shared=False, engines=3) == 4.0, "the trainer is the slower one then"
    assert report.limit(6.0, 4.0, shared=True, engines=3) == 10.0, "on one device they compute one after the other"


def test_the_simulation_of_more_engines_comes_to_the_trainers_time() -> None:
    lengths, engine = LengthDistribution.parse("geometric:656", 2048), MeasuredEngine((0.00187, 3.5e-5), 0.0165)
    one, three = (predicted(lengths, engine, 256, 8, 4.2, 0.03, {2: 256}, engines=engines)[2] for engines in (1, 3))
    assert 7 < one < 9 and three == pytest.approx(4.23, rel=0.02), "training and the push"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({}, ""),
        ({"engines": 2, "scale_to": 3}, ""),
        ({"engines": 0}, "--engines is 1 at least"),
        ({"engines": 2, "scale_to": 2}, "more than that"),
        ({"colocate": True, "engines": 2}, "--colocate has one engine"),
        ({"colocate": True, "scale_to": 2}, "--colocate has one engine"),
        ({"device": "cuda", "scale_to": 3}, "trainer and engines need 4 GPUs; there are 3"),
        ({"device": "cuda", "engines": 2}, ""),
    ],
)
def test_what_cannot_be_measured_is_refused(words: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,5")
    options = argparse.Namespace(**({"device": "cpu", "engines": 1, "scale_to": None, "colocate": False} | words))
    problem = refused(options)
    assert found in problem and bool(found) == bool(problem)
