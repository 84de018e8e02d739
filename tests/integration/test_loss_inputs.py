"""The user's own functions on a batch out of the real store, and what ranks gather."""

import asyncio
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from services.trainer import batches
from services.trainer.batches import ShardReader
from services.trainer.loss_inputs import LossInputs, gathered, scored
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.packing import BadSample
from services.trainer.partition import partition_batch
from shared.config.algorithm import AlgorithmSection
from shared.process.embedded_servers import EmbeddedValkey
from shared.runtime.errors import ConfigError
from shared.schema.digests import reference
from shared.schema.messages import Batch, BatchGroup
from shared.schema.sample import SampleLimits, encode
from shared.store.payload_store import BlockingStore, Store
from tests.integration.test_batches import assemble_all, inputs, read, stored
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.train_samples import train_sample

REWARDS = [[1.0, 0.0], [3.0, 2.0, 2.5]]


def test_every_sample_comes_with_its_reward(valkey: EmbeddedValkey, run_name: str) -> None:
    partition = partition_batch(asyncio.run(stored(valkey.url, run_name, REWARDS)), 1, 1, 100)
    samples = scored(partition, BlockingStore(valkey.url))
    assert [sample.reward for sample in samples] == [1.0, 0.0, 3.0, 2.0, 2.5]
    assert [(sample.group_index, sample.index, sample.response_length) for sample in samples] == [
        (0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 2), (1, 2, 3),
    ]  # fmt: skip


