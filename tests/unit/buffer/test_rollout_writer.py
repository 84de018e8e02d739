"""Kept responses: the writer on a real disk (rotation, the bound, what it does where the disk refuses), and the keeper's bounds."""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.buffer import rollout_keeper
from services.buffer.rollout_keeper import EndedGroup, RolloutKeeper, RolloutNotKept, RolloutWriter
from shared.data import rollout_files
from shared.data.prompts import Prompt
from shared.data.rollout_files import RolloutRecord
from shared.runtime.errors import DeadlineExceeded, PayloadMissing
from shared.schema import sample
from shared.schema.ledger import group_id
from shared.schema.messages import Payload
from shared.schema.sample import Sample
from tests.support.rollout_reader import RolloutReader
from tests.support.run_config import run_config
from tests.support.valid_messages import example
from tests.support.waiting import until

BOUND = 1 << 20

WrittenGroup = tuple[EndedGroup, list[bytes], Prompt | None]


def ended(number: int, status: str = "trained", attempt: int = 0, reason: str = "", **known: Any) -> EndedGroup:
    record = RolloutRecord.model_construct(group=group_id(number), attempt=attempt, status=status, at=1.0, reason=reason)
    return EndedGroup(record, **known)


def job(number: int, text: str = "x" * 1000, again: bool = False) -> WrittenGroup:
    made = example(Sample, group=group_id(number), text=text, prompt_text="1+1=")
    return ended(number, payload=Payload(keys=["k"], bytes=9), rewards=(1.0,), again=again), sample.encode([made], 1 << 18), None


def written(writer: RolloutWriter, *jobs: WrittenGroup) -> tuple[Counter[str], list[str]]:
    """Writes groups; returns how many are not kept, by reason, and what was said of them."""
    skipped: Counter[str] = Counter()
    errors = []
    for item in jobs:
        try:
            writer.write(*item)
        except RolloutNotKept as error:
            skipped[error.reason] += 1
            errors.append(str(error))
    return skipped, errors


def groups(directory: Path) -> list[int]:
    return [int(record.group[1:]) for record in RolloutReader(directory).records()]


def test_files_end_at_a_share_of_the_bound_and_the_oldest_go(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, BOUND, False)
    assert not written(writer, *(job(number) for number in range(1500)))[0]
    sizes = [path.stat().st_size for path in rollout_files.files(tmp_path)]
    assert sum(sizes) == writer.used <= BOUND and max(sizes) <= BOUND // rollout_keeper.FILES
    assert sum(sizes) > BOUND // 2
    left = groups(tmp_path)
    assert left == list(range(left[0], 1500)) and left[0] > 0
    assert writer.written == 1500


def test_a_new_writer_goes_on_in_a_new_file_under_the_same_bound(tmp_path: Path) -> None:
    written(RolloutWriter(tmp_path, BOUND, False), job(0), job(1))
    writer = RolloutWriter(tmp_path, BOUND, False)
    written(writer, job(1, again=True), job(2, again=True), *(job(number) for number in range(3, 1500)))
    kept = {record.group for record in RolloutReader(tmp_path).records()}
    assert not kept & {group_id(1), group_id(2)}, "what the first one wrote was removed with the oldest"
    assert sum(path.stat().st_size for path in rollout_files.files(tmp_path)) <= BOUND
    assert writer.written == 1498, "group 1 was there already"


def test_a_group_without_payload_has_its_prompt(tmp_path: Path) -> None:
    prompt = Prompt("1+1=", np.array([1], np.int32), "2", True, {"level": 1}, "exact")
    written(RolloutWriter(tmp_path, BOUND, False), (ended(1, "dead", 2, "too long"), [], prompt))
    (record,) = RolloutReader(tmp_path).records()
    assert (record.status, record.reason, record.attempt, record.samples) == ("dead", "too long", 2, [])
    assert (record.prompt, record.label, record.metadata) == ("1+1=", 2, {"level": 1}), "a number, as in the prompt file"


