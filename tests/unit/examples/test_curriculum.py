"""The example whose sums grow: the source, its data, and the table of a run."""

import json
import subprocess
import sys
from pathlib import Path

from examples.curriculum.figures import levels
from examples.curriculum.growing_sums import MOST_DIGITS, make
from shared.data.rollout_files import RolloutRecord, RolloutSample
from tests.support.run_config import run_config


def test_sums_grow_with_what_the_model_can_do_and_shrink_again(tmp_path: Path) -> None:
    data = {"prompt_data": None, "data_source": "examples.curriculum.growing_sums:make"}
    source = make(run_config(tmp_path, data=data, curriculum={"level_groups": 4}))
    digits = []
    for step in range(60):
        rows = source.get_samples(4)
        left, right = map(int, rows[0]["prompt"].rstrip("=").split("+"))
        assert rows[0]["label"] == str(left + right)
        digits.append(rows[0]["metadata"]["level"] + 1)
        assert len(str(left)) == digits[-1] == len(str(right))
        source.observe([{"metadata": row["metadata"], "pass_rate": 1.0 if step < 30 else 0.0} for row in rows])
        if step == 17:
            other = make(run_config(tmp_path, data=data, curriculum={"level_groups": 4}))
            other.load_state(json.loads(json.dumps(source.state())))
            source = other
    assert digits[:6] == [1, 2, 3, 3, 3, 3] and digits[-1] == 1 and max(digits) == MOST_DIGITS


def test_the_table_is_of_the_responses_that_the_run_has_kept(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    sample = {"finish": "stop", "prompt_length": 3, "length": 1, "response": "2"}
    records = [
        RolloutRecord(
            group=f"g{number:08d}",
            attempt=0,
            status="trained",
            at=1.0,
            metadata={"level": number // 3},
            samples=[RolloutSample(index=index, reward=float(index < number), **sample) for index in range(4)],
        )
        for number in (2, 0, 4)
    ]
    (rollouts / "000000.jsonl").write_bytes(b"".join(record.line() for record in records))
    assert levels(tmp_path) == [(0, 0, 0.0), (2, 0, 0.5), (4, 1, 1.0)]
    command = [sys.executable, "-m", "examples.curriculum.figures", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert [line.split() for line in shown[1:]] == [["0", "2", "0", "2", "0.25", "0.25"], ["1", "1", "4", "4", "1.00", "1.00"]]
