"""From a batch's references, through the real store, to packed micro-batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import redis
import torch

from services.trainer import batches
from services.trainer.batch_metrics import token_means
from services.trainer.batches import BadBatch, ShardReader, TrainBatch
from services.trainer.loss_inputs import LossInputs
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.packing import PARTIAL
from services.trainer.partition import Untrainable, partition_batch
from shared.config.algorithm import AlgorithmSection
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema import sample
from shared.schema.digests import reference
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import SampleLimits
from shared.store.payload_store import BlockingStore, Store
from tests.support.valid_messages import example

OBJECTIVE = AlgorithmSection()


def made(group: str, index: int, length: int, version: int) -> sample.Sample:
    fields = {"prompt": [1, 2], "response": [*range(3, length + 3)], "log_probs": -0.5, "segments": [(0, length, version)]}
    return example(sample.Sample, group=group, index=index, **fields)


def test_samples_without_log_probs_are_told_to_every_rank(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0], [0.0, 1.0]], lacking="g00000001/1"))
    ranks = assemble_all(batch, valkey.url, steps=1, ranks=2, objective=OBJECTIVE)
    for rank in ranks:
        assert all(PARTIAL in packed.fields and "rollout_log_probs" not in packed.fields for packed in rank.packed)
        assert "rollout_log_probs" not in token_means(rank.packed, lambda own: own)
    found = {name: values for rank in ranks for name, values in rank.named(PARTIAL).items()}
    assert len(found) == 4
    assert {name for name, values in found.items() if values.isnan().any()} == {"g00000001/1"}
    assert found["g00000001/1"].isnan().all() and all((found[name] == -0.5).all() for name in found.keys() - {"g00000001/1"})
    partition, needed = partition_batch(batch, 1, 1, 100), SampleLimits(100, log_probs_reader="algorithm.use_tis = true reads them")
    with pytest.raises(Untrainable, match="g00000001/1.*log_probs are missing: algorithm.use_tis = true reads them"):
        ShardReader(BlockingStore(valkey.url), 0, needed).take(partition)


def lengths(samples: list[sample.Sample]) -> list[int]:
    return [one.length for one in samples]


def read(batch: Batch, url: str, steps: int = 1, ranks: int = 1, objective: AlgorithmSection = OBJECTIVE) -> list[TrainBatch]:
    """What each of ``ranks`` data-parallel ranks makes of a batch: they differ in what they read, and add up what they found."""
    assembled = assemble_all(batch, url, steps, ranks, objective)
    return [inputs(objective, url).with_advantages(item) for item in assembled]


def inputs(objective: AlgorithmSection, url: str, custom: CustomFunctions | None = None) -> LossInputs:
    """The inputs of a loss on the only rank."""
    return LossInputs(objective, custom or CustomFunctions(), BlockingStore(url), total=lambda own: own)


def assemble_all(batch: Batch, url: str, steps: int, ranks: int, objective: AlgorithmSection) -> list[TrainBatch]:
    partition = partition_batch(batch, steps, ranks, 100)
    shards = [ShardReader(BlockingStore(url), rank, SampleLimits(100)).take(partition) for rank in range(ranks)]
    stats = np.sum([shard.stats for shard in shards], axis=0)
    return [batches.assemble(shard, stats, objective, rank=rank) for rank, shard in enumerate(shards)]


def trained(batch: TrainBatch) -> dict[str, sample.Sample]:
    """A rank's samples by name."""
    named = ((index, item) for step in batch.steps for micro in step for index, item in zip(micro.indices, micro.samples, strict=True))
    return {batch.partition.name(index): item for index, item in sorted(named, key=lambda pair: pair[0])}


async def stored(url: str, run: str, rewards: list[list[float]], lacking: str = "", roles: Sequence[str] = ()) -> Batch:
    """A batch at version 3 whose groups' samples are 1, 2, … tokens long and of version 1, 2, 3, 3, …; one may lack its log-probs.

    roles: each rollout has a sample of each.
    """
    store, groups = Store(url), []
    for number, values in enumerate(rewards):
        name = f"g{number:08d}"
        samples = [made(name, index, index + 1, min(number + 1, 3)) for index in range(len(values))]
        for index, one in enumerate(samples if roles else ()):
            one.role, one.rollout = roles[index % len(roles)], index // len(roles)
        blobs = sample.encode([replace(one, log_probs=None) if one.name == lacking else one for one in samples], 200)
        written = {f"{run}:{name}:{part}": blob for part, blob in enumerate(blobs)}
        await store.write(written)
        payload = reference("", written, lengths(samples))
        groups.append(BatchGroup(group=name, payload=payload, rewards=values))
    await store.close()
    return Batch(step=7, version=3, groups=groups)


