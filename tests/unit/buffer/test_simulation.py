"""The simulation of the buffer: its arithmetic against cases done by hand, its runs against the audit, its command line."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.random import default_rng

from benchmarks.buffer_core import GROUPS_PER_BATCH, WINDOWS, group_bytes, run
from services.buffer import simulated_world as modelled_engine
from services.buffer.simulate_command import (
    ORDERS,
    POLICIES,
    PolicyOutcome,
    Setting,
    Simulated,
    SimulationPlan,
    buffer_config,
    main,
    settings,
)
from services.buffer.simulated_world import NO_BOUND, Baseline, LengthTally, ModelledEngine, WorkloadModel, World
from services.buffer.state import BufferState
from shared.runtime.errors import ConfigError
from shared.schema.ledger import BatchFormed, GroupRequeued, GroupsDropped, LedgerRecord
from shared.schema.ledger_audit import audit

ROOT = Path(__file__).parents[3]

SMALL = WorkloadModel(gpus=2, batch=64)
"""As full as the default model, for each GPU."""

GROUPS = replace(SMALL, samples=4, push=2.0)

BOUND = 2


@pytest.fixture(autouse=True)
def few_makespans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled_engine, "MAKESPANS", 500)


def simulated(
    model: WorkloadModel, *wanted: Setting, bounds: tuple[int, ...] = (BOUND,), steps: int = 30, seed: int = 0
) -> list[PolicyOutcome]:
    plan = SimulationPlan(model, wanted, bounds, steps=steps, warm_up=10, seed=seed)
    return list(plan.outcomes(plan.baseline()))


def ledger(model: WorkloadModel, setting: Setting, bound: int, steps: int = 25, world: Callable[..., World] = World) -> list[LedgerRecord]:
    """The records of a simulated run."""
    records: list[LedgerRecord] = []
    enforced = setting.policy != "unbounded"
    run = world(model, buffer_config(model, setting, bound), default_rng(3), LengthTally(model, 0), enforced=enforced, see=records.append)
    run.run(steps)
    return records


# --- the model


def test_the_limit_of_equal_lengths() -> None:
    # 128 responses of 40 s on 4 GPUs that could take 64 each: g = 80 GPU-s, M = 40 s, h = 80 GPU-s
    model = WorkloadModel(gpus=4, batch=128, sigma=0, saturation=64)
    found = Baseline.of(model, default_rng(0))
    assert (model.generation, model.train, model.split) == (80, 80, 2)
    assert found.makespan == pytest.approx(40)
    assert found.step == pytest.approx(40 + 20)
    assert found.limit == pytest.approx(60 / 40)
    assert found.utilisation == pytest.approx(40 / 60)
    assert Baseline.of(replace(model, push=8), default_rng(0)).limit == pytest.approx(60 / 48)


def test_the_split_follows_the_work() -> None:
    assert WorkloadModel(training=1 / 3).split == 12
    assert WorkloadModel(training=100).split == 1
    assert WorkloadModel(training=0.001).split == 15
    assert WorkloadModel(rollout_gpus=5).split == 5


@pytest.mark.parametrize(
    ("saturation", "concurrency", "seconds"),
    [
        (1, 2, 6),  # two share one GPU; whatever the order, it has 6 tokens to draw
        (1, 3, 6),
        (2, 2, 4),  # the third begins when the first ends, after 1 s, and takes 3 s
        (3, 3, 3),
    ],
)
def test_responses_share_a_gpu(saturation: float, concurrency: int, seconds: float) -> None:
    model = WorkloadModel(gpus=2, batch=4, token_rate=1, saturation=saturation, concurrency=concurrency)
    assert ModelledEngine.makespan(model, 1, [1, 2, 3]) == pytest.approx(seconds)


@pytest.mark.parametrize(("lot", "seconds"), [(1, 14), (2, 16)])
def test_all_stand_still_while_some_are_prefilled(lot: int, seconds: float) -> None:
    """The third begins when the first ends, at 7, and prolongs the second; or, in a lot of two, when both have ended, at 9."""
    model = WorkloadModel(gpus=2, batch=3, token_rate=1, saturation=4, concurrency=2, prefill=3, lot=lot)
    assert ModelledEngine.makespan(model, 1, [4, 6, 4]) == seconds


def test_what_ends_in_one_step_is_followed_by_one_prefill() -> None:
    model = WorkloadModel(gpus=2, batch=4, token_rate=1, saturation=4, concurrency=2, prefill=3)
    assert ModelledEngine.makespan(model, 1, [4, 4, 5, 5]) == 3 + 4 + 3 + 5


def test_the_makespan_event_by_event_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled_engine, "MAKESPANS", 20)
    model = WorkloadModel(gpus=2, batch=60, saturation=20)  # 30 responses on a GPU that 20 saturate
    batches = model.batches(default_rng(1), 20).tolist()
    expected = sum(ModelledEngine.makespan(model, model.gpus, lengths) for lengths in batches) / 20
    assert modelled_engine.mean_makespan(model, default_rng(1)) == pytest.approx(expected)


def test_lengths_keep_their_mean_cap_and_deciles() -> None:
    model = WorkloadModel(sigma=1.0, cap=3.0, samples=4, correlation=0.5)
    lengths = model.batches(default_rng(0), 400)
    assert lengths.max() == model.longest == 6000
    assert lengths.mean() == pytest.approx(model.capped_mean, rel=0.01)
    counts = numpy.bincount(numpy.searchsorted(model.edges, lengths.ravel()), minlength=10)
    assert counts / lengths.size == pytest.approx(numpy.full(10, 0.1), abs=0.005)


def test_lengths_of_one_prompt_are_alike() -> None:
    model = WorkloadModel(samples=2, correlation=0.8)
    pairs = numpy.log(model.lengths(default_rng(0), model.prompts(default_rng(1), 20_000), 2))
    assert numpy.corrcoef(pairs.T)[0, 1] == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("training", [0.5, pytest.param(1.0, marks=pytest.mark.extra)])
def test_lent_gpus_generate_while_the_trainer_waits(training: float) -> None:
    """Where generation takes longer, lending gains what the trainer would have waited; a slow way back takes it away again."""
    model = WorkloadModel(gpus=2, rollout_gpus=1, batch=64, concurrency=200, training=training)

    def step(**lent: float) -> float:
        plan = SimulationPlan(replace(model, **lent), (Setting("drop", "fifo"),), (4,), 60, 10, 0)
        return model.batch / next(iter(plan.outcomes(plan.baseline()))).samples_per_second

    apart, lending, limit = step(), step(lend=1.0), (model.generation + model.train) / 2
    assert limit <= lending < apart and apart >= model.generation * 0.99
    assert step(lend=1.0, handover=0.25 * model.generation) > lending
    if training < 1:
        assert lending < 1.07 * limit, "nearly all of the trainer's waiting is used"


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 5000, "batch": 5000},
        {"batch": 70_000},
        {"lend": 1.5},
        {"handover": -1},
        {"gpus": 1},
        {"rollout_gpus": 16},
        {"sigma": -1},
        {"batch": 10, "samples": 4},
        {"correlation": 2},
        {"token_rate": float("nan")},
    ],
)
def test_a_model_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(wrong)).replace("_", "-")):
        WorkloadModel(**wrong)


# --- simulated runs


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "unbounded"])
def test_the_audit_finds_nothing(policy: Simulated, order: str, bound: int) -> None:
    records = ledger(GROUPS, Setting(policy, order, window=20), bound, steps=12)  # type: ignore[arg-type]
    report = audit(records, bound, GROUPS.groups)
    assert report.violations == []
    assert (report.steps, report.trained) == (12, 12 * GROUPS.groups)
    assert report.max_staleness <= bound
    # the ledger is all there is: its fold has the same groups in flight
    state = BufferState()
    for record in records:
        state.apply(LedgerRecord.decode(record.encode()))
    assert state.in_flight == report.in_flight > 0


def test_without_enforcement_the_audit_finds_what_is_too_old() -> None:
    records = ledger(SMALL, Setting("unbounded"), 1)
    assert any("the bound is 1" in violation for violation in audit(records, 1, SMALL.groups).violations)
    assert audit(records, NO_BOUND, SMALL.groups).ok


@pytest.mark.parametrize("policy", ["drop", "requeue"])
def test_what_has_fallen_behind_is_stopped(policy: Simulated) -> None:
    records = ledger(SMALL, Setting(policy), 1)
    kind = GroupsDropped if policy == "drop" else GroupRequeued
    stopped, scored = [], set()
    for record in records:
        scored |= {group.group for group in getattr(record, "groups", []) if hasattr(group, "rewards")}
        if isinstance(record, kind):
            stopped += [name for name in getattr(record, "groups", None) or [record.group] if name not in scored]  # type: ignore[union-attr]
    assert stopped


def test_the_same_seed_gives_the_same_figures() -> None:
    setting = Setting("mask")
    once, again, other = (simulated(GROUPS, setting, seed=seed) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_policies_by_what_becomes_of_old_tokens() -> None:
    found = {outcome.setting.policy: outcome for outcome in simulated(GROUPS, *settings(POLICIES, ["completion"], []), bounds=(1,))}
    assert found["unbounded"].max_age > 1
    assert found["unbounded"].dropped.overall == found["unbounded"].masked.overall == 0
    for policy in ("drop", "requeue", "continue", "mask"):
        assert set(found[policy].ages) <= {0, 1}
        assert found[policy].max_age <= 1
    for policy in ("drop", "requeue"):
        assert found[policy].dropped.overall > 0
        assert found[policy].masked.overall == 0
        assert found[policy].dropped_tokens.by_decile[9] > found[policy].dropped_tokens.by_decile[0]
    assert found["mask"].masked.by_decile[9] > found["mask"].masked.by_decile[0]
    # "continue" generates anew what waited too long for the rest of its group
    assert found["mask"].masked.overall > found["continue"].masked.overall
    assert found["continue"].dropped.overall > found["mask"].dropped.overall


def test_groups_of_one_sample_are_not_generated_anew_to_go_on() -> None:
    going_on, masked = simulated(SMALL, Setting("continue"), Setting("mask"))
    assert replace(going_on, setting=masked.setting) == masked
    assert masked.masked.overall > 0
    assert masked.dropped.overall == 0


def test_looser_orders_are_faster() -> None:
    orders = settings(["drop"], None, [SMALL.groups + 4])
    for bound in (1, 2):
        speed = {outcome.setting.order: outcome.speedup for outcome in simulated(SMALL, *orders, bounds=(bound,), steps=50)}
        assert speed["completion"] > speed["windowed_fifo"] * 0.98
        assert speed["windowed_fifo"] > speed["fifo"] * 0.98
        assert speed["completion"] > speed["fifo"] * 1.05


def test_nothing_is_faster_than_the_limit() -> None:
    plan = SimulationPlan(SMALL, settings(["unbounded", "mask"], None, []), (8,), steps=60, warm_up=20, seed=0)
    found = plan.baseline()
    for outcome in plan.outcomes(found):
        assert outcome.speedup == pytest.approx(found.limit, rel=0.04)


class Asking(World):
    """Its trainer asks for a batch whenever a group comes back."""

    @property
    def missing(self) -> int:
        return 0

    @missing.setter
    def missing(self, value: int) -> None:
        pass


@pytest.mark.parametrize("setting", [Setting("drop"), Setting("requeue", "fifo"), Setting("continue", "windowed_fifo", 20)])
def test_questions_left_out_change_nothing(setting: Setting) -> None:
    batches = [
        [(record.at, record.groups) for record in ledger(GROUPS, setting, 1, world=world) if isinstance(record, BatchFormed)]
        for world in (World, Asking)
    ]
    assert batches[0] == batches[1]


def test_the_default_model_gives_the_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = SimulationPlan(WorkloadModel(), [Setting("mask"), Setting("drop", "fifo")], (2,), steps=14, warm_up=8, seed=0)
    found = plan.baseline()
    assert found.limit == pytest.approx(2.80, rel=0.02)
    mask, fifo = plan.outcomes(found)
    assert mask.speedup >= 0.9 * found.limit
    assert mask.max_age <= 2
    assert fifo.speedup == pytest.approx(1.85, rel=0.1)


# --- the command

QUICK = ("--gpus", "2", "--batch", "16", "--steps", "4", "--warm-up", "2", "--bounds", "0", "2")


def test_json_has_every_policy_at_every_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main([*QUICK, "--seed", "5", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert set(found) == {"limit", "u_sync", "sync", "parameters", "policies"}
    assert found["limit"] == pytest.approx(1 / found["u_sync"], rel=1e-3)
    assert {"gpus": 2, "rollout_gpus": 1, "batch": 16, "seed": 5, "steps": 4}.items() <= found["parameters"].items()
    names = {f"{policy}/completion" for policy in ("drop", "requeue", "continue", "mask")} | {"unbounded (reference)", "drop/fifo"}
    assert set(found["policies"]) == names | {"drop/windowed_fifo(17)", "drop/windowed_fifo(32)"}
    for name, cells in found["policies"].items():
        assert list(cells) == ["0", "2"]
        for bound, cell in cells.items():
            assert cell["steps"] == 4
            assert cell["speedup"] > 0
            assert len(cell["dropped_by_decile"]) == len(cell["dropped_tokens_by_decile"]) == len(cell["masked_by_decile"]) == 10
            assert sum(cell["age_counts"].values()) >= 4 * 16 or cell["masked"] > 0
            assert cell["max_age"] <= int(bound) or name.startswith("unbounded")
    out = capsys.readouterr().out
    assert f"limit {found['limit']:.2f}×" in out
    assert all(name in out for name in found["policies"])


def test_chosen_policies_orders_and_windows(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ("--policies", "mask", "requeue", "--orders", "windowed_fifo", "fifo", "--windows", "20", "--json", str(path))
    assert main([*QUICK, *options]) == 0
    names = {f"{policy}/{order}" for policy in ("mask", "requeue") for order in ("windowed_fifo(20)", "fifo")}
    assert set(json.loads(path.read_text())["policies"]) == names


def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures.png"
    assert main([*QUICK, "--policies", "drop", "--chart", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--gpus", "1"), "--gpus = 1: at least 2"),
        (("--bounds", "-1"), "--bounds = -1: at least 0"),
        (("--windows", "3"), "--windows = 3: at least the 512 groups"),
        (("--steps", "1"), "--steps = 1"),
        (("--json", "nowhere/figures.json"), "--json = 'nowhere/figures.json'"),
        (("--policies", "guess"), "--policies: invalid choice: 'guess'"),
        (("--polices", "drop"), "unrecognized arguments: --polices"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(words)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("myxo simulate: ")
    assert complaint in err


@pytest.mark.parametrize(("heading", "results"), [("What it shows", "simulate"), ("Groups of several samples", "simulate_groups")])
def test_the_page_shows_the_figures_of_the_results(heading: str, results: str) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())
    section = (ROOT / "docs" / "simulation.md").read_text().split(f" {heading}\n")[1]
    rows = section[section.index("\n synchronous ") + 1 :].split("```")[0].splitlines()[1:]
    expected = [cell for cells in found["policies"].values() for cell in cells.values()]
    assert len(rows) == len(expected)
    for row, cell in zip(rows, expected, strict=True):
        shown = [float(figure) for figure in re.findall(r"([\d.]+)[×%]", row)]
        exact = [cell["speedup"], 100 * cell["of_limit"], cell["token_speedup"], 100 * cell["dropped"], 100 * cell["masked"]]
        assert (numpy.abs(numpy.array(shown) - exact) < [0.006, 0.51, 0.006, 0.051, 0.051]).all(), row


def run_myxo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "myxo.main", *words], capture_output=True, text=True, timeout=240)


def test_myxo_simulate(tmp_path: Path) -> None:
    told = run_myxo("simulate", "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "usage: myxo simulate" in told.stdout
    assert "--saturation" in told.stdout
    path = tmp_path / "figures.json"
    done = run_myxo("simulate", *QUICK, "--policies", "drop", "--orders", "completion", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert list(json.loads(path.read_text())["policies"]) == ["drop/completion"]
    assert "U_sync" in done.stdout
    assert run_myxo("simulate", "--gpus", "0").returncode == 2


# --- the benchmark of the buffer's core trains all of its groups, by messages that the policy takes


def test_every_step_is_trained_and_scored_groups_are_held() -> None:
    core, windows = run(WINDOWS * GROUPS_PER_BATCH, samples=2, lot=4)
    assert core.state.trained == WINDOWS * GROUPS_PER_BATCH and len(windows) == WINDOWS
    assert core.state.dropped > 0 or core.state.dead > 0, "some fail or are stale"
    assert group_bytes(2, groups=50)["scored"] > 0
