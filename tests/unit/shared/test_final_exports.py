"""Where a run's final policy goes, and when it is there."""

import json
from pathlib import Path

from shared.model.final_exports import MARK, exported_steps, final_exports, missing_exports
from tests.support.run_config import run_config


def written(path: Path, steps: int | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if steps is not None:
        (path / MARK).write_text(json.dumps({"steps": steps}))


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
    assert exported_steps(path, 6) is None
    (path / MARK).unlink()
    assert exported_steps(path, 6) == 6, "a release that marked none wrote it"
