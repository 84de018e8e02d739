"""Whole runs on engines that read versions from disk, that prefill and decode apart, and that somebody else runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.schema.service_messages import ServiceStatus
from shared.transfer.weight_checkpoint import WeightCheckpoints
from tests.e2e.launched import LaunchedRun, gauge
from tests.support.stock_engine import StockEngine

RUN_SECONDS = 1200


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_versions_over_a_disk(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The replica dies once: its next life takes the newest version, without a word to the trainer."""
    steps = 12
    flags = [
        *("--update-weight-transport", "disk", "--update-weight-mode", "delta", "--update-weight-full-interval", "4"),
        *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    ]
    config = small_run("disk", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "disk", "disk", flags) as run:
        cards = run.until("a version of the training", serves, RUN_SECONDS)
        assert gauge(cards, "buffer", "trained_steps") < steps, "the run ended before its replica was killed: make it longer"
        run.kill(run.child("services.rollout"))
        summary = run.ended(steps, RUN_SECONDS)
    difference = summary["mean_abs_logprob_diff"]
    assert isinstance(difference, float) and difference < 1e-4
    snapshots = WeightCheckpoints(run.root / "weights")
    newest = snapshots.newest()
    assert newest is not None and newest.version == steps
    assert snapshots.chain(newest.version)[0].kind == "full"
    assert any(snapshots.load(version).kind == "delta" for version in snapshots.versions())


def serves(cards: list[ServiceStatus]) -> bool:
    return any(card.service == "rollout" and card.version >= 1 for card in cards)


STEPS = 16


def engine(statuses: list[ServiceStatus], prefill: bool, least: int = 0) -> ServiceStatus | None:
    found = [one for one in statuses if one.service == "rollout" and bool(one.prefill) == prefill]
    return next((one for one in found if one.version >= least and one.state == "ready"), None)


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_engines_of_both_kinds_get_the_same_pushes_and_are_replaced(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """The engine of either kind is killed in the run and comes back. No group is lost, and the log-probs are the trainer's: no token was
    sampled after a prompt by other weights."""
    pytest.importorskip("mooncake.engine", reason="mooncake-transfer-engine-non-cuda is not installed", exc_type=ImportError)
    config = small_run("apart", steps=STEPS, staleness=1)
    flags = ["--rollout-replicas", "2", "--prefill-num-servers", "1"]
    with LaunchedRun(config, tmp_path / "runs" / "apart", "apart", flags) as run:
        both = lambda cards: all(engine(cards, kind, 1) for kind in (True, False))  # noqa: E731
        cards = run.until("both kinds with a pushed version", both, RUN_SECONDS)
        for prefill in (True, False):
            killed = engine(cards, prefill)
            assert killed is not None
            run.kill(run.engine_of(killed.pid))
            back = lambda cards, old=killed: (  # noqa: E731
                both(cards) and all(one.incarnation != old.incarnation for one in cards if one.instance == old.instance)
            )
            cards = run.until("its successor, and both serving", back, RUN_SECONDS)
        assert gauge(cards, "buffer", "trained_steps") < STEPS, "the run ended before its engines were killed: make it longer"
        summary = run.ended(STEPS, RUN_SECONDS)
    groups, difference = summary["groups"], summary["mean_abs_logprob_diff"]
    assert isinstance(groups, dict) and (groups["dead"], groups["faults"]) == ({}, {}), groups
    assert isinstance(difference, float) and difference < 1e-5


@pytest.mark.extra(each=True)
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
        summary = run.ended(steps, RUN_SECONDS)
    groups, difference = summary["groups"], summary["mean_abs_logprob_diff"]
    assert isinstance(groups, dict) and (groups["dead"], groups["dropped"]) == ({}, {}), groups
    assert isinstance(difference, float) and difference < 1e-4


def serving(cards: list[ServiceStatus], least: int) -> int:
    return sum(card.service == "rollout" and card.state == "ready" and card.version >= least for card in cards)


def detail(cards: list[ServiceStatus], instance: str) -> str:
    return next((card.detail for card in cards if card.instance == instance), "")
