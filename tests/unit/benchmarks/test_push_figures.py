"""Figures of pushes, of the model of their scale, and of the colocated benchmark."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import colocate
from benchmarks.push_figures import MARKS, death_rows, figures_of, page_rows, percentile, trace_table
from benchmarks.scale.plane_rates import Workload, capacity, gpus_until, rates
from benchmarks.scale.published_pushes import published_pushes
from benchmarks.scale.push_model import Weights, ours, weights_of
from benchmarks.token_stream import gaps_of
from benchmarks.weight_push import Bench, copied
from services.trainer.weights.push_schedule import PushResult
from tests.support.tables import table

TRAINER = {"prepare_began": 9.0, "receive_began": 10.0, "check_began": 10.03, "commit_began": 10.031, "sent": 10.02}


def result(wire: float) -> PushResult:
    replica = {"asked": 10.001, "paused": 10.003, "reported": 10.029, "resumed": 10.04}
    return PushResult(1, ["a"], 1.05, wire, 0.02, 0.0, 8_000_000_000, "d", {"trainer": TRAINER, "a": replica})


def test_phases_and_trace() -> None:
    found = figures_of([result(0.03), result(0.04), result(0.02)])
    assert (found["seconds"], found["median_seconds"], found["p99_seconds"], found["gb_per_s"]) == (0.02, 0.03, 0.04, 400.0)
    assert found["phases"] == {"pause": 0.002, "transfer": 0.03, "check": 0.001, "activate": 0.019}
    assert [mark for mark, *_ in found["trace"]] == ["receive_began", "asked", "paused", "sent", "reported", "check_began", "commit_began",
                                                      "resumed", "ended"]  # fmt: skip
    assert found["trace"][-1] == ["ended", 50.0, 50.0, 50.0]
    assert MARKS["ended"] in trace_table("plain", found["trace"])


def test_a_row_of_the_page_whatever_was_measured() -> None:
    row = {"gpus": 2, "layout": "TP1", **figures_of([result(0.03)])}
    assert page_rows([row]).splitlines()[-1].count("–") == 6
    whole = {**row, "raw_gb_per_s": 400.0, "generating": {**figures_of([result(0.03)]), "gap_p50": 0.03, "gap_p99": 0.06}}
    assert "| 20.0 | 30.0, 30.0, 30.0 | 67 %, 67 % |" in page_rows([whole]) and "| 30, 60 |" in page_rows([whole])


def test_gaps_of_the_requests_that_run_in_a_window() -> None:
    times = [[0.0, 1.0, 3.0, 3.5], [2.0, 2.25]]
    assert gaps_of(times, [(1.5, 2.5), (3.25, 3.3), (9.0, 10.0)]) == [2.0, 0.5]


def test_percentiles() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.5, 0.75, 0.99)] == [2.0, 3.0, 4.0]


def buckets(read: list[int]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    for number in range(4):
        read.append(number)
        yield [(f"{number}.{part}", torch.full([8], number, dtype=torch.float32)) for part in "ab"]  # 64 bytes


def test_as_many_weights_are_copied_as_have_room() -> None:
    read: list[int] = []
    held: list[int] = []

    def free() -> int:
        return 64 * (3 - len(read)) + 64

    tensors = copied(buckets(read), free)
    assert [name for name, _ in tensors] == ["0.a", "0.b", "1.a", "1.b", "2.a", "2.b"] and read == [0, 1, 2, 3]
    assert [name for name, _ in copied(buckets(held), lambda: 0)] == ["0.a", "0.b"], "the first at any rate"
    assert len(copied(buckets(held), lambda: 1 << 30)) == 8
    live = torch.zeros(2)
    [(_, copy)] = copied([[("live", live)]], lambda: 0)
    live.fill_(1)
    assert copy.tolist() == [0, 0]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nand more"), SystemExit("the push failed"), OSError(28, "full")]
)
def test_a_part_that_fails_costs_nothing_of_what_was_measured(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    bench = Bench(argparse.Namespace(gpus=2, layout="tp1", device="cpu", shape="4b", step=False, backend="megatron"))
    bench.figures["seconds"] = 0.03

    def failing() -> None:
        raise error

    bench._part("slime's way", failing)
    bench._part("generating", lambda: None)
    told = bench.figures["not_measured"]
    assert list(told) == ["slime's way"] and told["slime's way"].startswith(type(error).__name__) and "and more" not in told["slime's way"]
    assert bench.figures["seconds"] == 0.03


def test_a_death_has_a_table_of_its_own() -> None:
    death = {"named": 2.348, "served": 2.453, "engine_up": 16.4, "joined": 17.0, "peer_bytes": 8_044_936_192, "peer_seconds": 0.09}
    head, _, line = death_rows([{"bytes": 8_044_936_192, "layout": "TP2, 2 engines", "death": death}])
    assert head.count("|") == line.count("|")
    assert line == "| 8.04 GB, TP2, 2 engines | 2.3 s | 2.5 s | 16.4 s | 17.0 s | 8.04 GB in 0.09 s |"


# --- the model of the large scale: it says of published pushes what was published, and of sizes what follows from the figures


def test_published_pushes_are_reproduced() -> None:
    rows = [row for row in published_pushes() if not row.fitted]
    assert {row.model.split(",")[0] for row in rows} >= {"Qwen3-30B-A3B", "DeepSeek-V3.1", "Kimi-K2"}
    assert all(abs(row.difference) < 0.25 for row in rows), [(row.model, row.difference) for row in rows]


def test_tensors_are_counted_and_eight_bits_take_half_and_scales() -> None:
    plain, small = weights_of("kimi-k2"), weights_of("kimi-k2", fp8=True)
    assert plain.gigabytes == pytest.approx(2_052.8, abs=0.1)
    assert 0.5 < small.gigabytes / plain.gigabytes < 0.51
    assert small.tensors > 1.9 * plain.tensors


def test_a_push_waits_for_the_longer_of_wire_and_loading() -> None:
    by_wire, by_load = ours(Weights(10, 400.0)), ours(Weights(100_000, 1.0))
    assert by_wire["push"] > by_wire["wire"] > by_wire["load"]
    assert by_load["push"] > by_load["load"] > by_load["wire"]
    assert ours(Weights(10, 400.0, stages=4))["wire"] == pytest.approx(by_wire["wire"] / 4)


def test_rates_grow_with_the_gpus_and_tell_where_they_end() -> None:
    work = Workload(256)
    here, twice = rates(work), rates(replace(work, gpus=512))
    assert twice["samples_per_s"] == pytest.approx(2 * here["samples_per_s"])
    assert twice["step_seconds"] == pytest.approx(here["step_seconds"] / 2)
    most = gpus_until(work, "of_path", 1.0)
    assert rates(replace(work, gpus=most))["of_path"] == pytest.approx(1.0, abs=0.01)
    assert capacity(768) > capacity(2_000) > capacity(8_448) == capacity(100_000)


# --- what the colocated benchmark reads: the GPU that the run has, and a run's figures while it continues


@table(("told", "place"), [(None, 0), ("", 0), ("0", 0), ("3", 3), (" 2, 0", 2), ("GPU-5c1f", "GPU-5c1f"), ("MIG-7,GPU-5c1f", "MIG-7")])
def test_the_first_visible_gpu_is_read(told: str | None, place: int | str) -> None:
    assert colocate.first_visible(told) == place


def test_figures_are_told_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocate, "TOLD_SECONDS", 0.05)
    monkeypatch.setattr(colocate, "of_shape", lambda case, data: [])
    monkeypatch.setattr(colocate, "launch", lambda words: [sys.executable, "-c", "input()"])  # ends by itself: it has no input
    rows = list(colocate.run("tiny", "cpu", tmp_path, 60, []))
    assert rows[-1]["exit"] == 1 and all(row["exit"] is None for row in rows[:-1])
    monkeypatch.setattr(colocate, "launch", lambda words: [sys.executable, "-c", "import time; time.sleep(600)"])
    *before, last = colocate.run("tiny", "cpu", tmp_path, 0.3, [])
    assert before and before[0]["exit"] is None and before[0]["turns"] == 0
    assert last["exit"] == -15, "its time was over"
