"""Batches with samples that cannot be trained: real buffer and trainer processes, whose other services a player plays."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from services.buffer.policy import MOST_REFUSALS
from shared.bus import runs
from shared.schema import sample
from shared.schema.ledger import (
    PAYLOAD_LOST,
    BatchAmended,
    BatchFormed,
    BatchTrained,
    GroupDead,
    GroupRequeued,
    LedgerRecord,
    SampleRefused,
    group_id,
)
from shared.schema.sample import Sample
from tests.integration.buffer.conftest import Launched
from tests.integration.buffer.player import Player
from tests.support.loss_hooks import MARK
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

TRAINER = {"train_dtype": "float32", "train_device": "cpu", "save_final_hf": False, "async_save": False}
RUN_SECONDS = 300

Poison = Callable[[list[Sample]], list[bytes]]


def of_second(**changes: Any) -> Poison:
    """The group's second sample gets other fields; ``changes`` are functions of what it had."""

    def spoilt(samples: list[Sample]) -> list[bytes]:
        fields = {name: change(getattr(samples[1], name)) for name, change in changes.items()}
        samples[1] = dataclasses.replace(samples[1], **fields)
        return sample.encode(samples, 1 << 20)

    return spoilt


def with_last(value: float) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    return lambda array: np.append(array[:-1], np.asarray(value, array.dtype))


POISON: dict[str, tuple[Poison, str]] = {
    "a token outside the vocabulary": (of_second(response=with_last(1 << 20)), f"response holds token {1 << 20}"),
    "a negative token": (of_second(prompt=with_last(-1)), "prompt holds token -1"),
    "a version that never was": (of_second(segments=lambda _: [(0, 3, 1 << 40)]), f"version {1 << 40}"),
    "a mask of 7": (of_second(mask=with_last(7)), "mask holds 7"),
    "a log-prob that is not finite": (of_second(log_probs=with_last(float("nan"))), "log_probs holds nan"),
    "a response that is longer": (of_second(response=lambda ids: np.append(ids, ids)), "log_probs has 3 entries for 6"),
    "bytes that are no message": (lambda _: [b"\xc1\xc1"], "2 bytes that are not MessagePack"),
    "a name of a megabyte": (of_second(group=lambda name: name * 120_000), ""),
}


async def overwrite(player: Player, group: str, blob: bytes) -> None:
    """Writes over what lies in the store of a group, past all accounts."""
    [key] = [key for key in await player.blobs() if f":{group}:" in key]
    async with Redis.from_url(await runs.store_url(player.bus, player.config.run.name)) as client:
        await client.set(key, blob)


@contextlib.contextmanager
def trainer_of(player: Player, directory: Path, role: str = "trainer") -> Iterator[ServiceProcess]:
    with ServiceProcess("trainer", directory / f"{role}.log", player.environment(role)) as process:
        yield process


@contextlib.asynccontextmanager
async def working(player: Player) -> AsyncIterator[None]:
    """The player generates and scores whatever is asked for meanwhile."""

    async def work() -> None:
        while True:
            await player.work(4)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ended(process: ServiceProcess) -> None:
    """Waits until the trainer has left a run that is done; it has had one life."""
    await until(lambda: process.process.poll() is not None, f"the trainer's end\n{process.words()[-3000:]}", RUN_SECONDS)
    assert process.process.returncode == 0, process.words()[-5000:]


def of_kind(records: list[LedgerRecord], kind: type[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extra)])
async def test_whatever_is_wrong_with_a_group_the_step_goes_on_with_another(ranks: int, launched: Launched, tmp_path: Path) -> None:
    """Every kind of poison in one batch, beside two good groups. The trainer lives once, and trains a whole batch.

    What the store has lost is generated anew.
    """
    groups, bad = len(POISON) + 4, len(POISON) + 2
    rollout = {"num_rollout": 1, "rollout_batch_size": groups, "n_samples_per_prompt": 2}
    player, _ = await launched(rollout=rollout, trainer={**TRAINER, "actor_num_gpus_per_node": ranks})
    player.spoil = dict(zip(map(group_id, range(groups)), (spoilt for spoilt, _ in POISON.values()), strict=False)).get
    await player.live(0)
    names = sorted(await player.work_until(groups))
    await player.batch(0)
    gone, changed = names[len(POISON) : bad]
    await player.store.free([key for key in await player.blobs() if f":{gone}:" in key])
    await overwrite(player, changed, b"another's")
    with trainer_of(player, tmp_path) as trainer:
        async with working(player):
            await ended(trainer)
    records = await player.records()
    refusals = Counter(record.group for record in of_kind(records, SampleRefused))
    assert refusals == dict.fromkeys(names[:bad], MOST_REFUSALS) | {gone: 1}
    [again] = of_kind(records, GroupRequeued)
    assert (again.group, again.attempt, again.reason) == (gone, 1, PAYLOAD_LOST)
    reasons = {record.group: record.reason for record in of_kind(records, GroupDead)}
    for name, (kind, (_, words)) in zip(names, POISON.items(), strict=False):
        assert reasons[name].startswith(f"trainer: sample {name}/") and words in reasons[name], (kind, reasons[name])
    assert "it was overwritten or damaged" in reasons[changed] and gone not in reasons
    removed = [name for record in of_kind(records, BatchAmended) for name in record.removed]
    added = [name for record in of_kind(records, BatchAmended) for name in record.added]
    assert sorted(removed) == names[:bad] and len(added) == bad and set(added) & set(names) <= {gone}
    report = await player.audit()
    assert report.violations == []
    assert (report.steps, report.trained, report.amended, report.dead.total()) == (1, groups, bad, bad - 1)


