"""A whole run whose engine has 8-bit or 4-bit weights: it resumes, each version is pushed, only rounding keeps engine and trainer apart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import LaunchedRun
from tests.e2e.test_deaths import trained
from tests.support.converting import to_8_bits

SECONDS = 600


@pytest.mark.extra
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("aware", [False, True])
def test_a_run_with_engines_of_fewer_bits(aware: bool, small_run: Callable[..., Path], tmp_path: Path, tiny_model: Path) -> None:
    """From a checkpoint of 8-bit floats; or from a plain one in 4-bit integers, which the trainer computes with as well."""
    config, root = small_run("eight", steps=40, staleness=1), tmp_path / "runs" / "eight"
    other = [] if aware else ["--hf-checkpoint", str(to_8_bits(tiny_model, tmp_path / "model-fp8", 16))]
    flags = ["--save-interval", "2", *(["--rollout-precision", "int4", "--quantization-aware"] if aware else other)]
    with LaunchedRun(config, root, "eight", flags) as run:
        run.until("4 steps", lambda cards: trained(cards) >= 4, SECONDS)
        run.kill(run.process.pid)
        run.process.wait(60)
    with LaunchedRun(config, root, "eight", flags) as run:
        assert run.wait(SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", 40)
    apart = summary["mean_abs_logprob_diff"]
    assert isinstance(apart, float) and (apart < 1e-4 if aware else 1e-5 < apart < 0.5)  # rounding; 1e-6 without