def test_named_rewards_are_shown_by_their_names(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    batch.groups[0] = batch.groups[0].model_copy(update={"parts": ({"score": 1.0, "acc": 1.0}, {"acc": 0.0})})
    samples = scored(partition_batch(batch, 1, 1, 100), BlockingStore(valkey.url), "score")
    assert [sample.reward for sample in samples] == [{"score": 1.0, "acc": 1.0}, {"score": 0.0, "acc": 0.0}, 3.0, 2.0, 2.5]


def test_a_function_of_ones_own_makes_the_advantages(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("hooks_of_this_test")
    seen: dict[str, object] = {}

    def advantage(args: object, rollout_data: dict[str, list[object]]) -> None:
        seen.update(rollout_data)
        rollout_data["advantages"] = [torch.full((length,), 2.0 * raw) for raw, length in zip(
            rollout_data["raw_reward"], rollout_data["response_lengths"], strict=True)]  # type: ignore[call-overload, operator]  # fmt: skip

    module.advantage = advantage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hooks_of_this_test", module)
    config = run_config(tmp_path, algorithm={"custom_advantage_function_path": "hooks_of_this_test:advantage"})
    objective = config.algorithm
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    for item in assemble_all(batch, valkey.url, 1, 2, objective):
        made = inputs(objective, valkey.url, CustomFunctions.of(config)).with_advantages(item)
        raw = [reward for group in REWARDS for reward in group]
        assert {index: set(values.tolist()) for index, values in made.per_sample("advantages").items()} == {
            index: {2.0 * raw[index]} for index in item.indices
        }
        assert seen.keys() >= {"rewards", "raw_reward", "rollout_log_probs", "loss_masks", "response_lengths"}
        assert len(seen["rollout_log_probs"]) == len(item.indices)  # type: ignore[arg-type]


def test_rewards_of_ones_own_are_what_advantages_start_from_and_what_is_shown(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("rewards_of_this_test")
    module.halved = lambda args, samples: (  # type: ignore[attr-defined]
        [sample.reward + 10 for sample in samples],
        [sample.reward / 2 for sample in samples],
    )
    monkeypatch.setitem(sys.modules, "rewards_of_this_test", module)
    config = run_config(tmp_path, algorithm={"custom_reward_post_process_path": "rewards_of_this_test:halved"})
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    [item] = assemble_all(batch, valkey.url, 1, 1, config.algorithm)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        made = inputs(config.algorithm, valkey.url, CustomFunctions.of(config)).with_advantages(item)
        assert made.raw == [11.0, 10.0, 13.0, 12.0, 12.5]
        assert made.rewards == [0.5, 0.0, 1.5, 1.0, 1.25]
    finally:
        torch.distributed.destroy_process_group()


def test_a_function_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, algorithm={"custom_tis_function_path": "no_such_module:f"})
    with pytest.raises(ConfigError, match=r"algorithm\.custom_tis_function_path"):
        CustomFunctions.of(config)
    assert not CustomFunctions().functions


def test_samples_that_do_not_pass_weigh_nothing(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    objective = AlgorithmSection(loss_type="sft_loss", rejection_threshold=2.0)
    (alone,) = read(batch, valkey.url, objective=objective)
    weights = alone.per_sample("weights")
    assert [weights[number].tolist() for number in (0, 1, 3)] == [[0.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(weights[2], [1 / 2])
    np.testing.assert_allclose(weights[4], [1 / 6] * 3)
    (none,) = read(batch, valkey.url, objective=AlgorithmSection(loss_type="sft_loss", rejection_threshold=9.0))
    assert all(not values.any() for values in none.per_sample("weights").values())


def test_what_sums_are_divided_by_is_the_optimizer_steps(valkey: EmbeddedValkey, run_name: str) -> None:
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    (alone,) = read(batch, valkey.url)
    assert alone.denominators == (5.0,)
    (by_token,) = read(batch, valkey.url, objective=AlgorithmSection(calculate_per_token_loss=True))
    assert by_token.denominators == (9.0,)


def test_the_teachers_log_probs_come_with_the_samples(valkey: EmbeddedValkey, run_name: str) -> None:
    objective = AlgorithmSection(use_opd=True, opd_type="sglang", opd_kl_coef=0.5, off_policy="rollout")
    partition = partition_batch(asyncio.run(stored(valkey.url, run_name, REWARDS)), 1, 1, 100)
    shard = ShardReader(BlockingStore(valkey.url), 0, SampleLimits(100)).take(partition)

    def assembled() -> batches.TrainBatch:
        return batches.assemble(shard, shard.stats, objective, rank=0)

    with pytest.raises(BadSample, match=r"the sample has no teacher_log_probs, one number a response token"):
        assembled()
    for sample in shard.samples.values():  # as a service of teachers gives them
        sample.attributes["teacher_log_probs"] = np.array([-0.5 - at for at in range(len(sample.response))], np.float32)
    given = assembled().per_sample("teacher_log_probs")
    for sample in shard.samples.values():
        sample.metadata["teacher_log_probs"] = [-0.5 - at for at in range(len(sample.response))]
    batch = assembled()
    assert {index: values.tolist() for index, values in batch.per_sample("teacher_log_probs").items()} == {
        index: values.tolist() for index, values in given.items()
    }
    made = inputs(objective, valkey.url).with_advantages(batch).per_sample("advantages")
    plain = inputs(objective.model_copy(update={"use_opd": False}), valkey.url).with_advantages(batch)
    for index, values in plain.per_sample("advantages").items():
        gap = torch.arange(len(shard.samples[index].response))  # log π_old is -0.5 everywhere
        np.testing.assert_allclose(made[index], values - 0.5 * gap, rtol=1e-6)


def test_tensors_of_any_length_are_gathered_in_order() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.zeros(0), torch.tensor([3.0])]
    barrier, tables = threading.Barrier(3), [np.zeros(0)] * 3
    found: list[torch.Tensor] = [torch.zeros(0)] * 3

    def rank(number: int) -> None:
        def total(table: np.ndarray) -> np.ndarray:
            tables[number] = table
            barrier.wait(30)
            result: np.ndarray = np.sum(tables, axis=0)
            barrier.wait(30)
            return result

        found[number] = gathered(parts[number].double(), number, 3, total)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [values.tolist() for values in found] == [[1.0, 2.0, 3.0]] * 3


def test_rewards_of_turns_become_advantages_of_their_tokens(
    valkey: EmbeddedValkey, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two groups on two ranks; the mates of a group have one to three turns. A loop over the published formula is the oracle."""
    given = {0: [(0, 2, 1.0), (3, 4, 0.5), (5, 6, -1.0)], 1: [(0, 2, 0.0), (3, 5, 2.0)], 2: [(0, 6, 3.0)], 3: [(1, 3, 1.0)], 4: []}
    rewards = [[1.0, 0.0, 0.5], [2.0, 0.0]]

    async def written() -> Batch:
        store, groups, index = Store(valkey.url), [], 0
        for number, values in enumerate(rewards):
            mask, samples = np.array([1, 1, 0, 1, 1, 1], np.uint8), []
            for position in range(len(values)):
                fields = {"group": f"g{number:08d}", "index": position, "mask": mask, "turn_rewards": given[index]}
                samples.append(train_sample([1], range(6), 1, **fields))
                index += 1
            blobs = {f"{run_name}:{number}:{part}": blob for part, blob in enumerate(encode(samples, 200))}
            await store.write(blobs)
            groups.append(BatchGroup(group=f"g{number:08d}", payload=reference("", blobs, [7] * len(values)), rewards=values))
        await store.close()
        return Batch(step=7, version=3, groups=groups)

    batch = asyncio.run(written())

    def compared(values: list[float], by_std: bool) -> list[float]:
        if len(values) < 2:
            return [0.0] * len(values)
        mean = sum(values) / len(values)
        std = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        return [0.0 if std == 0 else (value - mean) / ((std + 1e-6) if by_std else 1) for value in values]

    for gamma, by_std in ((1.0, True), (0.5, False), (0.0, True)):
        expected = {index: np.zeros(6) for index in given}
        for members, values in (([0, 1, 2], rewards[0]), ([3, 4], rewards[1])):
            for index, value in zip(members, compared(values, by_std), strict=True):
                expected[index] += value
            for turn in range(3):
                having = [index for index in members if len(given[index]) > turn]
                returns = [sum(gamma**k * reward for k, (_, _, reward) in enumerate(given[index][turn:])) for index in having]
                for index, value in zip(having, compared(returns, by_std), strict=True):
                    start, end, _ = given[index][turn]
                    expected[index][start:end] += 0.3 * value
        objective = AlgorithmSection(turn_advantage_coef=0.3, turn_gamma=gamma, disable_grpo_std_normalization=not by_std)
        for index, values in _of_two_ranks(batch, valkey.url, objective).items():
            np.testing.assert_allclose(values, expected[index] * np.array([1, 1, 0, 1, 1, 1]), atol=1e-5)
    assert "turn_rewards_unused" not in capsys.readouterr().out
    _of_two_ranks(batch, valkey.url, AlgorithmSection())
    assert "turn_rewards_unused" in capsys.readouterr().out, "what is given and not used is said"


def _of_two_ranks(batch: Batch, url: str, objective: AlgorithmSection) -> dict[int, np.ndarray]:
    """The advantages of all samples, [R] each, by two ranks in threads that add their tables up."""
    meeting, tables = threading.Barrier(2, timeout=60), [np.zeros(0), np.zeros(0)]
    found: dict[int, np.ndarray] = {}

    def on(rank: int, item: batches.TrainBatch) -> None:
        def total(own: np.ndarray) -> np.ndarray:
            tables[rank] = own
            meeting.wait()
            added = tables[0] + tables[1]
            meeting.wait()
            return added

        made = LossInputs(objective, CustomFunctions(), BlockingStore(url), total=total).with_advantages(item)
        found.update({index: values.numpy() for index, values in made.per_sample("advantages").items()})

    threads = [threading.Thread(target=on, args=pair) for pair in enumerate(assemble_all(batch, url, 1, 2, objective))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3, 4]
    return found


@table(
    ("fields", "named"),
    [
        ({"turn_advantage_coef": 0.5, "advantage_estimator": "ppo"}, "turn_advantage_coef"),
        ({"turn_advantage_coef": 0.5, "advantage_estimator": "gspo"}, "turn_advantage_coef"),
        ({"turn_advantage_coef": 0.5, "loss_type": "sft_loss"}, "turn_advantage_coef"),
        ({"turn_advantage_coef": 0.5, "custom_advantage_function_path": "a:b"}, "turn_advantage_coef"),
        ({"turn_advantage_coef": -0.5}, "turn_advantage_coef"),
        ({"turn_gamma": 0.5}, "turn_gamma"),
    ],
)
def test_rewards_of_turns_that_nothing_would_use_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AlgorithmSection(**fields)  # type: ignore[arg-type]
