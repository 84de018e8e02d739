"""A whole run whose engine has 8-bit weights: it resumes, every version is pushed, and engine and trainer differ by the rounding alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun
from tests.e2e.test_deaths import trained
from tests.support.converting import to_8_bits

SECONDS = 600


@pytest.mark.extra
@pytest.mark.timeout(3 * SECONDS)
def test_a_run_with_8_bit_engines(small_run: Callable[..., Path], tmp_path: Path, tiny_model: Path) -> None:
    config, root = small_run("eight", steps=40, staleness=1), tmp_path / "runs" / "eight"
    flags = ["--hf-checkpoint", str(to_8_bits(tiny_model, tmp_path / "model-fp8", 16)), "--save-interval", "2"]
    with LaunchedRun(config, root, "eight", flags) as run:
        run.until("4 steps", lambda cards: trained(cards) >= 4, SECONDS)
        run.kill(run.process.pid)
        run.process.wait(60)
    with LaunchedRun(config, root, "eight", flags) as run:
        assert run.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", 40)
    apart = summary["mean_abs_logprob_diff"]
    assert isinstance(apart, float) and 1e-5 < apart < 0.5  # rounding; 1e-6 without
