"""The writer of kept responses on a real disk: rotation, the bound, what it does where the disk refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.buffer import rollout_writer
from services.buffer.ended_groups import EndedGroup
from services.buffer.rollout_writer import RolloutWriter, WriteJob
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.data.rollout_files import RolloutReader
from shared.schema import sample
from shared.schema.ledger import group_id
from shared.schema.sample import Sample

BOUND = 1 << 20


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})


def job(number: int, text: str = "x" * 1000, **fields: Any) -> WriteJob:
    one = Sample(
        group=group_id(number),
        index=0,
        prompt=np.array([1], np.int32),
        response=np.array([2, 3], np.int32),
        log_probs=np.zeros(2, np.float32),
        mask=np.ones(2, np.uint8),
        segments=[(0, 2, 0)],
        finish="stop",
        text=text,
        prompt_text="1+1=",
    )
    group = EndedGroup(group_id(number), 0, "trained", 1.0, step=number, version=0, keys=("k",), size=9, rewards=(1.0,))
    return WriteJob(group, sample.encode([one], 1 << 18), **fields)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def written(writer: RolloutWriter, *jobs: WriteJob) -> None:
    for one in jobs:
        writer.offer(one)
    until(lambda: writer.idle)


def groups(directory: Path) -> list[int]:
    return [int(record.group[1:]) for record in RolloutReader(directory).records()]


def test_files_end_at_a_share_of_the_bound_and_the_oldest_go(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, BOUND, False, Log())
    written(writer, *(job(number) for number in range(1500)))
    sizes = [path.stat().st_size for path in rollout_files.files(tmp_path)]
    assert sum(sizes) == writer.used <= BOUND and max(sizes) <= BOUND // rollout_writer.FILES
    assert sum(sizes) > BOUND // 2
    left = groups(tmp_path)
    assert left == list(range(left[0], 1500)) and left[0] > 0
    assert (writer.written, writer.skipped) == (1500, {})


def test_a_new_writer_goes_on_in_a_new_file_under_the_same_bound(tmp_path: Path) -> None:
    written(RolloutWriter(tmp_path, BOUND, False, Log()), job(0), job(1))
    writer = RolloutWriter(tmp_path, BOUND, False, Log())
    written(writer, job(1, again=True), job(2, again=True), *(job(number) for number in range(3, 1500)))
    assert len(RolloutReader(tmp_path).groups([group_id(1), group_id(2)])) == 0, "what the first one wrote was removed with the oldest"
    assert sum(path.stat().st_size for path in rollout_files.files(tmp_path)) <= BOUND
    assert writer.written == 1498, "group 1 was there already"


def test_a_group_without_payload_has_its_prompt(tmp_path: Path) -> None:
    prompt = Prompt("1+1=", np.array([1], np.int32), "2", {"level": 1}, "exact")
    written(RolloutWriter(tmp_path, BOUND, False, Log()), WriteJob(EndedGroup("g00000001", 2, "dead", 1.0, "too long"), prompt=prompt))
    (record,) = RolloutReader(tmp_path).records()
    assert (record.status, record.reason, record.attempt, record.samples) == ("dead", "too long", 2, [])
    assert (record.prompt, record.label, record.metadata) == ("1+1=", "2", {"level": 1})


def test_what_cannot_be_kept_is_counted_by_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    log = Log()
    writer = RolloutWriter(tmp_path, BOUND, False, log)
    odd = WriteJob(EndedGroup("g00000009", 0, "trained", 1.0, keys=("k",), rewards=(1.0, 2.0)), job(9).blobs)
    written(writer, job(0, "x" * BOUND), WriteJob(job(1).group, [b"no payload"]), odd, job(2))
    assert groups(tmp_path) == [2]
    assert writer.skipped == {rollout_writer.TOO_LARGE: 1, rollout_writer.UNREADABLE: 2}
    assert [(line["event"], line["reason"]) for line in log.lines] == [("rollouts_not_kept", "too large")], "one line now and then"


def test_a_disk_that_does_not_keep_up_costs_responses_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RolloutWriter(tmp_path, BOUND, False, Log())
    monkeypatch.setattr(writer, "_thread", type("Hung", (), {"is_alive": lambda self: True})())
    monkeypatch.setattr(rollout_writer, "QUEUE_BYTES", 10_000)
    for number in range(20):
        writer.offer(job(number))
    assert 0 < writer.skipped[rollout_writer.SLOW_DISK] < 20
    assert writer._queued_bytes <= 10_000 and not writer.idle


def test_a_directory_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, log = tmp_path / "rollouts", Log()
    blocked.write_text("a file stands in the way")
    writer = RolloutWriter(blocked, BOUND, False, log)
    written(writer, job(0), job(1))
    assert writer.skipped == {rollout_writer.DISK: 2} and str(blocked) in log.lines[0]["error"]
    blocked.unlink()
    monkeypatch.setattr(writer, "_refused_until", 0.0)
    written(writer, job(2))
    assert groups(blocked) == [2]


FULL = """
import resource, sys
from pathlib import Path
from tests.unit.buffer.test_rollout_writer import BOUND, Log, RolloutWriter, job, written
writer, log = RolloutWriter(Path(sys.argv[1]), BOUND, False, Log()), Log()
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
written(writer, *(job(number) for number in range(20)))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer._refused_until = 0.0
written(writer, job(20))
print(writer.written, dict(writer.skipped))
"""


def test_a_write_that_the_disk_breaks_off_leaves_whole_lines(tmp_path: Path) -> None:
    """As a full disk does: part of the line is taken, the rest refused."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4 {'disk': 17}"
    reader = RolloutReader(tmp_path)
    assert [record.group for record in reader.records()] == [group_id(number) for number in (0, 1, 2, 20)]
    assert reader.torn == 0
