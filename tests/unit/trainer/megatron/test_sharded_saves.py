"""Saves to which every rank writes its own part: through kills, on disks that are not shared, and loaded in other layouts."""

import random
import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from services.trainer.parallel.checkpoint import CheckpointElsewhere, checkpoints
from services.trainer.parallel.joint_write import Places
from tests.unit.trainer.megatron import rank_steps, save_steps
from tests.unit.trainer.megatron.test_checkpoint import assert_exact
from tests.unit.trainer.megatron.test_layouts import TP2_SP, assert_steps
from tests.unit.trainer.megatron.world import RankFailed, World


@pytest.fixture(scope="module")
def unkilled(hf, tmp_path_factory):
    """How many moments a save has on each of two ranks, and rank 0's weights by step."""
    world = World(2)
    try:
        told = world.run(save_steps.save_twice, hf("qwen3_tied"), tmp_path_factory.mktemp("unkilled"))
    finally:
        world.stop()
    return [moments for moments, _ in told], told[0][1]


@pytest.mark.extra(each=True)  # `test_a_kill_while_saving_leaves_the_older_checkpoint` has one moment
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(seed, hf, unkilled, fresh_world, alone, tmp_path):
    moments, weights = unkilled
    assert min(moments) >= 5
    draw = random.Random(f"kill at a moment {seed}")
    victim = draw.randrange(2)
    moment = draw.randint(1, moments[victim])
    with pytest.raises(RankFailed):
        fresh_world(2).run(save_steps.save_twice, hf("qwen3_tied"), tmp_path, victim, moment)
    step = max(checkpoints(tmp_path))
    assert step in (1, 2), f"rank {victim} was killed at moment {moment} of {moments[victim]}"
    again = alone.actor(hf("qwen3_tied"))
    assert again.load_checkpoint(tmp_path) == {"at": step}
    for name, tensor in rank_steps.exported(again).items():
        assert torch.equal(tensor, weights[step][name]), name
    again.save_checkpoint(tmp_path, 3, {"at": 3}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"], "what the dead left is gone"


@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3_tied", {**TP2_SP, "pipeline_model_parallel_size": 2}),  # the second node has a tied embedding of its own
        ("qwen3_moe", {"expert_model_parallel_size": 2}),
        ("qwen3", {"use_distributed_optimizer": False, "train_dtype": "bfloat16"}),
    ],
)
def test_each_node_keeps_the_files_of_its_ranks(kind, config, hf, four_ranks, alone, tmp_path):
    for outcome in four_ranks.run(save_steps.resume_from_own_disks, hf(kind), config, tmp_path, 2):
        assert_exact(outcome)
    step = "step_00000002"
    held = [sorted(path.name for path in (tmp_path / f"node{node}" / step).glob("*.distcp")) for node in range(2)]
    assert held == [["__0_0.distcp", "__1_0.distcp"], ["__2_0.distcp", "__3_0.distcp"]]
    others = {
        "use_distributed_optimizer": config.get("use_distributed_optimizer", True),
        "train_dtype": config.get("train_dtype", "float32"),
    }
    for text in four_ranks.run(save_steps.refused_load, hf(kind), {**others, **TP2_SP}, tmp_path, 2):
        assert text.startswith("CheckpointElsewhere: ") and "ranks [2, 3] on" in text and "another layout" in text
    for text in four_ranks.run(save_steps.refused_load, hf(kind), config, tmp_path, 4):  # node 1's ranks are now on node 0
        assert text.startswith("CheckpointElsewhere: ") and "for rank 2" in text and "was on another node" in text
    assert max(checkpoints(tmp_path / "node0")) == 2
    with pytest.raises(CheckpointElsewhere, match=r"ranks \[2, 3\]"):
        alone.actor(hf(kind), **others).load_checkpoint(tmp_path / "node0")
    for path in (tmp_path / "node1" / step).glob("*.distcp"):
        shutil.copy(path, tmp_path / "node0" / step)
    outcomes = four_ranks.run(save_steps.train_on, hf(kind), config, tmp_path / "node0", 2)[0]
    assert_steps(alone.load_and_train(hf(kind), others, tmp_path / "node0", 2)[0], outcomes)


@pytest.mark.extra
def test_tp2_pp2_dp2_goes_on_in_every_other_layout(hf, alone, two_ranks, four_ranks, fresh_world, tmp_path):
    kind, before = hf("deep_moe"), {**TP2_SP, "pipeline_model_parallel_size": 2}
    straight, _ = fresh_world(8).run(rank_steps.save_after, kind, before, tmp_path, 2)[0]
    layouts = [
        (two_ranks, {}),
        (two_ranks, {"expert_model_parallel_size": 2}),
        (two_ranks, {"pipeline_model_parallel_size": 2}),
        (four_ranks, {**TP2_SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ]
    resumed = [world.run(rank_steps.load_and_train, kind, after, tmp_path, 2)[0] for world, after in layouts]
    resumed.append(alone.load_and_train(kind, {}, tmp_path, 2))  # TP1 and DP1
    for outcome, _ in resumed:
        assert_steps(outcome, straight)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_tied", marks=pytest.mark.extra)])
def test_replicated_weights_are_written_once_and_shared_out(kind, hf, two_ranks, tmp_path):
    two_ranks.run(rank_steps.save_after, hf(kind), {}, tmp_path, 1)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step_00000001").glob("*.distcp"))]
    assert len(sizes) == 2 and max(sizes) < 1.5 * min(sizes)
    stored = FileSystemReader(tmp_path / "step_00000001").read_metadata().storage_data
    assert sum(sizes) == sum(entry.length for entry in stored.values()), "nothing is written that the index, which has all once, lacks"
    weights = sum(path.stat().st_size for path in hf(kind).glob("*.safetensors"))
    assert sum(sizes) > 4 * weights, "weights, their copy in the optimizer and two moments"


def test_directories_are_told_apart_by_their_leaders():
    places = Places((0, 0, 2, 2), ("a", "a", "b", "b"))
    assert places.directories == [[0, 1], [2, 3]]
    assert places.as_json() == [{"host": "a", "ranks": [0, 1]}, {"host": "b", "ranks": [2, 3]}]