def test_rewards_are_compared_with_those_of_the_same_role(valkey: EmbeddedValkey, run_name: str) -> None:
    """Left wins twice of three times in the first group, and always in the second: there both learn nothing."""
    rewards = [[1.0, -1.0, -1.0, 1.0, 1.0, -1.0], [1.0, -1.0, 1.0, -1.0]]
    batch = asyncio.run(stored(valkey.url, run_name, rewards, roles=("left", "right")))
    ranks = read(batch, valkey.url, ranks=2)
    found = {index: sorted(set(values.tolist())) for rank in ranks for index, values in rank.per_sample("advantages").items()}
    spread = (4 / 3) ** 0.5  # of 1, -1, 1
    for index, expected in enumerate([2 / 3, -2 / 3, -4 / 3, 4 / 3, 2 / 3, -2 / 3]):
        assert found[index] == [pytest.approx(expected / spread, abs=1e-5)]
    assert [found[index] for index in range(6, 10)] == [[0.0]] * 4
    assert {rank.metrics["zero_std_groups"] for rank in ranks} == {0.5}
    assert ranks[0].denominators == (5.0,), "rollouts, not roles, are counted"
    [halves] = assemble_all(batch, valkey.url, steps=2, ranks=1, objective=OBJECTIVE)
    assert halves.denominators == pytest.approx((2 + 5 / 11, 6 / 11 + 2)), "one that both steps have counts in each by its tokens there"


def test_a_batch_is_read_and_packed(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0], [1.0, 1.0]]))
    (read_,) = read(batch, valkey.url)
    advantages = read_.per_sample("advantages")
    assert [advantages[number].tolist() for number in (2, 3)] == [[0.0], [0.0, 0.0]], "equal rewards teach nothing"
    assert advantages[0][0] == pytest.approx(-advantages[1][0]) and advantages[1][0] == advantages[1][1] != 0
    figures = read_.metrics
    assert [figures[name] for name in ("reward", "response_tokens", "tokens")] == [0.75, 6, 14]
    assert [figures[name] for name in ("staleness_mean", "staleness_max", "zero_std_groups")] == [1.5, 2, 0.5]
    ((micro_batch,),) = read_.steps
    assert micro_batch.packed.loss_mask.sum() == 6
    assert micro_batch.packed.fields["weights"].sum() == pytest.approx(1.0), "the mean over samples of the means over their tokens"


def test_ranks_read_their_own_groups_and_know_the_same(valkey: EmbeddedValkey, run_name: str) -> None:
    rewards = [[1.0, 0.0, 0.5], [0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0]]
    batch = asyncio.run(stored(valkey.url, run_name, rewards))
    (alone,) = read(batch, valkey.url)
    ranks = read(batch, valkey.url, ranks=2)
    assert [len(rank.steps[0]) for rank in ranks] == [1, 1]
    together = {number: values for rank in ranks for number, values in rank.per_sample("advantages").items()}
    expected = alone.per_sample("advantages")
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[number], expected[number]) for number in expected)
    assert all(rank.metrics == alone.metrics for rank in ranks)
    weights = sum(float(micro.packed.fields["weights"].sum()) for rank in ranks for step in rank.steps for micro in step)
    assert weights == pytest.approx(1.0)
    read_groups = [rank.partition.groups_of(index) for index, rank in enumerate(ranks)]
    assert sorted(read_groups[0] + read_groups[1]) == [0, 1, 2, 3], "no group is read twice"


def test_a_share_that_was_read_ahead_is_the_share(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0], [0.0, 1.0]]))
    first, other = partition_batch(batch, 1, 1, 100), partition_batch(batch.model_copy(update={"step": 8}), 1, 1, 100)
    reader = ShardReader(BlockingStore(valkey.url), 0, SampleLimits(100))
    reader.read_ahead(other)
    reader.read_ahead(other)
    ahead = reader.take(other)
    assert ahead.partition is other and sorted(ahead.samples) == [0, 1, 2, 3]
    reader.read_ahead(other)
    assert reader.take(first).partition is first, "what was read ahead is of another step"


def test_whitening_is_over_the_whole_batch(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0, 0.2], [0.0, 1.0, 0.7]]))
    objective = AlgorithmSection(normalize_advantages=True)
    (read_,) = read(batch, valkey.url, objective=objective)
    masks, advantages = read_.masks(), read_.per_sample("advantages")
    trained = torch.cat([advantages[index][masks[index]].double() for index in read_.indices])
    assert (trained.mean(), trained.var()) == (pytest.approx(0, abs=1e-7), pytest.approx(1, abs=1e-6))


def test_optimizer_steps_get_every_sample_once(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0, 1.0], [0.0, 1.0]]))
    (read_,) = read(batch, valkey.url, steps=2)
    numbers = [sorted(index for micro in step for index in micro.indices) for step in read_.steps]
    assert numbers == [[0, 1], [2, 3, 4]]


