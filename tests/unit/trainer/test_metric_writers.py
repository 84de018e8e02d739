"""Where a trainer's metrics go: TensorBoard's files and W&B's record, over several lives."""

import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PagesAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from services.trainer import metrics_logger as writers
from services.trainer.actor import StepResult
from services.trainer.metrics_logger import LoggedSteps, TensorBoard, averaged
from shared.config import devices
from shared.data.metric_files import EVENT_FILES, MetricDirectory
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.waiting import until

Series = dict[str, list[tuple[int, float]]]


def series(directory: Path | EventAccumulator) -> Series:
    """What a reader of TensorBoard's files finds: a new one for a directory, or one that runs and looks again."""
    events = EventAccumulator(str(directory)) if isinstance(directory, Path) else directory
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def shown(pages: PagesAccumulator) -> Series:
    """What the pages of a TensorBoard show that runs and looks again."""
    pages.Reload()
    found = {tag: pages.Tensors(tag) for tag in pages.Tags()["tensors"]}
    return {tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events] for tag, events in found.items()}


def life(directory: Path, resumed: int, steps: range, value: float, evaluated: Mapping[int, float] = {}) -> TensorBoard:
    """A trainer that trains ``steps``, is told of all evaluations that there are, pushes each version once, and is killed."""
    writer = TensorBoard(directory)
    writer.resume(lambda name, step: name != "perf/update_weights_time" and name != "sft/loss" and step >= resumed)
    for step in steps:
        writer.write(step, {"train/loss": value, "perf/step_time": value + step})
        writer.write(step + 1, {"perf/update_weights_time": value})
        writer.flush()
    for step, reward in evaluated.items():
        writer.write(step, {"eval/heldout": reward, "eval/heldout/version": step})
    writer.flush()
    return writer


def test_a_step_that_was_trained_again_stands_once_with_its_newest_value(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in range(1, 11):
        first.write(step, {"sft/loss": float(step)})
    first.flush()
    watching, pages = EventAccumulator(str(tmp_path)), PagesAccumulator(str(tmp_path))
    life(tmp_path, 0, range(7), 1.0, {0: 0.0, 4: 0.25})
    series(watching), shown(pages)
    life(tmp_path, 4, range(4, 9), 2.0, {0: 0.0, 4: 0.25, 8: 0.5})
    series(watching), shown(pages)
    life(tmp_path, 8, range(8, 9), 3.0, {0: 0.0, 4: 0.25, 8: 0.5})  # killed again and again
    life(tmp_path, 8, range(8, 10), 4.0, {0: 0.0, 4: 0.25, 8: 0.5})
    life(tmp_path, 10, range(10, 12), 5.0, {0: 0.0, 4: 0.25, 8: 0.5})  # a stop in order: nothing is made again
    loss = [(step, 1.0 if step < 4 else 2.0 if step < 8 else 4.0 if step < 10 else 5.0) for step in range(12)]
    expected = {
        "train/loss": loss,
        "perf/step_time": [(step, value + step) for step, value in loss],
        "eval/heldout": [(0, 0.0), (4, 0.25), (8, 0.5)],
        "eval/heldout/version": [(0, 0.0), (4, 4.0), (8, 8.0)],
        "perf/update_weights_time": [(step, 1.0 if step < 8 else 2.0 if step < 10 else 4.0 if step < 11 else 5.0) for step in range(1, 13)],
        "sft/loss": [(step, float(step)) for step in range(1, 11)],
    }
    assert series(tmp_path) == series(watching) == shown(pages) == expected, (
        "also in a TensorBoard that has run since before the first death"
    )
    ours: Series = {}
    for scalar in MetricDirectory(tmp_path).read():
        ours.setdefault(scalar.tag, []).append((scalar.step, scalar.value))
    assert ours == expected, "nor is anything left in the lines that a reader would find"
    shutil.move(tmp_path, moved := tmp_path.with_name("moved"))
    life(moved, 11, range(11, 12), 6.0)
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(moved.parent))
    multiplexer.Reload()
    assert [event.value for event in multiplexer.Scalars("moved", "train/loss")][-2:] == [5.0, 6.0]


def test_metrics_of_an_earlier_version_of_the_files_are_taken_over_without_their_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0)
    )  # in names of files of one second and one process 10 comes before 9
    for value in (1.0, 2.0):  # two lives, each of which wrote all evaluations
        writer = SummaryWriter(str(tmp_path))
        for step in (0, 4):
            writer.add_scalar("eval/heldout", value, step)
        writer.add_scalar("train/loss", value, 3)
        writer.add_text("note", "of the user's", 0)
        writer.close()
    life(tmp_path, 4, range(4, 5), 3.0, {0: 0.0, 4: 3.0})
    found = EventAccumulator(str(tmp_path))
    assert series(found)["eval/heldout"] == [(0, 2.0), (4, 3.0)] and series(found)["train/loss"] == [(3, 2.0), (4, 3.0)]
    assert found.Tags()["tensors"] == ["note/text_summary"]
    lines = [(scalar.tag, scalar.step, scalar.value) for scalar in MetricDirectory(tmp_path).read()]
    assert ("train/loss", 3, 2.0) in lines and ("eval/heldout", 4, 3.0) in lines and len(lines) == len(set(lines))


