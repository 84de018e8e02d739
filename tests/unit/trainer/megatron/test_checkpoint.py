"""Exact resume, atomic publication through kills, and refusal of what does not belong."""

import json
import os
from pathlib import Path

import pytest
import torch

from services.trainer.actor import latest_step
from services.trainer.megatron.checkpoint import CheckpointMissing
from shared.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.world import RankFailed


def assert_exact(outcome):
    assert outcome["resumed"] == outcome["straight"]
    assert outcome["extra"] == {"prompts": [1, 2]}
    assert torch.equal(*outcome["noise"])
    ours, theirs = outcome["weights"]
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor is None or torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_tied", {}),
        ("qwen3", {"use_distributed_optimizer": False}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16", "use_distributed_optimizer": False}),
        ("qwen3_moe", {}),
        ("qwen3", {"lr_warmup_steps": 3, "lr_decay_style": "cosine", "lr_decay_steps": 9}),
    ],
)
def test_one_process_resumes_exactly(kind, config, alone, hf, tmp_path):
    assert_exact(alone.resume(hf(kind), config, tmp_path))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_tied", {}),
        ("qwen3", {"use_distributed_optimizer": False}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3_tied", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("qwen3_tied", {"pipeline_model_parallel_size": 2}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}),
    ],
)
def test_two_ranks_resume_exactly(kind, config, hf, two_ranks, tmp_path):
    for outcome in two_ranks.run(rank_steps.resume, hf(kind), config, tmp_path):
        assert_exact(outcome)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("qwen3_tied", {"tensor_model_parallel_size": 2}, {}),
        ("qwen3_tied", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}),
        ("qwen3", {}, {"tensor_model_parallel_size": 2}),
        # two buckets of different padding: here Megatron's own gathering shifts what lies behind the first
        ("qwen3_tied", {"pipeline_model_parallel_size": 2}, {}),
    ],
)
def test_another_layout_goes_on_from_the_same_place(kind, before, after, hf, two_ranks, tmp_path):
    straight = two_ranks.run(rank_steps.save_after, hf(kind), before, tmp_path, 2)[0]
    resumed = two_ranks.run(rank_steps.load_and_train, hf(kind), after, tmp_path, 2)[0]
    for ours, theirs in zip(resumed, straight, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-4)


def test_two_ranks_checkpoint_goes_on_in_one_process(alone, hf, two_ranks, tmp_path):
    straight = two_ranks.run(rank_steps.save_after, hf("qwen3"), {}, tmp_path, 2)[0]
    resumed = alone.load_and_train(hf("qwen3"), {}, tmp_path, 2)
    for ours, theirs in zip(resumed, straight, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-4)


def test_a_checkpoint_before_the_first_step_resumes_too(make_actor, tmp_path):
    actor = make_actor("qwen3")
    actor.save_checkpoint(tmp_path, 0)
    straight = rank_steps.steps(actor, 2)
    again = make_actor("qwen3", lr=1.0)
    assert again.load_checkpoint(tmp_path) == {}
    assert rank_steps.steps(again, 2) == straight


def test_the_newest_checkpoint_is_loaded_and_old_ones_go(make_actor, tmp_path):
    actor = make_actor("qwen3")
    assert latest_step(tmp_path) is None and latest_step(tmp_path / "nowhere") is None
    for step in (9, 10, 11, 12):
        actor.save_checkpoint(tmp_path, step, {"at": step}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000011", "step_00000012"]
    assert latest_step(tmp_path) == 12
    assert actor.load_checkpoint(tmp_path) == {"at": 12}
    assert actor.load_checkpoint(tmp_path, step=11) == {"at": 11}
    actor.save_checkpoint(tmp_path, 11, {"at": "again"})
    assert actor.load_checkpoint(tmp_path, step=11) == {"at": "again"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_checkpoint_is_named_with_those_that_exist(make_actor, tmp_path):
    actor = make_actor("qwen3")
    with pytest.raises(CheckpointMissing, match="none"):
        actor.load_checkpoint(tmp_path)
    actor.save_checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointMissing, match=r"step 5.*\[4\]"):
        actor.load_checkpoint(tmp_path, step=5)


@pytest.mark.parametrize("point", ["shards", "marker", "aside"])
def test_a_kill_while_saving_leaves_the_older_checkpoint(point, hf, fresh_world, make_actor, tmp_path):
    with pytest.raises(RankFailed, match="exit code -9"):
        fresh_world(1).run(rank_steps.save_and_die, hf("qwen3"), tmp_path, point)
    assert len(list(tmp_path.iterdir())) == 2  # the older one, and what the dead writer left
    assert latest_step(tmp_path) == 1
    actor = make_actor("qwen3")
    assert actor.load_checkpoint(tmp_path) == {"from": "before"}
    actor.save_checkpoint(tmp_path, 2, {"from": "after"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    assert actor.load_checkpoint(tmp_path) == {"from": "after"}
    assert actor.load_checkpoint(tmp_path, step=1) == {"from": "before"}


def test_a_directory_without_its_marker_does_not_count(make_actor, tmp_path):
    actor = make_actor("qwen3")
    actor.save_checkpoint(tmp_path, 1)
    path = actor.save_checkpoint(tmp_path, 2)
    os.remove(path / "checkpoint.json")
    assert latest_step(tmp_path) == 1


def test_another_architecture_is_refused_with_names_and_numbers(make_actor, hf, tmp_path):
    make_actor("qwen3").save_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError) as error:
        make_actor("qwen2").load_checkpoint(tmp_path)
    assert "head_dim" in str(error.value) and "16" in str(error.value) and "8" in str(error.value)
    with pytest.raises(ConfigError, match="tied_embeddings"):
        make_actor("qwen3_tied").load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="dtype"):
        make_actor("qwen3", dtype="bfloat16").load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="use_distributed_optimizer"):
        make_actor("qwen3", use_distributed_optimizer=False).load_checkpoint(tmp_path)


def test_another_format_is_refused(make_actor, tmp_path):
    actor = make_actor("qwen3")
    marker: Path = actor.save_checkpoint(tmp_path, 1) / "checkpoint.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    with pytest.raises(ConfigError, match="99"):
        actor.load_checkpoint(tmp_path)


@pytest.mark.parametrize("extra", [{"bad": float("nan")}, {"bad": object()}])
def test_extra_must_be_json(extra, make_actor, tmp_path):
    with pytest.raises(ConfigError, match="JSON"):
        make_actor("qwen3").save_checkpoint(tmp_path, 1, extra)
    assert list(tmp_path.iterdir()) == []


def test_keeping_none_is_refused(make_actor, tmp_path):
    with pytest.raises(ConfigError, match="keep"):
        make_actor("qwen3").save_checkpoint(tmp_path, 1, keep=0)


def test_saving_starts_no_process(make_actor, tmp_path, monkeypatch):
    """A writer process would import the service's main module again."""
    import multiprocessing.process

    def refuse(self):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(os, "fork", lambda: refuse(None))
    actor = make_actor("qwen3")
    actor.save_checkpoint(tmp_path, 1)
    actor.load_checkpoint(tmp_path)