def test_a_group_whose_reward_failed_keeps_its_responses_without_rewards(tmp_path: Path) -> None:
    dead = ended(1, "dead", reason="reward-0: reward.custom_rm_path = my:score failed", payload=Payload(keys=["k"], bytes=9))
    prompt = Prompt("1+1=", np.array([1], np.int32), "2", False, {}, "exact")
    unreadable = replace(dead, record=dead.record.model_copy(update={"group": group_id(2)}))
    written(RolloutWriter(tmp_path, BOUND, False), (dead, job(1, "so 3")[1], prompt), (unreadable, [b"no payload"], prompt))
    first, second = RolloutReader(tmp_path).records()
    assert (first.status, first.reason, first.prompt) == ("dead", "reward-0: reward.custom_rm_path = my:score failed", "1+1=")
    assert [(one.response, one.reward) for one in first.samples] == [("so 3", None)]
    assert (second.prompt, second.samples) == ("1+1=", [])


def test_what_cannot_be_kept_is_told_by_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    odd = (ended(9, payload=Payload(keys=["k"], bytes=9), rewards=(1.0, 2.0)), job(9)[1], None)
    unreadable = (job(1)[0], [b"no payload"], None)
    skipped, _ = written(RolloutWriter(tmp_path, BOUND, False), job(0, "x" * BOUND), unreadable, odd, job(2))
    assert groups(tmp_path) == [2]
    assert skipped == {rollout_keeper.TOO_LARGE: 1, rollout_keeper.UNREADABLE: 2}


def test_a_directory_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "rollouts"
    blocked.write_text("a file stands in the way")
    writer = RolloutWriter(blocked, BOUND, False)
    skipped, errors = written(writer, job(0), job(1))
    assert skipped == {rollout_keeper.DISK: 2} and str(blocked) in errors[0]
    blocked.unlink()
    monkeypatch.setattr(rollout_keeper, "RETRY_SECONDS", 0.0)
    written(writer, job(2))
    assert groups(blocked) == [2]


FULL = """
import resource, sys
from pathlib import Path
from services.buffer import rollout_keeper
from tests.unit.buffer.test_rollout_writer import BOUND, RolloutWriter, job, written
writer = RolloutWriter(Path(sys.argv[1]), BOUND, False)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
skipped, _ = written(writer, *(job(number) for number in range(20)))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
rollout_keeper.RETRY_SECONDS = 0.0
written(writer, job(20))
print(writer.written, dict(skipped))
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


# --- the keeper


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})


class BlobStore:
    """Payloads by key; reading waits for ``open``, or finds the store away as often as ``away`` says."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.open = asyncio.Event()
        self.away = 0

    async def read(self, payload: Payload, deadline: float) -> list[bytes]:
        await self.open.wait()
        if self.away:
            self.away -= 1
            await asyncio.sleep(0)
            raise DeadlineExceeded("a payload", "the store", deadline, "given up")
        if any(key not in self.blobs for key in payload.keys):
            raise PayloadMissing("a payload is gone")
        return [self.blobs[key] for key in payload.keys]


async def never() -> None:
    raise AssertionError("no end was asked for")


def of_job(store: BlobStore, number: int, again: bool = False) -> EndedGroup:
    """A group whose payload the store has."""
    store.blobs[f"k{number}"] = job(number)[1][0]
    return replace(ended(number, payload=Payload(keys=[f"k{number}"], bytes=10), rewards=(1.0,)), again=again)


async def test_what_a_store_that_is_away_holds_is_kept_when_it_is_back_and_the_runs_end_waits_for_it(tmp_path: Path) -> None:
    store, log, freed, done = BlobStore(), Log(), [], asyncio.Event()
    service: Any = SimpleNamespace(config=run_config(tmp_path), store=store, log=log)

    async def set_done() -> None:
        done.set()

    keeper = RolloutKeeper(service, SimpleNamespace(of_group=None), freed.extend, set_done)  # type: ignore[arg-type]
    assert not keeper.delays_end
    keeper.take([of_job(store, number) for number in range(3)])
    keeper.release(["k0", "k1"])
    store.away = 20
    running = asyncio.create_task(keeper.run())
    assert keeper.delays_end and freed == []
    store.open.set()
    await asyncio.wait_for(done.wait(), 30)
    running.cancel()
    assert not keeper.delays_end and not keeper.skipped
    assert groups(service.config.run.root / rollout_files.DIRECTORY) == [0, 1, 2] and sorted(freed) == ["k0", "k1"]
    assert [(line["event"], line["waiting"]) for line in log.lines] == [("rollouts_wait_for_store", 3)], "one line now and then"


