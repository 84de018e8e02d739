"""The model of the large scale: it says of published pushes what was published, and of sizes what follows from the figures."""

from dataclasses import replace

import pytest

from benchmarks.scale.plane_rates import Workload, capacity, gpus_until, rates
from benchmarks.scale.published_pushes import published_pushes
from benchmarks.scale.push_model import Weights, ours, weights_of


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
