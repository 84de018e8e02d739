"""Decode steps are captured for as many requests as a replica has slots, within bounds, and the run's own flags stand."""

from pathlib import Path
from typing import Any

import pytest

from services.rollout.replica_command import FLAG, captured_requests, graph_flags
from services.rollout.request_slots import EngineLoad, SlotLimit
from tests.support.run_config import run_config


@pytest.mark.parametrize(
    ("rollout", "captured", "flags"),
    [
        ({}, 512, {FLAG: 512}),
        ({"rollout_concurrency": 40}, 256, {FLAG: 256}),
        ({"rollout_concurrency": 300}, 300, {FLAG: 300}),
        ({"rollout_concurrency": 2000}, 512, {FLAG: 512}),
        ({"sglang": {"cuda_graph_max_bs_decode": 32}}, 32, {}),
        ({"sglang": {"--cuda-graph-bs-decode": ["8", "64"]}}, 64, {}),
        ({"sglang": {"disable-cuda-graph": True}}, None, {}),
    ],
)
def test_what_an_engine_captures(rollout: dict[str, Any], captured: int | None, flags: dict[str, int], tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout=rollout)
    assert captured_requests(config, "cuda") == captured
    assert graph_flags(config, "cuda") == flags
    assert (captured_requests(config, "cpu"), graph_flags(config, "cpu")) == (None, {})


def test_a_colocated_engine_is_left_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"colocate": True})
    assert (captured_requests(config, "cuda"), graph_flags(config, "cuda")) == (256, {})


def test_slots_stay_within_what_is_captured() -> None:
    limit = SlotLimit(None, least=8, batch=2000, most=512)
    seen = {limit.note(EngineLoad(512, 0, 0.1), 512, 10_000 * now * now, now) for now in range(60)}
    assert seen == {512}
