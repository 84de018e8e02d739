"""Steps and versions, and where a run's final policy goes."""

import errno
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model import final_exports as final_exports_module
from shared.model.final_exports import MARK, exported_steps, final_exports, missing_exports, occupant, retire_exports
from shared.schema.versions import admissible_steps, crossed, is_periodic, is_pushed, version_after
from tests.support.run_config import run_config


def written(path: Path, steps: int, **mark: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / MARK).write_text(json.dumps({"steps": steps, **mark}))


def test_the_final_policy_goes_where_the_config_says(tmp_path: Path) -> None:
    template = str(tmp_path / "policy" / "{rollout_id}")
    config = run_config(tmp_path, rollout={"num_rollout": 6}, trainer={"save_hf": template})
    assert final_exports(config) == [config.trained / "hf", tmp_path / "policy" / "5"]
    assert final_exports(run_config(tmp_path, trainer={"save_final_hf": False})) == []
    assert final_exports(run_config(tmp_path, debug={"debug_rollout_only": True})) == []


def test_an_export_of_an_earlier_end_is_not_the_one_that_is_missing(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"num_rollout": 6})
    path = config.trained / "hf"
    assert missing_exports(config) == [path]
    written(path, 4)
    assert missing_exports(config) == [path]
    written(path, 6)
    assert missing_exports(config) == []
    (path / MARK).write_text("{")
    assert missing_exports(config) == [path]
    (path / MARK).unlink()
    assert missing_exports(config) == [path], "whatever it is"


def test_an_export_of_another_run_or_of_a_life_before_counts_for_nothing(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"num_rollout": 6}, trainer={"save_hf": str(tmp_path / "{rollout_id}"), "save_interval": 2})
    last = tmp_path / "5"
    for mark, steps in ({}, 6), ({"run": config.run.name}, 6), ({"run": "other"}, None):  # earlier releases told no run
        written(last, 6, **mark)
        assert exported_steps(config, last) == steps
    written(last, 6, run=config.run.name)
    written(tmp_path / "3", 4, run="other")
    for steps in (2, 4, 5):
        retire_exports(config, steps)
    assert exported_steps(config, last) == 6 and json.loads((tmp_path / "3" / MARK).read_text())["steps"] == 4
    written(config.trained / "hf", 6)
    retire_exports(config, 6)  # as the checkpoint of six steps is made anew
    assert missing_exports(config) == [config.trained / "hf", last]
    assert not occupant(config, last), "it may be replaced all the same"


def test_an_export_that_is_made_anew_on_a_full_disk_is_not_the_last_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(final_exports_module, "replace_file", full)
    config = run_config(tmp_path, rollout={"num_rollout": 6})
    path = config.trained / "hf"
    for mark in {"run": config.run.name}, {}:
        written(path, 6, **mark)
        retire_exports(config, 6)
        assert missing_exports(config) == [path] and not occupant(config, path)


def test_an_export_replaces_nothing_but_exports_of_its_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"save": str(tmp_path / "saved" / "here")})
    for path in (tmp_path, tmp_path / "saved", config.trained, config.run.root, config.model.hf_checkpoint):
        assert occupant(config, path), "what the run itself needs"
    place = tmp_path / "place"
    assert not occupant(config, place)
    place.mkdir()
    assert not occupant(config, place)
    (place / "notes.txt").touch()
    assert occupant(config, place)
    for mark, kept in ({}, False), ({"run": config.run.name}, False), ({"run": "other"}, True):
        written(place, 4, **mark)
        assert bool(occupant(config, place)) == kept
    (tmp_path / "file").touch()
    assert occupant(config, tmp_path / "file")


# --- the one rule of steps and versions, against its definition step by step

TOTALS, INTERVALS = st.integers(1, 60), st.integers(1, 9)


@given(TOTALS, INTERVALS)
def test_versions_count_the_pushes(total: int, interval: int) -> None:
    version = 0
    assert version_after(0, interval, total) == 0
    for steps in range(1, total + 1):
        version += is_pushed(steps, interval, total)
        assert version_after(steps, interval, total) == version


@given(TOTALS, INTERVALS)
def test_a_push_follows_every_interval_and_the_last_step(total: int, interval: int) -> None:
    pushed = [steps for steps in range(1, total + 1) if is_pushed(steps, interval, total)]
    assert pushed == sorted({*range(interval, total + 1, interval), total})


@given(TOTALS, INTERVALS, st.integers(0, 60), st.integers(0, 5))
def test_admission_is_for_exactly_the_steps_within_the_bound(total: int, interval: int, live: int, max_staleness: int) -> None:
    within = [step for step in range(total) if step // interval <= live + max_staleness]
    assert admissible_steps(live, max_staleness, interval, total) == len(within)


@given(st.sets(st.integers(0, 200)), INTERVALS, st.one_of(st.none(), INTERVALS))
def test_a_count_that_jumps_loses_nothing_that_is_due_and_does_nothing_twice(
    counts: set[int], interval: int, per_epoch: int | None
) -> None:
    seen = sorted({0, *counts})
    due = [steps for steps in range(1, seen[-1] + 1) if steps % interval == 0 or (per_epoch is not None and steps % per_epoch == 0)]
    fired = [(before, now) for before, now in pairwise(seen) if crossed(before, now, interval, per_epoch)]
    assert fired == [(before, now) for before, now in pairwise(seen) if any(before < steps <= now for steps in due)]
    one_by_one = range(1, seen[-1] + 1)
    assert [steps for steps in one_by_one if crossed(steps - 1, steps, interval, per_epoch)] == due
    assert [steps for steps in one_by_one if is_periodic(steps, interval, per_epoch)] == due
