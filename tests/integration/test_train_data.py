"""The hooks that make and change a batch's data, on a batch out of the real store."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import batches
from services.trainer.batch_metrics import StatColumn
from services.trainer.batches import ShardReader, TrainBatch, attestation_of
from services.trainer.loss_inputs import scored
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.partition import partition_batch
from services.trainer.trainer_hooks import RolloutLog, converted, postprocessed
from shared.config.algorithm import AlgorithmSection
from shared.hooks import HookFailed, Sample
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.sample import SampleLimits
from shared.store.payload_store import BlockingStore
from tests.integration.test_batches import assemble_all, inputs, stored
from tests.support.run_config import run_config

REWARDS = [[1.0, 0.0], [3.0, 2.0, 2.5]]

CONVERT, POSTPROCESS = "custom_convert_samples_to_train_data_path", "rollout_data_postprocess_path"


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CustomFunctions]:
    """The functions of a run whose hooks are those of a module of this test."""

    def made(**functions: Callable[..., Any]) -> CustomFunctions:
        module = ModuleType("train_data_of_this_test")
        for name, function in functions.items():
            setattr(module, name, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return CustomFunctions.of(run_config(tmp_path, algorithm={name: f"{module.__name__}:{name}" for name in functions}))

    return made


def as_slime_does(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """Train data with the keys that slime's own conversion gives, rewards doubled, the last token of each sample left out."""
    masks = [[*sample.loss_mask[:-1], 0] for sample in samples]  # type: ignore[index]
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [2.0 * sample.reward for sample in samples],  # type: ignore[operator]
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": list(range(len(samples))),
        "loss_masks": masks,
        "rollout_log_probs": [[-0.25] * sample.response_length for sample in samples],
    }


def convert(url: str, run: str, functions: CustomFunctions, objective: AlgorithmSection | None = None) -> list[TrainBatch]:
    """A batch as two ranks assemble it from converted samples."""
    partition = partition_batch(asyncio.run(stored(url, run, REWARDS)), 1, 2, 100)
    data = converted(functions, partition, scored(partition, BlockingStore(url)))
    shards = [data.applied(ShardReader(BlockingStore(url), rank, SampleLimits(100)).take(partition)) for rank in range(2)]
    stats = np.sum([shard.stats for shard in shards], axis=0)
    return [batches.assemble(shard, stats, objective or AlgorithmSection(), rank=rank) for rank, shard in enumerate(shards)]


def test_rewards_masks_and_log_probs_are_those_that_a_convert_function_makes(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, custom: Callable[..., CustomFunctions]
) -> None:
    functions = custom(**{CONVERT: as_slime_does})
    objective = run_config(tmp_path, algorithm={CONVERT: "some:f"}).algorithm
    for batch in convert(valkey.url, run_name, functions):
        made = inputs(objective, valkey.url, functions).with_advantages(batch)
        advantages, masks = made.per_sample("advantages"), made.masks()
        rewards = [reward for group in REWARDS for reward in group]
        for index in made.indices:
            length = masks[index].numel()
            assert masks[index].tolist() == [True] * (length - 1) + [False]
            assert advantages[index].tolist() == [2.0 * rewards[index]] * (length - 1) + [0.0], "taken as they are: nothing is normalised"
            assert made.per_sample("rollout_log_probs")[index].tolist() == [-0.25] * (length - 1) + [0.0]
    whole = convert(valkey.url, run_name, functions)
    weights = sum(float(micro.packed.fields["weights"].sum()) for rank in whole for step in rank.steps for micro in step)
    assert weights == pytest.approx(len([1 for group in REWARDS for at, _ in enumerate(group) if at]) / 5), "as by the masks it gave"


def test_the_trainer_attests_what_was_scored_whatever_a_convert_function_masks(
    valkey: EmbeddedValkey, run_name: str, custom: Callable[..., CustomFunctions]
) -> None:
    partition = partition_batch(asyncio.run(stored(valkey.url, run_name, REWARDS)), 1, 1, 100)
    read = ShardReader(store := BlockingStore(valkey.url), 0, SampleLimits(100)).take(partition)
    read.stats[0, StatColumn.MASKED] = 3.0  # for their age
    made = converted(custom(**{CONVERT: as_slime_does}), partition, scored(partition, store)).applied(read)
    plain, masked = (batches.assemble(shard, shard.stats, AlgorithmSection(), rank=0) for shard in (read, made))
    assert attestation_of(masked, np.array, read.samples) == attestation_of(plain, np.array) != attestation_of(masked, np.array)
    assert made.stats[0, StatColumn.MASKED] == 3.0