def test_what_does_not_fit_its_reference_is_named(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0]]))
    group = batch.groups[0]
    for lengths, rewards, problem in (
        ((3, 4, 5), [1.0, 0.0, 1.0], r"group g00000000: 2 samples of \[3, 4\] tokens in the store, \[3, 4, 5\] by its reference"),
        ((3, 4), [1.0], r"sample g00000000/0: its reference has 2 lengths for 1 rewards"),
        ((), [1.0, 0.0], r"sample g00000000/0: its reference has 0 lengths for 2 rewards"),
    ):
        group.payload = group.payload.model_copy(update={"tokens": lengths})
        group.rewards = rewards
        with pytest.raises(Untrainable, match=problem):
            read(batch, valkey.url)
    group.payload, group.rewards = group.payload.model_copy(update={"tokens": (3, 4), "keys": ["nowhere"], "sizes": ()}), [1.0, 0.0]
    with pytest.raises(Untrainable, match="sample g00000000/0: the store holds no blob nowhere"):
        read(batch, valkey.url)
    group.payload = group.payload.model_copy(update={"tokens": (3, 101)})
    with pytest.raises(Untrainable, match="sample g00000000/1: has 101 tokens, a micro-batch holds at most 100: raise max_tokens_per_gpu"):
        read(batch, valkey.url)


def test_a_token_that_the_model_does_not_know_is_named(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0]]))
    reader = ShardReader(BlockingStore(valkey.url), 0, SampleLimits(4))
    with pytest.raises(Untrainable, match=r"sample g00000000/1: .*response holds token 4 at 1, which is not in \[0, 4\)") as raised:
        reader.take(partition_batch(batch, 1, 1, 100))
    assert [(found.group, found.position) for found in raised.value.samples] == [("g00000000", 1)]


def test_every_group_that_cannot_be_read_is_named(valkey: EmbeddedValkey, run_name: str) -> None:
    """Whatever is wrong with it: its bytes, its content, another group's samples in its place, bytes that nobody announced, or none."""
    batch = asyncio.run(stored(valkey.url, run_name, [[1.0, 0.0]] * 7))
    keys = [group.payload.keys[0] for group in batch.groups]
    with redis.Redis.from_url(valkey.url) as client:
        good = made("g00000004", 0, 1, 5)
        good.segments = [(0, 1, 1 << 40)]
        announced = {
            1: b"\xc1",
            2: sample.encode([made("g00000000", 0, 1, 1), made("g00000000", 1, 2, 1)], 1000)[0],
            4: sample.encode([good, made("g00000004", 1, 2, 3)], 1000)[0],
            5: sample.encode([made("g00000005", 0, 1, 3), made("g00000005", 1, 2, 4)], 1000)[0],
        }
        for number, blob in announced.items():
            client.set(keys[number], blob)
            batch.groups[number].payload = reference("", {keys[number]: blob}, batch.groups[number].payload.tokens)
        client.unlink(keys[3])
        client.set(keys[6], sample.encode([made("g00000006", 0, 1, 3), made("g00000006", 1, 2, 3)], 1000)[0][:-1] + b"\x02")
    with pytest.raises(Untrainable) as raised:
        ShardReader(BlockingStore(valkey.url), 0, SampleLimits(100)).take(partition_batch(batch, 1, 1, 100))
    found = {item.group: item.reason for item in raised.value.samples}
    assert set(found) == {f"g{number:08d}" for number in (1, 2, 3, 4, 5, 6)}
    assert [item.position for item in raised.value.samples] == [0, 0, 0, 0, 1, 0]
    assert "its samples in the store are g00000000/0" in found["g00000002"]
    assert "the store holds no blob" in found["g00000003"]
    assert f"version {1 << 40}" in found["g00000004"] and "version 4" in found["g00000005"]
    assert f"payload at {keys[6]} has the digest" in found["g00000006"] and "overwritten or damaged" in found["g00000006"]


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
        payload = reference("", {f"{run}:{name}": blob}, lengths(samples))
        refs.append(BatchGroup(group=name, payload=payload, rewards=[1.0, 0.0, 0.0], removed=tuple(removed)))
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
    (read_,) = read(batch, valkey.url)
    samples = list(trained(read_).values())
    assert ["".join(map(str, one.mask)) for one in samples] == masks
    assert tuple(read_.metrics[name] for name in ("staleness_max", "masked_tokens", "removed_samples")) == figures
    advantages = read_.per_sample("advantages")
    assert advantages[0].max() == pytest.approx(2 / 3 / np.std([1, 0, 0], ddof=1), rel=1e-4), "every reward counts in the group"
    ((micro_batch,),) = read_.steps
    assert int(micro_batch.packed.loss_mask.sum()) == sum(mask.count("1") for mask in masks)


def test_every_optimizer_step_trains_something(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(mixed(valkey.url, run_name, 2, [2], groups=3))  # of nine samples three are trained: 0, 3 and 6
    for group in batch.groups:
        group.stale = (1,)
    for parts, sizes in ((1, [9]), (2, [1, 8]), (3, [1, 3, 5]), (5, [1, 3, 5])):
        (read_,) = read(batch, valkey.url, steps=parts)
        assert [sum(len(micro.indices) for micro in step) for step in read_.steps] == sizes
        assert all(any(one.mask.any() for micro in step for one in micro.samples) for step in read_.steps)


def test_a_batch_of_which_nothing_is_trained_is_refused(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(mixed(valkey.url, run_name, 3, []))
    with pytest.raises(BadBatch, match=r"the loss mask is 0 on every token of step 0 \(3 samples\)"):
        read(batch, valkey.url)
