"""A run with every function of the user's own: generated, scored, filtered, looked at, and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun

RUN_SECONDS = 900
HOOKS = "examples.hooks.arithmetic"


@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_run_with_all_hooks(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The example's functions, but for its dynamic filter: a random model is right too seldom for mixed groups."""
    flags = [
        *("--custom-generate-function-path", f"{HOOKS}:second_try", "--custom-rm-path", f"{HOOKS}:score"),
        *("--rollout-sample-filter-path", f"{HOOKS}:without_truncated"),
        *("--rollout-all-samples-process-path", f"{HOOKS}:write_down"),
    ]
    steps = 3
    config = small_run("hooks", steps=steps, staleness=1)
    root = tmp_path / "runs" / "hooks"
    with LaunchedRun(config, root, "hooks", flags) as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["audit"] == "ok"
    assert summary["steps"] == steps
    difference = summary["mean_abs_logprob_diff"]
    assert isinstance(difference, float) and difference < 1e-3
    lines = [json.loads(line) for line in (root / "groups.jsonl").read_text().splitlines()]
    assert len(lines) >= steps * 4
    assert all(len(line["rewards"]) == 4 and set(line["rewards"]) <= {1.0, 0.9, 0.0, -0.1} for line in lines)
    assert any(-0.1 in line["rewards"] for line in lines), "nobody tried twice"