def test_what_passes_is_decided_by_the_rewards_that_it_makes(
    valkey: EmbeddedValkey, run_name: str, custom: Callable[..., CustomFunctions]
) -> None:
    def turned(args: Any, samples: list[Sample]) -> dict[str, Any]:
        data = as_slime_does(args, samples)
        return {**data, "rewards": [1.0 - reward for reward in data["rewards"]]}

    whole = convert(valkey.url, run_name, custom(**{CONVERT: turned}), AlgorithmSection(loss_type="sft_loss", rejection_threshold=0.5))
    weights = {index: found for batch in whole for index, found in batch.per_sample("weights").items()}
    assert sorted(index for index, found in weights.items() if found.any()) == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["tokens"][1].append(3), "tokens or response_lengths of sample 1 are not the sample's"),
        (lambda data: data["rewards"].pop(), "rewards: 4 entries for 5 samples; samples may not be added or left out"),
        (lambda data: data["rewards"].__setitem__(0, "much"), "rewards: could not convert string to float: 'much'"),
        (lambda data: data["rewards"].__setitem__(0, float("nan")), "rewards: some are not finite"),
        (lambda data: data["loss_masks"][2].append(1), "loss_masks of sample 2: expected 1 entries, 0 or 1"),
        (lambda data: data.pop("loss_masks"), "loss_masks: no list for 5 samples"),
        (lambda data: data.__setitem__("rollout_ids", [0, 0, 1, 2, 3]), "rollout_ids: samples of one rollout have one id"),
        (lambda data: data.__setitem__("los_masks", []), "gave los_masks, which the trainer does not know"),
        (lambda data: data["rollout_log_probs"].__setitem__(1, [0.0]), "rollout_log_probs of sample 1: expected 2 numbers"),
    ],
)
def test_train_data_that_does_not_fit_is_refused_by_column(
    valkey: EmbeddedValkey, run_name: str, custom: Callable[..., CustomFunctions], change: Callable[..., None], words: str
) -> None:
    def changed(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
        data = as_slime_does(args, samples)
        change(data)
        return data

    with pytest.raises(HookFailed) as caught:
        convert(valkey.url, run_name, custom(**{CONVERT: changed}))
    assert caught.value.field == f"algorithm.{CONVERT}" and words in str(caught.value)


def test_a_batch_is_as_the_postprocess_function_leaves_it(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, custom: Callable[..., CustomFunctions]
) -> None:
    seen: dict[str, Any] = {}

    def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        seen.update(rollout_data, rollout_id=rollout_id)
        rollout_data["advantages"] = [advantages * 0 + 7.0 for advantages in rollout_data["advantages"]]
        for mask in rollout_data["loss_masks"]:
            mask[0] = 0  # in place, as slime's users do

    functions, objective = custom(**{POSTPROCESS: postprocess}), run_config(tmp_path).algorithm
    batch = asyncio.run(stored(valkey.url, run_name, REWARDS))
    for item in assemble_all(batch, valkey.url, 1, 2, objective):
        before = inputs(objective, valkey.url).with_advantages(item)
        made = postprocessed(functions, before)
        assert seen["rollout_id"] == batch.step and seen["sample_indices"] == made.indices
        assert [tokens.tolist()[:2] for tokens in seen["tokens"]] == [[1, 2]] * len(made.indices)
        for values in made.per_sample("advantages").values():
            assert values.tolist() == [0.0] + [7.0] * (len(values) - 1)
        for mask in made.masks().values():
            assert mask.tolist() == [False] + [True] * (mask.numel() - 1)
        for micro, old in zip(made.micro_batches, before.micro_batches, strict=True):
            left = micro.packed.loss_mask > 0
            assert left.sum() == old.packed.loss_mask.sum() - len(micro.indices)
            assert torch.equal(micro.packed.fields["weights"][left], old.packed.fields["weights"][left]), "weights stay those of all"
            for name, values in micro.packed.fields.items():
                assert (values[~left] == (-1 if name == "versions" else 0)).all()


def test_a_postprocess_function_may_not_train_what_was_left_out(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, custom: Callable[..., CustomFunctions]
) -> None:
    def everything(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["loss_masks"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]

    def cut(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = rollout_data["advantages"][:-1]

    objective = run_config(tmp_path).algorithm
    (item,) = assemble_all(asyncio.run(stored(valkey.url, run_name, REWARDS)), valkey.url, 1, 1, objective)
    item = inputs(objective, valkey.url).with_advantages(item)
    ones = [torch.ones_like(mask, dtype=torch.float64) for _, mask in sorted(item.masks().items())]
    functions, shown = (
        custom(**{POSTPROCESS: lambda args, rollout_id, data: data["returns"][0].add_(1.0)}),
        item.with_values("returns", ones),
    )
    changed = postprocessed(functions, shown).per_sample("returns")
    assert changed[0].max() == 2.0 and changed[1].max() == 1.0, "an advantage function's own"
    with pytest.raises(HookFailed, match="returns changed: the critic makes its own"):
        postprocessed(functions, shown.with_values("values", ones))
    untouched = postprocessed(custom(**{POSTPROCESS: lambda args, rollout_id, data: None}), item)
    assert untouched is item
    less = item.with_masks([torch.zeros_like(mask) for _, mask in sorted(item.masks().items())])
    with pytest.raises(HookFailed, match="loss_masks of sample g00000000/0 trains token 0, which was left out before"):
        postprocessed(custom(**{POSTPROCESS: everything}), less)
    with pytest.raises(HookFailed, match="advantages: expected a list with a tensor of each sample"):
        postprocessed(custom(**{POSTPROCESS: cut}), item)


def test_a_log_function_sees_a_batch_and_says_whether_it_logged_it(
    valkey: EmbeddedValkey, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    module = ModuleType("log_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def log(rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float) -> bool:
        seen.append((rollout_id, args.rollout_batch_size, [sample.reward for sample in samples], rollout_extra_metrics, rollout_time))
        if rollout_time > 9:
            raise RuntimeError("no such project")
        return rollout_time > 1

    module.log = log  # type: ignore[attr-defined]
    config = run_config(tmp_path, monitoring={"custom_rollout_log_function_path": "log_of_this_test:log"})
    partition = partition_batch(asyncio.run(stored(valkey.url, run_name, REWARDS)), 1, 1, 100)
    rollout_log = RolloutLog(CustomFunctions.of(config), BlockingStore(valkey.url))
    assert [rollout_log.wrote(partition, seconds) for seconds in (0.5, 1.5, 9.5)] == [False, True, False]
    assert seen == [(7, 2, [1.0, 0.0, 3.0, 2.0, 2.5], {}, seconds) for seconds in (0.5, 1.5, 9.5)]
    assert not RolloutLog(CustomFunctions(), BlockingStore(valkey.url)).wrote(partition, 1.5)
