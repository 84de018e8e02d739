"""From a batch's references, through the real store, to packed micro-batches."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.trainer import batches
from services.trainer.objective import ObjectiveConfig
from shared import sample
from shared.embedded import EmbeddedValkey
from shared.errors import BadMessage, PayloadMissing
from shared.messages import Batch, BatchGroup, Payload
from shared.store import BlockingStore, Store


def made(group: str, index: int, length: int, version: int) -> sample.Sample:
    return sample.Sample(
        group=group,
        index=index,
        prompt=np.asarray([1, 2], np.int32),
        response=np.arange(length, dtype=np.int32) + 3,
        log_probs=np.full(length, -0.5, np.float32),
        mask=np.ones(length, np.uint8),
        segments=[(0, length, version)],
        finish="stop",
        text="x",
        label="1",
    )


async def stored(url: str, run: str, rewards: list[list[float]]) -> Batch:
    """A batch at version 3 whose groups' samples are 1, 2, … tokens long and of version 1, 2, …"""
    store, groups = Store(url), []
    for number, values in enumerate(rewards):
        name = f"g{number:08d}"
        samples = [made(name, index, index + 1, number + 1) for index in range(len(values))]
        blobs = sample.encode(samples, 200)
        keys = [f"{run}:{name}:{part}" for part in range(len(blobs))]
        await store.write(dict(zip(keys, blobs, strict=True)))
        payload = Payload(keys=keys, bytes=sum(map(len, blobs)))
        groups.append(BatchGroup(group=name, payload=payload, rewards=values))
    await store.close()
    return Batch(step=7, version=3, groups=groups)


def test_a_batch_is_read_and_packed(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0], [1.0, 1.0]]))
    read = batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), 1)
    (samples,) = read.optimizer_steps
    assert [one.advantage for one in samples[2:]] == [0.0, 0.0], "equal rewards teach nothing"
    assert samples[0].advantage == pytest.approx(-samples[1].advantage)
    figures = read.figures
    assert (figures.reward, figures.response_tokens, figures.tokens) == (0.75, 6, 14)
    assert (figures.staleness_mean, figures.staleness_max, figures.zero_std_groups) == (1.5, 2, 0.5)
    (packed,) = batches.micro_batches(samples, ObjectiveConfig(), dp_rank=0, dp_size=1, max_tokens=100, vocab_size=100)
    assert packed.loss_mask.sum() == 6
    assert packed.fields["weights"].sum() == pytest.approx(1.0), "the mean over samples of the means over their tokens"


def test_optimizer_steps_get_every_sample_once(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0, 1.0], [0.0, 1.0]]))
    read = batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), 2)
    names = [[one.name for one in part] for part in read.optimizer_steps]
    assert sorted(name for part in names for name in part) == ["g00000000/0", "g00000000/1", "g00000000/2", "g00000001/0", "g00000001/1"]
    assert [len(part) for part in names] == [2, 3]


def test_a_lost_payload_and_one_that_does_not_fit_are_named(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0]]))
    batch.groups[0].rewards.append(1.0)
    with pytest.raises(BadMessage, match="group g00000000 of step 7: 2 samples in the store, 3 rewards"):
        batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), 1)
    batch.groups[0].payload.keys[0] = "nowhere"
    with pytest.raises(PayloadMissing, match="no blob nowhere"):
        batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), 1)


def two_versions(group: str, index: int) -> sample.Sample:
    """Six tokens, two each of versions 0, 1 and 2; the second one an environment's."""
    one = made(group, index, 6, 0)
    one.segments = [(0, 2, 0), (2, 4, 1), (4, 6, 2)]
    one.mask[1] = 0
    return one


async def mixed(url: str, run: str, mask_below: int, removed: list[int], groups: int = 1) -> Batch:
    store, refs = Store(url), []
    for number in range(groups):
        name = f"g{number:08d}"
        samples = [two_versions(name, 0), made(name, 1, 3, 0), made(name, 2, 4, 2)]
        (blob,) = sample.encode(samples, 10_000)
        await store.write({f"{run}:{name}": blob})
        payload = Payload(keys=[f"{run}:{name}"], bytes=len(blob))
        refs.append(BatchGroup(group=name, payload=payload, rewards=[1.0, 0.0, 0.0], removed=removed))
    await store.close()
    return Batch(step=0, version=2, mask_below=mask_below, groups=refs)


@pytest.mark.parametrize(
    ("mask_below", "removed", "masks", "figures"),
    [
        (0, [], ["101111", "111", "1111"], (2, 0, 0)),
        (1, [], ["001111", "000", "1111"], (1, 4, 0)),
        (2, [2], ["000011", "000", "0000"], (0, 6, 1)),
    ],
)
def test_stale_tokens_and_removed_samples_leave_the_loss(
    valkey: EmbeddedValkey, run_name: str, mask_below: int, removed: list[int], masks: list[str], figures: tuple[int, int, int]
) -> None:
    batch = asyncio.run(mixed(valkey.url, run_name, mask_below, removed))
    read = batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), 1)
    (samples,) = read.optimizer_steps
    assert ["".join(map(str, one.loss_mask)) for one in samples] == masks
    assert (read.figures.staleness_max, read.figures.masked_tokens, read.figures.removed_samples) == figures
    assert samples[0].advantage == pytest.approx(-2 * samples[1].advantage), "every reward counts in the group"
    (packed,) = batches.micro_batches(samples, ObjectiveConfig(), dp_rank=0, dp_size=1, max_tokens=100, vocab_size=100)
    assert int(packed.loss_mask.sum()) == sum(mask.count("1") for mask in masks)


def test_every_optimizer_step_trains_something(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(mixed(valkey.url, run_name, 2, [2], groups=3))  # of nine samples three are trained: 0, 3 and 6
    for parts, sizes in ((1, [9]), (2, [1, 8]), (3, [1, 3, 5]), (5, [1, 3, 5])):
        steps = batches.read(batch, BlockingStore(valkey.url), ObjectiveConfig(), parts).optimizer_steps
        assert [len(step) for step in steps] == sizes
        assert all(any(one.trained_tokens for one in step) for step in steps)