async def test_the_runs_end_does_not_wait_for_ever_and_too_much_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_keeper, "HELD_BYTES", 15)
    store, freed = BlobStore(), []
    service: Any = SimpleNamespace(config=run_config(tmp_path), store=store, log=Log())
    keeper = RolloutKeeper(service, SimpleNamespace(of_group=None), freed.extend, never)  # type: ignore[arg-type]
    keeper.take([of_job(store, 0), of_job(store, 1), of_job(store, 2, again=True)])
    store.open.set()
    store.away = 1 << 30
    running = asyncio.create_task(keeper.run())
    keeper.release(["k0", "k1", "k2"])
    assert freed == ["k1", "k2"] and keeper.skipped == {rollout_keeper.BEHIND: 1}, "another buffer may have kept the third"
    assert keeper.delays_end
    monkeypatch.setattr(rollout_keeper, "END_SECONDS", 0.0)
    assert keeper.is_late and not keeper.delays_end
    running.cancel()


async def test_payloads_are_held_up_to_a_bound_and_freed_once_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_keeper, "HELD_BYTES", 30)
    monkeypatch.setattr(rollout_keeper, "WAITING_GROUPS", 6)
    store, log, freed = BlobStore(), Log(), []
    service: Any = SimpleNamespace(config=run_config(tmp_path), store=store, log=log)
    keeper = RolloutKeeper(service, SimpleNamespace(of_group=None), freed.extend, never)  # type: ignore[arg-type]
    for number in range(7):
        store.blobs[f"k{number}"] = job(number)[1][0]
        keeper.take([ended(number, payload=Payload(keys=[f"k{number}"], bytes=10), rewards=(1.0,))])
    keeper.release(f"k{number}" for number in range(7))
    assert keeper.skipped == {rollout_keeper.BEHIND: 4}, "one that found no place, and three that were over the bytes held"
    assert sorted(freed) == ["k3", "k4", "k5", "k6"]
    assert [(line["event"], line["reason"]) for line in log.lines] == [("rollouts_not_kept", "behind")], "one line now and then"
    del store.blobs["k1"]
    running = asyncio.create_task(keeper.run())
    store.open.set()
    await until(lambda: len(freed) == 7, "all payloads freed")
    await keeper.drain(30)
    running.cancel()
    directory = service.config.run.root / rollout_files.DIRECTORY
    assert groups(directory) == [0, 2] and keeper.skipped[rollout_keeper.LOST] == 1


async def test_the_prompt_of_a_group_without_samples_is_read_beside_the_buffers_loop(tmp_path: Path) -> None:
    """It may take minutes, of a source of the user's or with videos to decode: meanwhile the buffer keeps its lease."""
    threads = list[threading.Thread]()

    def of_group(name: str) -> Prompt:
        threads.append(threading.current_thread())
        return Prompt(f"of {name}", np.zeros(1, np.int32), None, False, {}, "exact")

    service: Any = SimpleNamespace(config=run_config(tmp_path), store=BlobStore(), log=Log())
    keeper = RolloutKeeper(service, SimpleNamespace(of_group=of_group), lambda _: None, never)  # type: ignore[arg-type]
    keeper.take([ended(0, status="dead"), ended(1, status="dropped")])
    running = asyncio.create_task(keeper.run())
    await keeper.drain(30)
    running.cancel()
    reader = RolloutReader(service.config.run.root / rollout_files.DIRECTORY)
    assert [record.prompt for record in reader.records()] == [f"of {group_id(0)}", f"of {group_id(1)}"]
    assert threading.main_thread() not in threads and len(threads) == 2


async def test_an_error_that_nobody_expects_of_the_writer_ends_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not leave the keeper waiting for ever for a thread that is gone."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake in the writer")

    monkeypatch.setattr(RolloutWriter, "write", broken)
    service: Any = SimpleNamespace(config=run_config(tmp_path), store=BlobStore(), log=Log())
    service.store.open.set()
    service.store.blobs["k"] = job(0)[1][0]
    keeper = RolloutKeeper(service, SimpleNamespace(of_group=None), lambda _: None, never)  # type: ignore[arg-type]
    keeper.take([ended(0, payload=Payload(keys=["k"], bytes=10), rewards=(1.0,))])
    with pytest.raises(ZeroDivisionError, match="a mistake in the writer"):
        await asyncio.wait_for(keeper.run(), 30)
