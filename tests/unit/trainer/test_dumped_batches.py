"""Dumps in slime's format and in Myxo's own: read back to the very batch, cut as slime cuts them, refused by name, never run."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer import dumps as slime_dumps
from services.trainer.dumps import DumpedBatches, DumpedGroup, batch_of, dumped_steps, subsampled, write_batch
from shared.config.config_reading import parse
from shared.runtime.errors import BadMessage, ConfigError
from shared.schema import sample as sample_codec
from shared.schema.kept_tokens import Kept
from shared.schema.messages import Batch, Payload
from shared.schema.sample import Sample
from tests.support.run_config import run_config, values
from tests.support.tables import table
from tests.support.valid_messages import example


def stored(group: str, index: int, *, rollout: int = -1) -> Sample:
    """Five response tokens of two versions, one of them masked out."""
    response = list(range(index, index + 5))
    tokens = {"prompt": [0, 1, 2], "response": response, "log_probs": [-0.1, -0.25, -1 / 3, -7.5, 0.0], "mask": [1, 1, 1, 1, 0]}
    told = {"prompt_text": [{"role": "user", "content": "2+2"}], "label": "4", "metadata": {"rm_type": "exact", "turns": [1, 2]}}
    kept = Kept.of([[token, token + 1] for token in response]) if index else None
    known = {**tokens, **told, "segments": [(0, 2, 3), (2, 5, 4)], "finish": "length", "text": "four", "kept": kept}
    return example(Sample, group=group, index=index, rollout=rollout, **known)


class Blobs:
    """A store of these blobs."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self._blobs = blobs

    def stream(self, payloads: list[Payload]) -> Any:
        return ([self._blobs[key] for key in payload.keys] for payload in payloads)


