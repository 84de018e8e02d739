"""A run on engines that somebody else runs: stock SGLang servers that die in the run, one of which comes back with its first weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge
from tests.support.stock_engine import StockEngine

RUN_SECONDS = 1200


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 600)
@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_external_engines_die_and_one_comes_back(transport: str, small_run: Callable[..., Path], tiny_model: Path, tmp_path: Path) -> None:
    """Both come only after the run has begun. While one is dead the run continues on the other, and then on the one that has come back. No
    group is lost, and the engine's log-probs are the trainer's."""
    steps = 16
    config = small_run("external", steps=steps, staleness=1)
    first, second = (StockEngine(tiny_model, tmp_path / f"stock-{number}.log") for number in (1, 2))
    flags = ["--external-engines", first.url, second.url, "--update-weight-transport", transport, "--update-weight-mode", "delta"]
    with first, second, LaunchedRun(config, tmp_path / "runs" / "external", "external", flags) as run:
        run.until("a version of the training on both", lambda cards: serving(cards, 1) == 2, RUN_SECONDS)
        second.kill()
        run.until("the fence of the dead one", lambda cards: "waits for its engine" in detail(cards, "rollout-1"), RUN_SECONDS)
        cards = run.until("steps on the other alone", lambda cards: serving(cards, 2) == 1, RUN_SECONDS)
        first.kill()
        assert gauge(cards, "buffer", "trained_steps") < steps - 3, "the run ended before its engines were killed: make it longer"
        second.start()
        run.until("its return", lambda cards: serving(cards, 2) == 1 and "waits" in detail(cards, "rollout-0"), RUN_SECONDS)
        assert int(second.get("/model_info")["weight_version"].partition("@")[0]) >= 2
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    groups, difference = summary["groups"], summary["mean_abs_logprob_diff"]
    assert isinstance(groups, dict) and (groups["dead"], groups["dropped"]) == ({}, {}), groups
    assert isinstance(difference, float) and difference < 1e-4


def serving(cards: list[ServiceStatus], least: int) -> int:
    return sum(card.service == "rollout" and card.state == "ready" and card.version >= least for card in cards)


def detail(cards: list[ServiceStatus], instance: str) -> str:
    return next((card.detail for card in cards if card.instance == instance), "")
