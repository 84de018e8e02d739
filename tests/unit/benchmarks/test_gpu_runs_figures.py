"""The figures of whole runs in layouts of several GPUs: from logs, of deaths, what is wrong with them, and what runs beside what."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_runs.case_run import CaseOptions, run_words, warm_words
from benchmarks.gpu_runs.engine_deaths import EngineDeath, EngineDeaths, RunEnded, engine_processes, serves_again
from benchmarks.gpu_runs.layout_case import LAYOUT_CASES, shares, waves
from benchmarks.gpu_runs.layout_figures import death_figures, problems, push_figures, run_figures, table
from shared.schema.service_messages import ServiceStatus
from shared.schema.weight_messages import ReplicaPush, WeightsPushed
from tests.support import tables
from tests.support.valid_messages import example


def line(event: str, when: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": event, "timestamp": datetime.fromtimestamp(when, UTC).isoformat(), **fields}


def pushed(version: int, digest: str, size: int = 8) -> dict[str, Any]:
    return line("weights_pushed", replicas=["a", "b"], version=version, digest=digest, bytes=size, seconds=0.25, wire_seconds=0.125)


FAILED = line("push_failed", 101.5, version=7, step="receive", replicas={"rollout-1": "it is gone"}, error="receive: it is gone")
JOIN = {"source": "peer", "replica": "rollout-0", "version": 9, "bytes": 80, "seconds": 0.5, "backend": "nccl"}


def death(**fields: Any) -> EngineDeath:
    parts = [ReplicaPush(replica="rollout-0"), ReplicaPush(replica="rollout-1", failure="receive: it is gone")]
    push = WeightsPushed(version=7, replicas=parts, seconds=1.5, at=101.5)
    return EngineDeath(**{"at": 100.0, "version": 7, "processes": 4, "killed_after_ms": 0.2, "push": push, "back_after": 30.0, **fields})


def a_row(case: str = "tp2", **fields: Any) -> dict[str, Any]:
    row = {
        **{"case": case, "device": "cuda", "steps_asked": 3, "exit": 0, "steps": 3, "audit": "ok", "mean_abs_logprob_diff": 1e-4},
        **{"seconds": 60.0, "reward_first": 0.25, "reward_last": 0.5, "accuracy_before": None, "accuracy_after": 0.75},
        **{"max_staleness": 2, "max_staleness_seen": 1, "pushes": push_figures([pushed(0, "x"), pushed(1, "y")]), "catch_ups": []},
        **{"adapter_bytes": None, "critic_checkpoints": 0, "deaths": [], "deaths_problem": "", "problems": []},
    }
    return row | fields


def test_pushes_are_counted_and_failures_named() -> None:
    found = push_figures([pushed(0, "x"), pushed(1, "y", 12), FAILED, pushed(2, "y"), line("model_loaded")])
    assert (found["count"], found["replicas"], found["bytes"], found["digests"], found["seconds"]) == (3, 2, 12, 2, 0.25)
    assert found["failed"] == [{"version": 7, "step": "receive", "replicas": {"rollout-1": "it is gone"}}]
    assert push_figures([])["seconds"] is None


def test_figures_of_a_runs_files(tmp_path: Path) -> None:
    assert run_figures(tmp_path)["steps"] is None, "it has only begun"
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "audit": "ok"}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text(f"words\n{json.dumps(pushed(0, 'x'))}\n")
    (tmp_path / "logs" / "rollout-1.log").write_text(json.dumps(line("caught_up", 130.0, **JOIN)) + "\n")
    (tmp_path / "logs" / "rollout-1-engine.log").write_text(json.dumps(line("caught_up", 1.0)) + "\n")
    (tmp_path / "hf" / "adapter").mkdir(parents=True)
    header = b'{"a": {}}'
    (tmp_path / "hf" / "adapter" / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    found = run_figures(tmp_path)
    assert (found["steps"], found["pushes"]["count"], found["adapter_bytes"]) == (3, 1, 40)
    assert found["catch_ups"] == [{"by": "rollout-1", "at": 130.0, **JOIN}]


def test_a_death_inside_a_push() -> None:
    replica = [
        *(line("engine_starting", 10.0, pid=3), line("fenced", 5.0), line("fenced", 101.0), line("engine_starting", 103.0, pid=4)),
        *(line("caught_up", 129.9, **JOIN), line("caught_up", 190.0, **JOIN)),
    ]
    found = death_figures(death(), "rollout-1", [FAILED], replica)
    assert (found["push"], found["reason"], found["others_held"]) == ("failed", "receive: it is gone", ["rollout-0"])
    assert (found["named_after"], found["named_by"], found["engine_began_after"], found["source"]) == (1.0, "rollout-1", 3.0, "peer")
    assert found["join"]["version"] == 9 and found["join"]["at"] == 129.9


def test_a_death_that_came_too_late_and_one_whose_weights_were_pushed() -> None:
    held = WeightsPushed(version=7, replicas=[ReplicaPush(replica="rollout-1")], at=100.1)
    later = [line("caught_up", 190.0, **JOIN)]  # after its next death
    found = death_figures(death(push=held), "rollout-1", [], later)
    assert (found["push"], found["source"], found["join"], found["named_after"]) == ("held", "trainer", None, None)
    found = death_figures(death(push=None, back_after=None), "rollout-1", [FAILED], later)
    assert (found["push"], found["source"], found["named_by"]) == ("unknown", None, "trainer-0")


@tables.table(
    ("case", "fields", "words"),
    [
        ("tp2", {"exit": 1}, "it ended with 1, not 0"),
        ("tp2", {"exit": -15, "audit": None, "mean_abs_logprob_diff": None}, "differ by None"),
        ("tp2", {"audit": ["a group twice"]}, "a group twice"),
        ("tp2", {"steps": 2}, "2 of 3 steps"),
        ("tp2", {"mean_abs_logprob_diff": 0.1}, "differ by 0.1"),
        ("tp2", {"pushes": push_figures([pushed(0, "x"), pushed(1, "x")])}, "the same weights"),
        ("tp2", {"pushes": push_figures([pushed(0, "x"), pushed(1, "y"), FAILED])}, "a push failed"),
        ("tp2", {"steps_asked": 20, "steps": 20, "accuracy_before": 0.75}, "it has not learned"),
        ("lora", {"adapter_bytes": 4}, "pushes of 8 bytes, adapters have 4"),
        ("ppo", {}, "critic has saved nothing"),
        ("death", {"exit": 130}, "no engine was killed"),
        ("death", {"exit": 130, "deaths_problem": "0 of 3 deaths: the run ended"}, "0 of 3 deaths"),
    ],
)
def test_what_is_wrong_is_said(case: str, fields: dict[str, Any], words: str) -> None:
    assert any(words in found for found in problems(LAYOUT_CASES[case], a_row(case, **fields)))


@tables.table(
    ("fields", "words"),
    [
        ({"push": "held"}, "no death was inside a push"),
        ({"join": {**JOIN, "backend": "gloo"}}, "not nccl"),
        ({"back_after": None}, "did not serve again"),
        ({"named_after": None}, "nobody named"),
    ],
)
def test_what_is_wrong_with_a_death_is_said(fields: dict[str, Any], words: str) -> None:
    good = {"push": "failed", "source": "peer", "join": JOIN, "back_after": 30.0, "named_after": 1.0}
    case = LAYOUT_CASES["death"]
    pushed = {**good, "source": "trainer", "join": None}  # the trainer's next push came first
    assert problems(case, a_row("death", exit=130, deaths=[good, pushed])) == []
    assert any(words in found for found in problems(case, a_row("death", exit=130, deaths=[{**good, **fields}])))


def test_a_good_run_has_no_problems() -> None:
    assert problems(LAYOUT_CASES["tp2"], a_row()) == []
    assert problems(LAYOUT_CASES["tp2"], a_row(steps_asked=20, steps=20, accuracy_before=0.25)) == []
    assert problems(LAYOUT_CASES["lora"], a_row("lora", adapter_bytes=8)) == []
    assert problems(LAYOUT_CASES["ppo"], a_row("ppo", critic_checkpoints=1)) == []


def test_the_table_shows_runs_and_deaths() -> None:
    died = death_figures(death(), "rollout-1", [FAILED], [line("caught_up", 129.9, **JOIN)])
    rows = [a_row(), a_row("death", exit=130, deaths=[died], problems=["a | b"]), a_row(exit=None, steps=None, seconds=None)]
    found = table({"machine": "4 x GPU", "cases": rows})
    assert (
        "| tp2: trainer TP2, two engines of 1 | 3 | 0.25 → 0.50 | – → 0.75 | 1.0e-04 | 1 (2) | 2, 250 ms, 0.00 MB | 0 | 0 | 60 | ok |"
        in found
    )
    assert "| 7 | 0.2 ms | failed | 1.50 s, by trainer-0 | 30 s | peer rollout-0 (9, nccl, 0.0 MB in 0.50 s) |" in found
    assert "a \\| b" in found and found.endswith("Measured on: 4 x GPU.")


def test_cases_share_out_the_gpus() -> None:
    names = ["ppo", "lora", "tp2", "death"]
    assert waves(names, 4, at_once=False) == [[name] for name in names]
    assert waves(["lora", "tp2", "lora"], 4, at_once=True) == [["lora", "lora"], ["tp2"]]
    assert waves(names, 8, at_once=True) == [["ppo", "lora", "death"], ["tp2"]]
    assert shares(["lora", "ppo"], ["4", "5", "6", "7", "8", "9"]) == {"lora": "4,5", "ppo": "6,7,8"}
    with pytest.raises(ValueError, match="tp2 takes 4 GPUs, and CUDA_VISIBLE_DEVICES shows 2"):
        waves(["lora", "tp2"], 2, at_once=True)


@tables.table("case", LAYOUT_CASES)
@tables.table("device", ["cuda", "cpu"])
def test_a_case_takes_the_gpus_that_it_says(case: str, device: str, tmp_path: Path) -> None:
    options = CaseOptions(device, tmp_path, steps=3, kills=1, seconds=1.0, flags=("--lr", "1e-9"))
    words = run_words(LAYOUT_CASES[case], tmp_path / case, ["quickstart.toml"], options)

    def last(flag: str, default: int) -> int:
        return int(words[len(words) - words[::-1].index(flag)]) if flag in words else default

    trainer = last("--actor-num-gpus-per-node", 1) * (1 + LAYOUT_CASES[case].critic)
    engines = last("--rollout-replicas", 1) * last("--rollout-num-gpus-per-engine", 1)
    assert (max(trainer, engines) if "--colocate" in words else trainer + engines) == LAYOUT_CASES[case].gpus
    assert words[-2:] == ["--lr", "1e-9"] and ("--sglang-attention-backend" in words) == (device == "cuda")


def test_adapters_train_beside_a_model_that_was_trained_first(tmp_path: Path) -> None:
    options, case = CaseOptions("cuda", tmp_path, steps=3, kills=1, seconds=1.0), LAYOUT_CASES["lora"]
    first = warm_words(tmp_path / "lora", ["quickstart.toml"], options)
    then = run_words(case, tmp_path / "lora", ["quickstart.toml"], options)
    name, directory = (first[first.index(flag) + 1] for flag in ("--name", "--dir"))
    assert then[then.index("--hf-checkpoint") + 1] == str(Path(directory) / name / "hf")
    assert "--lora-rank" in then and "--lora-rank" not in first and name != then[then.index("--name") + 1]


def test_an_engine_that_is_not_there_is_not_killed(tmp_path: Path) -> None:
    log = tmp_path / "rollout-1.log"
    with pytest.raises(RunEnded):
        engine_processes(log)


def test_a_replica_serves_again_with_another_engine() -> None:
    status = example(ServiceStatus, instance="rollout-1", state="ready", version=3, incarnation="1")
    assert serves_again(status, "0") and not serves_again(status, "1")
    assert not serves_again(status.model_copy(update={"state": "fenced"}), "0")
    assert not serves_again(status.model_copy(update={"version": -1}), "0")


async def test_deaths_of_a_run_that_has_ended_say_what_was_awaited(tmp_path: Path) -> None:
    deaths = EngineDeaths(tmp_path, "rollout-1", 3, running=lambda: False, seconds_left=lambda: 100.0)
    await deaths.run()
    assert deaths.ended and deaths.problem == "0 of 3 deaths: the run ended before the run's servers"