def marked(last: int, most: int | None = None) -> Poison:
    """Each sample, or the first ``most``, ends in a token."""

    def spoilt(samples: list[Sample]) -> list[bytes]:
        for item in samples[:most]:
            item.response = with_last(last)(item.response)
        return sample.encode(samples, 1 << 20)

    return spoilt


FAILS, IS_NAN = "tests.support.loss_hooks:fails_for_a_token", "tests.support.loss_hooks:is_nan_for_a_token"


@pytest.mark.parametrize(
    ("ranks", "function", "words"),
    [
        (1, FAILS, "index out of range in self"),
        pytest.param(2, FAILS, "index out of range in self", marks=pytest.mark.extra),
        pytest.param(2, IS_NAN, "its loss is nan", marks=pytest.mark.extra),
    ],
)
async def test_a_sample_that_a_step_fails_for_is_found_although_nothing_names_it(
    ranks: int, function: str, words: str, launched: Launched, tmp_path: Path
) -> None:
    rollout = {"num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "max_staleness": 1}
    objective = {"loss_type": "custom_loss", "custom_loss_function_path": function}
    player, _ = await launched(rollout=rollout, algorithm=objective, trainer={**TRAINER, "actor_num_gpus_per_node": ranks})
    player.spoil = {group_id(2): marked(MARK, most=1)}.get
    await player.live(0)
    names = sorted(await player.work_until(4))
    await player.batch(0)
    with trainer_of(player, tmp_path) as trainer:
        async with working(player):
            await ended(trainer)
    records = await player.records()
    [death] = of_kind(records, GroupDead)
    assert (death.group, words in death.reason) == (names[2], True), death.reason
    assert death.reason.startswith(f"trainer: sample {names[2]}/0: ")
    assert len(of_kind(records, SampleRefused)) == MOST_REFUSALS
    report = await player.audit()
    assert report.violations == []
    assert (report.steps, report.trained, report.amended) == (2, 8, 1)


@pytest.mark.extra
async def test_what_fails_for_each_sample_is_no_samples_fault(launched: Launched, tmp_path: Path) -> None:
    rollout = {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    loss = {"loss_type": "custom_loss", "custom_loss_function_path": "tests.support.loss_hooks:fails_always"}
    player, _ = await launched(rollout=rollout, algorithm=loss, trainer={**TRAINER, "actor_num_gpus_per_node": 2})
    await player.live(0)
    await player.work_until(2)
    with trainer_of(player, tmp_path) as trainer:
        await until(lambda: trainer.process.poll() is not None, "the trainer's end", RUN_SECONDS)
    assert trainer.process.returncode == 1
    assert "index out of range in self" in trainer.words()
    assert not of_kind(await player.records(), SampleRefused)


@pytest.mark.extra(each=True)
async def test_a_payload_that_is_spoilt_after_it_was_trained_costs_its_own_group(launched: Launched, tmp_path: Path) -> None:
    """The trainer dies before its checkpoint, and is handed the step again; nothing that is generated now is old enough for it."""
    rollout = {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_staleness": 1}
    player, _ = await launched(rollout=rollout, trainer={**TRAINER, "save_interval": 2})
    await player.live(0)
    first, second = sorted(await player.work_until(2))

    async def trained() -> bool:
        return bool(of_kind(await player.records(), BatchTrained))

    with trainer_of(player, tmp_path) as trainer:
        await until(trained, "the first step", RUN_SECONDS)
        trainer.kill()
    await overwrite(player, first, b"another's")
    with trainer_of(player, tmp_path) as trainer:
        async with working(player):
            await ended(trainer)
    records = await player.records()
    assert [(record.removed, record.added) for record in of_kind(records, BatchAmended)] == [([first], [])]
    report = await player.audit()
    assert report.violations == []
    assert (report.steps, report.trained, report.dead.total(), report.finished) == (2, 3, 1, True)
    assert second in of_kind(records, BatchFormed)[0].groups


@pytest.mark.extra
async def test_a_run_of_nothing_but_poison_fails_with_the_reason(launched: Launched, tmp_path: Path) -> None:
    """The groups come back scored each time, so the count of dead groups in a row never gets anywhere."""
    rollout = {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_dead_in_a_row": 5}
    player, _ = await launched(rollout=rollout, trainer=TRAINER)
    player.spoil = lambda _: of_second(mask=with_last(7))
    await player.live(0)

    with trainer_of(player, tmp_path) as trainer:

        async def failed() -> bool:
            return await player.phase() == "failed"

        async with working(player):
            await until(failed, "the run's failure", RUN_SECONDS)
            await ended(trainer)
    assert "5 groups for one step were refused or lost (rollout.max_dead_in_a_row = 5)" in trainer.words()
    assert "mask holds 7" in trainer.words()
    assert (await player.audit()).violations == []