def test_files_stay_in_order_though_a_clock_goes_back_and_a_life_is_killed_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life(tmp_path, 0, range(6), 1.0)
    [torn] = tmp_path.glob(EVENT_FILES)
    with torn.open("ab") as file:
        file.write(b"\x20\0\0\0\0\0\0\0 cut off")
    kept = torn.read_bytes()
    monkeypatch.setattr(writers.time, "time", lambda: 1000.0)
    life(tmp_path, 4, range(4, 6), 2.0)
    torn.write_bytes(kept)  # as where it was killed before it had removed the old file
    assert series(tmp_path)["train/loss"] == [(step, 1.0 if step < 4 else 2.0) for step in range(6)]
    life(tmp_path, 4, range(4, 6), 3.0)
    assert series(tmp_path)["train/loss"] == [(step, 1.0 if step < 4 else 3.0) for step in range(6)]
    assert [path.stat().st_size > 0 for path in sorted(tmp_path.glob(EVENT_FILES))] == [False, False, True]


def test_wandb_is_given_each_step_of_a_metric_once(tmp_path: Path) -> None:
    path, given, ids = tmp_path / "wandb.jsonl", list[tuple[int, str]](), set[str]()
    for steps in (range(6), range(4, 5), range(4, 8)):  # three lives; the second one dies before it has made all steps again
        logged = LoggedSteps(path, "run")
        ids.add(logged.run_id)
        for step in steps:
            for values in ({"train/loss": 1.0, "rollout/tokens": 2.0}, {"eval/heldout": 0.5} if step == 4 else {}):
                if fresh := logged.new(step, values):
                    given += [(step, name) for name in fresh]
                    logged.logged(step, fresh)
        with path.open("a") as file:
            file.write('\n[7, "train/lo')  # cut off
    expected = [(step, name) for step in range(8) for name in ("train/loss", "rollout/tokens")]
    assert sorted(given) == sorted([*expected, (4, "eval/heldout")])
    path.unlink()  # the run begins anew, and W&B keeps what it has
    assert len(ids) == 1 and ids != {LoggedSteps(path, "run").run_id}


def test_counts_are_summed_over_optimizer_steps_and_other_metrics_averaged() -> None:
    results = [StepResult(0.0, {"mismatch_count_expert_tokens_3": 60.0, "pg_loss": loss}, 1.0, 0.1) for loss in (1.0, 3.0)]
    assert averaged(results) == {"mismatch_count_expert_tokens_3": 120.0, "pg_loss": 2.0, "grad_norm": 1.0, "lr": 0.1}


# --- W&B: its offline files, and the refusal where it is not installed


def test_offline_a_runs_numbers_are_in_its_files(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from services.trainer.metrics_logger import WeightsAndBiases

    asked = {"use_wandb": True, "wandb_mode": "offline", "wandb_project": "sums", "wandb_dir": str(tmp_path / "w")}
    config = run_config(
        tmp_path,
        monitoring=asked,
        reward={"rm_type": "environment", "environment_url": "http://grader:8080"},
        rollout={"agent_options": {"url": "http://me:hush@agent/", "api_key": "hush"}},
    )
    for step, loss in ((3, 0.125), (4, 0.25)):  # the second life of a trainer continues under the same name
        writer = WeightsAndBiases(config, "actor")
        writer.write(3, {"train/loss": 0.5 - loss})  # the first value of a step stays
        writer.write(step, {"train/loss": loss, "rollout/raw_reward": 1.0})
        writer.write(2 + step, {"perf/step_time": 2.0})
        writer.close()
    for loss in (b"0.375", b"0.25"):  # W&B's own process writes them when it likes

        def written(loss: bytes = loss) -> bool:
            held = [file.read_bytes() for file in (tmp_path / "w" / "wandb").glob("offline-run-*/run-test-*.wandb")]
            assert not any(words in one for words in (b"grader:8080", b"hush") for one in held)
            return any(all(words in one for words in (b"train/loss", loss, b"perf/step_time", b"max_staleness")) for one in held)

        asyncio.run(until(written, f"a file of W&B with the loss {loss.decode()}"))


def test_no_address_of_the_run_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.trainer.metrics_logger import WeightsAndBiases

    sent: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **given: sent.append(given["config"]) or run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(devices, "check", lambda _: None)
    url = "http://grader:8080"
    config = run_config(
        tmp_path,
        rollout={
            **{"agent": "a.b:c", "agent_options": {"url": url}, "agent_service": ["serve", url], "sglang": {"host": url}},
            **{"models": {"judge": {"sglang": {"host": url}}}, "engine_groups": [{"replicas": 1, "sglang": {"host": url}}]},
        },
        trainer={"train_env_vars": {"PROXY": url}},
        algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"one": url}},
    )
    engines = config.rollout.model_copy(update={"external_engines": [url], "agent_command": ["play", url]})
    store = config.weights.model_copy(update={"object_store_url": url})
    WeightsAndBiases(config.model_copy(update={"rollout": engines, "weights": store}), "actor")
    assert "grader" not in json.dumps(sent) and sent[0]["trainer"]["lr"] == config.trainer.lr


def test_what_is_asked_for_without_being_installed_is_refused(tmp_path: Path) -> None:
    devices.check(run_config(tmp_path))
    config = run_config(tmp_path, monitoring={"use_wandb": True})
    if importlib.util.find_spec("wandb") is not None:
        devices.check(config)
        return
    with pytest.raises(ConfigError, match=r"monitoring.use_wandb = True: W&B is not installed: pip install 'myxo\[wandb\]'"):
        devices.check(config)
