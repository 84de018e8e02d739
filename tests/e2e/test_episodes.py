"""The guessing game plays the rollouts of a whole run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.environments.guessing.guessing import MOST_GUESSES
from shared.data.rollout_files import DIRECTORY
from shared.process.embedded_servers import free_port
from tests.e2e.launched import LaunchedRun
from tests.integration.environments.live import EnvironmentProcess
from tests.support.rollout_reader import RolloutReader

RUN_SECONDS = 900
TURN_TOKENS = 2


@pytest.mark.extra  # integration/engine plays episodes on an engine, integration/environments the game
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_episodes_are_trained(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The environment begins after the run, which waits for it."""
    steps, port, root = 2, free_port(), tmp_path / "runs" / "episodes"
    config = small_run("episodes", steps=steps, staleness=1)
    game = "examples.environments.guessing.guessing:GuessingGame"
    flags = ["--episode-url", f"http://127.0.0.1:{port}", "--episode-turn-tokens", str(TURN_TOKENS), "--rollout-max-response-len", "40"]
    with LaunchedRun(config, root, "episodes", flags) as run:
        served = [sys.executable, "-m", "myxo.main", "env", "run", game, "--port", str(port)]
        with EnvironmentProcess(served, tmp_path / "game.log", {}):
            assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["mean_abs_logprob_diff"] < 1e-3  # type: ignore[operator]
    trained = [record for record in RolloutReader(root / DIRECTORY).records() if record.step is not None]
    assert len(trained) == 4 * steps
    played = [(record.metadata if one.metadata is None else one.metadata, one) for record in trained for one in record.samples]
    for metadata, sample in played:
        turns = metadata["turns"]
        assert 1 <= turns <= MOST_GUESSES and len(sample.response) >= turns - 1, "an answer of the game stands between two turns"
        assert sample.reward == pytest.approx(1.0 - (turns - 1) / MOST_GUESSES) or (sample.reward, turns) == (0.0, MOST_GUESSES)
