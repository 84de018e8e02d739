"""The guessing game plays the rollouts of a whole run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.environments.guessing.guessing import MOST_GUESSES
from shared.data.rollout_files import DIRECTORY, RolloutReader
from shared.runtime.embedded_servers import free_port
from tests.e2e.launched import LaunchedRun
from tests.integration.environments.live import EnvironmentProcess

RUN_SECONDS = 900
TURN_TOKENS = 2


@pytest.mark.timeout(RUN_SECONDS + 300)
def test_episodes_are_trained(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The environment begins after the run, which waits for it."""
    steps, port, root = 2, free_port(), tmp_path / "runs" / "episodes"
    config = small_run("episodes", steps=steps, staleness=1)
    game = "examples.environments.guessing.guessing:GuessingGame"
    flags = ["--episode-url", f"http://127.0.0.1:{port}", "--episode-turn-tokens", str(TURN_TOKENS), "--rollout-max-response-len", "40"]
    with LaunchedRun(config, root, "episodes", flags) as run:
        run.until("a replica", lambda cards: any(card.service == "rollout" for card in cards), RUN_SECONDS)
        served = [sys.executable, "-m", "myxo.main", "env", "run", game, "--port", str(port)]
        with EnvironmentProcess(served, tmp_path / "game.log", {}):
            assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["mean_abs_logprob_diff"] < 1e-3  # type: ignore[operator]
    trained = [record for record in RolloutReader(root / DIRECTORY).records() if record.step is not None]
    assert len(trained) == 4 * steps
    for sample in (sample for record in trained for sample in record.samples):
        assert sample.metadata is not None and sample.reward is not None
        turns = sample.metadata["turns"]
        assert 1 <= turns <= MOST_GUESSES and len(sample.response) >= turns - 1, "an answer of the game stands between two turns"
        won = {1.0 - turn / MOST_GUESSES for turn in range(MOST_GUESSES)}
        assert sample.reward in won | {0.0} and (sample.reward == 0.0 or turns == round((1 - sample.reward) * MOST_GUESSES) + 1)