def dumped(path: Path, step: int = 7) -> Batch:
    """A batch of two groups: one with a sample that a filter removed and one that is stale, and one that fans out. Returns it, dumped."""
    parts = [{"format": 1.0, "answer": 0.5}, {}, {"format": 0.0}]
    plain = DumpedGroup("g00000004", [stored("g00000004", index) for index in range(3)], [1.0, 0.1, -2.5], [1], [2], parts)
    fanned = DumpedGroup("g00000009", [stored("g00000009", index, rollout=index // 2) for index in range(4)], [0.0, 0.0, 1.0, 1.0])
    batch, blobs = batch_of(step, 5, [plain, fanned], mask_below=4)
    write_batch(str(path), batch, Blobs(blobs))  # type: ignore[arg-type]
    return batch


def loaded(directory: Path, template: Path, step: int, **debug: Any) -> tuple[Batch, list[list[Sample]]]:
    dumps = DumpedBatches(run_config(directory, debug={"load_debug_rollout_data": str(template), **debug}))
    batch = dumps.batch(step)
    return batch, [sample_codec.decode(blobs) for blobs in dumps.stream([group.payload for group in batch.groups])]


@pytest.mark.parametrize("suffix", [".pt", ".msgpack"])
def test_a_dump_is_read_back_to_the_very_batch(tmp_path: Path, suffix: str) -> None:
    batch = dumped(tmp_path / f"{{rollout_id}}{suffix}")
    again, samples = loaded(tmp_path, tmp_path / f"{{rollout_id}}{suffix}", 7)
    assert (again.step, again.version, again.mask_below) == (7, 5, 4)
    for old, new in zip(batch.groups, again.groups, strict=True):
        assert (old.group, old.rewards, old.removed, old.stale, old.payload.tokens) == (
            *(new.group, new.rewards, new.removed, new.stale, new.payload.tokens),
        )
    assert_same(samples[0], [stored("g00000004", index) for index in range(3)])
    assert_same(samples[1], [stored("g00000009", index, rollout=index // 2) for index in range(4)])


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in dataclasses.fields(Sample):
            left, right = getattr(one, field.name), getattr(other, field.name)
            arrays = [isinstance(value, np.ndarray | Kept) for value in (left, right)]
            assert np.array_equal(np.hstack(left), np.hstack(right)) if all(arrays) else left == right, field.name


def test_one_file_without_a_step_in_its_name_serves_every_step(tmp_path: Path) -> None:
    dumped(tmp_path / "only.pt")
    for step in (0, 3):
        batch, samples = loaded(tmp_path, tmp_path / "only.pt", step)
        assert batch.step == step
        assert len(samples[0]) == 3
    with pytest.raises(ConfigError, match="{rollout_id} in the file's name"):
        dumped_steps(str(tmp_path / "only.pt"))


# --- slime's own files

SLIMES: dict[str, Any] = {
    "group_index": None,
    "multimodal_inputs": {"images": None},
    "index": 0,
    "rollout_id": None,
    "prompt": "2+2=",
    "tokens": [5, 6, 7, 8],
    "response": "4",
    "response_length": 2,
    "label": "4",
    "reward": 1.0,
    "loss_mask": None,
    "weight_versions": ["default"],
    "rollout_log_probs": [-0.5, -0.25],
    "remove_sample": False,
    "status": "completed",
    "metadata": {},
    "train_metadata": None,
    "session_id": "7f",
    "spec_info": {"spec_accept_token_num": 0},
}


def slimes(path: Path, entries: list[dict[str, Any]]) -> Path:
    torch.save({"rollout_id": 0, "samples": [{**SLIMES, **entry} for entry in entries]}, path)
    return path


def test_reading_leaves_what_others_may_load_as_it_was(tmp_path: Path) -> None:
    """Megatron allows numpy's arrays for the random states of its checkpoints."""
    torch.serialization.add_safe_globals([np.ndarray])
    before = set(torch.serialization.get_safe_globals())
    torch.save({"samples": []}, tmp_path / "0.pt")
    with pytest.raises(BadMessage, match="holds no list of samples"):
        slime_dumps.read_slime_dump(tmp_path / "0.pt")
    assert set(torch.serialization.get_safe_globals()) == before


def test_slimes_own_file_is_read(tmp_path: Path) -> None:
    """Groups by their index, by position where there is none; fan-out by rollout; arrays and tensors; named rewards; statuses."""
    entries = [
        {
            "group_index": 40,
            "index": 160,
            "rollout_id": 160,
            "tokens": np.array([5, 6, 7, 8]),
            "rollout_log_probs": torch.tensor([-0.5, -1.0]),
        },
        {"group_index": 40, "index": 161, "rollout_id": 160, "reward": {"score": np.float64(-1.0), "acc": False}, "status": "truncated"},
        {"group_index": 41, "index": 162, "loss_mask": [0, 1], "remove_sample": True, "label": 12},
        {"group_index": 41, "index": 163, "loss_mask": np.array([1, 0], np.int64), "status": "failed"},
    ]
    path = slimes(tmp_path / "rollout_0.pt", entries)
    template = tmp_path / "rollout_{rollout_id}.pt"
    config = run_config(tmp_path, reward={"reward_key": "score"}, debug={"load_debug_rollout_data": str(template)})
    dumps = DumpedBatches(config)
    batch = dumps.batch(0)
    first, second = (sample_codec.decode(dumps.read(group.payload)) for group in batch.groups)
    assert [group.rewards for group in batch.groups] == [[1.0, -1.0], [1.0, 1.0]]
    assert [group.parts for group in batch.groups] == [({}, {"score": -1.0, "acc": 0.0}), ()]
    assert [group.removed for group in batch.groups] == [(), (0,)]
    assert [sample.rollout for sample in first] == [0, 0]
    assert [sample.rollout for sample in second] == [0, 1]
    assert [sample.finish for sample in first + second] == ["stop", "length", "stop", "abort"]
    assert [sample.mask.tolist() for sample in first + second] == [[1, 1], [1, 1], [0, 1], [1, 0]]
    assert first[0].log_probs.tolist() == [-0.5, -1.0]
    assert second[0].label == "12"
    assert dumped_steps(str(template)) == [0]
    assert path.is_file()


def test_samples_without_a_group_are_grouped_by_position(tmp_path: Path) -> None:
    slimes(tmp_path / "0.pt", [{"reward": float(index)} for index in range(4)])
    batch, _ = loaded(tmp_path, tmp_path / "{rollout_id}.pt", 0)  # the run has two samples a group
    assert [group.rewards for group in batch.groups] == [[0.0, 1.0], [2.0, 3.0]]


@table(
    ("entry", "says"),
    [
        ({"reward": None}, "sample 0 of group g00000000: a reward is None"),
        ({"reward": {"score": 1.0}}, "reward.reward_key says which counts"),
        ({"reward": "0.5"}, "a reward is '0.5'; expected a finite number"),
        ({"reward": float("nan")}, "a reward is nan; expected a finite number"),
        ({"reward": 1e300}, "a reward is 1e.300; expected a number from"),
        ({"myxo_parts": {"": 1.0}}, "named rewards; expected"),
        ({"myxo_group": "odd name"}, "BatchGroup"),
        ({"status": "odd"}, "status is 'odd'; expected one of completed"),
        ({"response_length": 2.7}, "integer"),
        ({"multimodal_inputs": {"images": ["a.png"]}}, "multimodal_inputs: pictures"),
        ({"rollout_log_probs": None}, "rollout_log_probs is missing"),
        ({"rollout_log_probs": [-0.5]}, "log_probs"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, "log"),
        ({"tokens": [1]}, "response_length is 2, of 1 tokens"),
        ({"tokens": [1, 2, 3, 2**40]}, "does not fit into int32"),
        ({"tokens": [1, 2, 3, -4]}, "token"),
        ({"loss_mask": [0.5, 1.0]}, "is no list of uint8"),
        ({"loss_mask": [7, 1]}, "mask"),
        ({"loss_mask": [-1, 1]}, "does not fit into uint8"),
        ({"multimodal_train_inputs": {"pixel_values": torch.zeros(2)}}, "pictures"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_named(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    slimes(tmp_path / "0.pt", [entry])
    with pytest.raises(ConfigError, match=says) as caught:
        loaded(tmp_path, tmp_path / "{rollout_id}.pt", 0)
    assert caught.value.field == "debug.load_debug_rollout_data"
    assert str(tmp_path / "0.pt") in str(caught.value)


def test_demonstrations_need_no_log_probs(tmp_path: Path) -> None:
    slimes(tmp_path / "0.pt", [{"rollout_log_probs": None}, {"rollout_log_probs": None}])
    config = run_config(tmp_path, algorithm={"loss_type": "sft_loss"}, debug={"load_debug_rollout_data": str(tmp_path / "{rollout_id}.pt")})
    assert len(DumpedBatches(config).batch(0).groups) == 1


class Harmful:
    """An object whose unpickling makes a file."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._made),)


@pytest.mark.parametrize("archive", [True, False])
def test_nothing_in_a_file_is_run(tmp_path: Path, archive: bool) -> None:
    content = {"samples": [{**SLIMES, "metadata": {"tool": Harmful(tmp_path / "made")}}]}
    torch.save(content, tmp_path / "0.pt", _use_new_zipfile_serialization=archive)
    with pytest.raises(ConfigError, match="no dump of numbers, text and tensors"):
        loaded(tmp_path, tmp_path / "{rollout_id}.pt", 0)
    assert not (tmp_path / "made").exists()


@table("content", [b"", b"PK\x03\x04 cut off", b"\x80\x02", b"nothing", b"\x81\xa6schema\x09"])
def test_a_file_that_is_no_dump_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="a batch that can be trained"):
        loaded(tmp_path, tmp_path / "{rollout_id}.pt", 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        loaded(tmp_path, tmp_path / "{rollout_id}.pt", 3)


# --- a part of a dump


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), share=st.floats(0.01, 1.0))
def test_a_part_is_what_slime_takes(sizes: list[int], share: float) -> None:
    """``data[: rough // 2] + data[-rough // 2 :]`` of the flat list, without a group that loses all."""
    flat = [(group, index) for group, size in enumerate(sizes) for index in range(size)]
    groups = [
        DumpedGroup(f"g{at:08d}", [stored(f"g{at:08d}", index) for index in range(size)], [100.0 * at + index for index in range(size)])
        for at, size in enumerate(sizes)
    ]
    rough = int(len(flat) * share)
    if rough == 0:
        with pytest.raises(BadMessage, match="leaves none"):
            subsampled(groups, share)
        return
    expected = flat[: rough // 2] + flat[-rough // 2 :]
    found = subsampled(groups, share)
    assert [reward for group in found for reward in group.rewards] == [100.0 * group + index for group, index in expected]
    for group in found:
        assert [sample.index for sample in group.samples] == list(range(len(group.samples)))


@pytest.mark.parametrize("suffix", [".pt", ".msgpack"])
def test_a_part_of_a_dump_keeps_what_belongs_to_its_samples(tmp_path: Path, suffix: str) -> None:
    dumped(tmp_path / f"{{rollout_id}}{suffix}")
    batch, samples = loaded(tmp_path, tmp_path / f"{{rollout_id}}{suffix}", 7, load_debug_rollout_data_subsample=0.6)  # 4 of 7: two, two
    assert [group.rewards for group in batch.groups] == [[1.0, 0.1], [1.0, 1.0]]
    assert [group.removed for group in batch.groups] == [(1,), ()]
    assert [[sample.rollout for sample in group] for group in samples] == [[0, 1], [1, 1]]


# --- the config


@table(
    ("debug", "field", "says"),
    [
        ({"debug_train_only": True}, "debug_train_only", "load_debug_rollout_data"),
        ({"debug_rollout_only": True, "load_debug_rollout_data": "x_{rollout_id}.pt"}, "debug_rollout_only", "nothing to generate"),
        ({"load_debug_rollout_data_subsample": 0.5}, "load_debug_rollout_data_subsample", "belongs to load_debug_rollout_data"),
        ({"save_debug_rollout_data": "always.pt"}, "save_debug_rollout_data", "{rollout_id}"),
        (
            {"save_debug_rollout_data": "{rollout_id}.pt", "load_debug_rollout_data": "{rollout_id}.pt"},
            "load_debug_rollout_data",
            "replace",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, debug: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(values(tmp_path, debug=debug))
    assert caught.value.field == f"debug.{field}"


def test_details_are_both_dumps_and_ranks_never_share_a_file(tmp_path: Path) -> None:
    details = run_config(tmp_path, debug={"dump_details": "/out"}).debug
    assert details.rollout_dump == "/out/rollout_data/{rollout_id}.pt"
    assert details.train_dump == "/out/train_data/{rollout_id}_{rank}.safetensors"
    given = run_config(tmp_path, debug={"save_debug_train_data": "/out/{rollout_id}.pt"}).debug
    assert given.train_dump == "/out/{rollout_id}_{rank}.pt"
    beside = given.model_copy(update={"dump_details": "/details", "save_debug_rollout_data": "/own/{rollout_id}.msgpack"})
    assert (beside.rollout_dump, beside.train_dump) == ("/own/{rollout_id}.msgpack", given.train_dump), "named paths are written"


def test_half_a_run_shares_no_gpu(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"colocate": True, "offload_train": True}, debug={"debug_rollout_only": True})
    assert (config.trainer.colocate, config.trainer.offload_train) == (False, None)
