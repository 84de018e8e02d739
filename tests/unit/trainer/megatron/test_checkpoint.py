"""Exact resume, atomic publication through kills, and refusal of what does not belong."""

import io
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.trainer.objective.loss import ValueLoss
from services.trainer.parallel import checkpoint
from services.trainer.parallel.checkpoint import CheckpointMissing, checkpoints
from services.trainer.parallel.joint_write import SaveFailed
from shared.runtime.errors import ConfigError
from tests.support.small_disk import small_disk
from tests.support.tables import rare
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_layouts import CP2, EP2, PP2, TP2, TP2_SP, VPP2, WHOLE, assert_steps, etp
from tests.unit.trainer.megatron.world import RankFailed

BFLOAT16 = {"train_dtype": "bfloat16"}
LORA = {"lora_rank": 4, "lora_alpha": 6.0}
UPPER = {"only_train_params_name_list": (r"layers\.1\.", "output_layer", "final_layernorm")}
NO_EMBEDDING = {"freeze_params_name_list": ("embedding", "layernorm")}


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
        rare("qwen3_tied", {}),
        rare("qwen3", WHOLE),
        rare("qwen3", BFLOAT16),
        ("qwen3", {**BFLOAT16, **WHOLE}),
        rare("qwen3_moe", {"lr_warmup_iters": 3, "lr_decay_style": "cosine", "updates": 9}),
        rare("qwen3", LORA),
        rare("qwen3", {**LORA, **BFLOAT16, **WHOLE}),
        rare("qwen3_moe", LORA),
        ("qwen3_tied", {**NO_EMBEDDING, "recompute": True}),
        rare("qwen3_tied", {**NO_EMBEDDING, **WHOLE, **BFLOAT16}),
    ],
)
def test_one_process_resumes_exactly(kind, config, alone, hf, tmp_path):
    assert_exact(alone.resume(hf(kind), config, tmp_path))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        rare("qwen3_tied", {}),
        rare("qwen3", WHOLE),
        rare("qwen3", BFLOAT16),
        rare("qwen3_tied", TP2_SP),
        rare("qwen3_tied", PP2),
        rare("deep_moe", VPP2),
        rare("qwen3", CP2),
        rare("qwen3_moe", EP2),
        rare("qwen3_moe", {**EP2, **WHOLE}),
        rare("qwen3_moe", {**TP2_SP, **etp(1)}),
        # one stage has experts, the other none, and their optimizers differ
        ("qwen3_moe_mixed", PP2),
        rare("qwen3_moe_mixed", {**PP2, **WHOLE}),
        ("qwen3_moe", {**LORA, **EP2}),
        rare("qwen3_tied", {**LORA, **PP2}),
        rare("qwen3_tied", {**LORA, **BFLOAT16}),
        rare("qwen3_tied", {**LORA, **TP2_SP}),
        rare("qwen3", {**UPPER, **PP2}),
        rare("qwen3", {**UPPER, **TP2_SP}),
        ("qwen3", {**UPPER, **PP2, **WHOLE}),
    ],
)
def test_two_ranks_resume_exactly(kind, config, hf, two_ranks, tmp_path):
    for outcome in two_ranks.run(rank_steps.resume, hf(kind), config, tmp_path):
        assert_exact(outcome)


@pytest.mark.extra
def test_four_ranks_resume_exactly(hf, four_ranks, tmp_path):
    for outcome in four_ranks.run(rank_steps.resume, hf("qwen3_moe"), {**TP2_SP, **CP2, **EP2}, tmp_path):
        assert_exact(outcome)


def test_a_checkpoint_written_in_the_background_is_of_the_moment_of_its_save(hf, two_ranks, tmp_path):
    for outcome in two_ranks.run(rank_steps.save_meanwhile, hf("qwen3_tied"), {}, tmp_path):
        assert not outcome["early"]
        assert outcome["resumed"] == outcome["straight"] and outcome["extra"] == {"at": 2}


def test_a_failed_background_write_is_raised_on_every_rank_with_its_cause(hf, two_ranks, tmp_path):
    other, failing = two_ranks.run(rank_steps.fail_to_save, hf("qwen3"), tmp_path)
    for errors in (other, failing):
        assert len(errors) == 3  # at finish_save, at a save that waits, at the save after one that did not
        assert all("rank 1" in text and "No space left" in text for _, text, _ in errors)
    assert {cause for _, _, cause in failing} == {"OSError"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000005"]


def test_a_checkpoint_that_cannot_be_published_is_raised_with_its_cause(make_actor, tmp_path, monkeypatch):
    actor = make_actor("qwen3")
    actor.save_checkpoint(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "publish", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        actor.save_checkpoint(tmp_path, 2, keep=1, wait=False)
        with pytest.raises(SaveFailed, match=r"step_00000002 could not be published.*Input/output error") as error:
            actor.finish_save()
    assert isinstance(error.value.__cause__, OSError)
    assert max(checkpoints(tmp_path)) == 1
    actor.save_checkpoint(tmp_path, 3, keep=1, wait=False)
    assert actor.finish_save() == tmp_path / "step_00000003"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("wait", [rare(True), False])
def test_a_full_disk_costs_a_checkpoint_and_leaves_the_one_before_it_whole(make_actor, tmp_path, wait):
    actor = make_actor("qwen3")
    rank_steps.steps(actor, 1)
    with small_disk(tmp_path / "disk", "64m") as disk:
        root = disk.path / "checkpoints"
        actor.save_checkpoint(root, 1, {"at": 1})
        size = sum(file.stat().st_size for file in (root / "step_00000001").iterdir())
        rank_steps.steps(actor, 1, first=1)
        disk.fill(free=size // 2)
        with pytest.raises(SaveFailed, match="step_00000002 could not be written.*No space left"):
            actor.save_checkpoint(root, 2, {"at": 2}, wait=wait)
            actor.finish_save()
        assert [path.name for path in root.iterdir()] == ["step_00000001"], "nothing half-written is left to take the room"
        assert max(checkpoints(root)) == 1
        assert make_actor("qwen3").load_checkpoint(root) == {"at": 1}
        disk.clear()
        actor.save_checkpoint(root, 2, {"at": 2})
        assert max(checkpoints(root)) == 2


def test_resetting_the_optimizer_loads_the_weights_only(make_actor, tmp_path):
    actor = make_actor("qwen3", lr_warmup_iters=4)
    rank_steps.steps(actor, 2)
    actor.save_checkpoint(tmp_path, 2, {"at": 2})
    weights = rank_steps.exported(actor)
    again = make_actor("qwen3", lr_warmup_iters=4, use_distributed_optimizer=False)
    rank_steps.steps(again, 1)
    assert again.load_checkpoint(tmp_path, reset_optimizer_states=True) == {"at": 2}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in rank_steps.exported(again).items())
    assert rank_steps.steps(again, 1)[0].lr == pytest.approx(3e-3 / 4)


@pytest.mark.parametrize("config", [{}, rare({"use_distributed_optimizer": False}), {"trainer_backend": "torch"}])
def test_adams_bias_is_corrected_by_the_steps_since_its_moments_were_zero(config, make_actor, tmp_path):
    actor = make_actor("qwen3", **config, lr_warmup_iters=9)
    rank_steps.steps(actor, 3)
    actor.optimizer.reset_moments()  # as reset_optimizer_states does, which a resume may turn off
    rank_steps.steps(actor, 1, first=3)
    actor.save_checkpoint(tmp_path, 4)
    straight = rank_steps.steps(actor, 2, first=4)
    again = make_actor("qwen3", **config, lr_warmup_iters=9)
    again.load_checkpoint(tmp_path)
    assert rank_steps.steps(again, 2, first=4) == straight


@pytest.mark.parametrize("backend", ["megatron", rare("torch")])
def test_of_a_run_that_is_made_longer_the_rate_decays_to_its_new_end(backend, make_actor, tmp_path):
    decays = {"trainer_backend": backend, "lr_decay_style": "linear"}
    actor = make_actor("qwen3", **decays, updates=4)
    assert [step.lr for step in rank_steps.steps(actor, 4)] == pytest.approx([3e-3 * left / 4 for left in (4, 3, 2, 1)])
    actor.save_checkpoint(tmp_path, 4)
    again = make_actor("qwen3", **decays, updates=8)
    again.load_checkpoint(tmp_path)
    assert [step.lr for step in rank_steps.steps(again, 2, first=4)] == pytest.approx([3e-3 * left / 8 for left in (4, 3)])


def test_a_critics_checkpoint_holds_its_head_and_is_no_policys(make_actor, tmp_path):
    critic = make_actor("qwen3_tied", role="critic")
    critic.train_step(rank_steps.rl_batches(critic, 0, per_token=True), ValueLoss())
    critic.save_checkpoint(tmp_path, 1)
    straight = critic.train_step(rank_steps.rl_batches(critic, 1, per_token=True), ValueLoss())
    again = make_actor("qwen3_tied", role="critic")
    again.load_checkpoint(tmp_path)
    assert again.train_step(rank_steps.rl_batches(again, 1, per_token=True), ValueLoss()) == straight
    with pytest.raises(ConfigError, match="value_head"):
        make_actor("qwen3_tied").load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "of_both", "before", "after"),
    [
        rare("qwen3_tied", {}, TP2, {}),
        rare("qwen3_tied", {}, TP2_SP, PP2),
        rare("qwen3", {}, {}, TP2),
        rare("qwen3", {}, CP2, TP2_SP),
        ("qwen3_moe_mixed", {}, PP2, EP2),
        rare("minimax_m2", {}, TP2_SP, {}),
        rare("gpt_oss", {}, EP2, {**TP2_SP, **etp(1)}),
        rare("qwen3_next", {}, TP2_SP, {}),
        rare("glm_moe_dsa", {}, TP2_SP, {}),
        rare("qwen3_moe", {}, EP2, {}),
        rare("qwen3_moe", WHOLE, EP2, {}),
        rare("deep_moe", {}, VPP2, EP2),
        # two buckets of different padding: here Megatron's own gathering shifts what lies behind the first
        rare("qwen3_tied", {}, PP2, {}),
        ("qwen3_moe", LORA, EP2, TP2_SP),
        rare("qwen3", LORA, TP2, PP2),
        rare("qwen3", LORA, {}, TP2_SP),
        rare("qwen3", UPPER, TP2_SP, PP2),
    ],
)
def test_another_layout_goes_on_from_the_same_place(kind, of_both, before, after, hf, two_ranks, tmp_path):
    given = {"adam_eps": 1e-3, **of_both}
    straight = two_ranks.run(rank_steps.save_after, hf(kind), {**given, **before}, tmp_path, 2)
    resumed = two_ranks.run(rank_steps.load_and_train, hf(kind), {**given, **after}, tmp_path, 2)
    for (ours, _), (theirs, _) in zip(resumed, straight, strict=True):
        assert_steps(ours, theirs)
    (_, here), (_, there) = resumed[0], straight[0]
    assert here.keys() == there.keys() and all((tensor - there[name]).abs().max() < 1e-4 for name, tensor in here.items())


def test_two_ranks_checkpoint_goes_on_in_one_process(alone, hf, two_ranks, tmp_path):
    straight, _ = two_ranks.run(rank_steps.save_after, hf("qwen3"), {}, tmp_path, 2)[0]
    assert_steps(alone.load_and_train(hf("qwen3"), {}, tmp_path, 2)[0], straight)


@pytest.mark.extra
def test_a_checkpoint_before_the_first_step_resumes_too(make_actor, tmp_path):
    actor = make_actor("qwen3")
    actor.save_checkpoint(tmp_path, 0)
    straight = rank_steps.steps(actor, 2)
    again = make_actor("qwen3", lr_warmup_iters=9)
    assert again.load_checkpoint(tmp_path) == {}
    assert rank_steps.steps(again, 2) == straight


def test_a_checkpoint_goes_on_at_its_position_with_the_configured_rate(make_actor, tmp_path):
    actor = make_actor("qwen3", lr_warmup_iters=4)
    rank_steps.steps(actor, 1)
    actor.save_checkpoint(tmp_path, 1)
    again = make_actor("qwen3", lr=1e-3)
    again.load_checkpoint(tmp_path)
    assert [step.lr for step in rank_steps.steps(again, 4)] == pytest.approx([5e-4, 7.5e-4, 1e-3, 1e-3])


def test_the_newest_checkpoint_is_loaded_and_old_ones_go(make_actor, tmp_path):
    actor = make_actor("qwen3")
    assert not checkpoints(tmp_path) and not checkpoints(tmp_path / "nowhere")
    for step in (9, 10, 11, 12):
        actor.save_checkpoint(tmp_path, step, {"at": step}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000011", "step_00000012"]
    assert max(checkpoints(tmp_path)) == 12
    assert actor.load_checkpoint(tmp_path) == {"at": 12}
    assert actor.load_checkpoint(tmp_path, step=11) == {"at": 11}
    actor.save_checkpoint(tmp_path, 11, {"at": "again"})
    assert actor.load_checkpoint(tmp_path, step=11) == {"at": "again"}
    assert len(list(tmp_path.iterdir())) == 2
    actor.save_checkpoint(tmp_path, 10, keep=1)  # as on a disk of its own, after a step back since another one lacked 11 and 12
    assert list(checkpoints(tmp_path)) == [10]
    actor.save_checkpoint(tmp_path, 0, keep=1)  # of a trainer that begins anew since another one lacked all
    assert sorted(checkpoints(tmp_path)) == [0, 10]


def test_a_missing_checkpoint_is_named_with_those_that_exist(make_actor, tmp_path):
    actor = make_actor("qwen3")
    with pytest.raises(CheckpointMissing, match="none"):
        actor.load_checkpoint(tmp_path)
    actor.save_checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointMissing, match=r"step 5.*\[4\]"):
        actor.load_checkpoint(tmp_path, step=5)


@pytest.mark.parametrize("point", ["shards", *map(rare, ("marker", "aside"))])
def test_a_kill_while_saving_leaves_the_older_checkpoint(point, hf, fresh_world, make_actor, tmp_path):
    with pytest.raises(RankFailed, match="exit code -9"):
        fresh_world(1).run(rank_steps.save_and_die, hf("qwen3"), tmp_path, point)
    assert len(list(tmp_path.iterdir())) == 2  # the older one, and what the dead writer left
    assert max(checkpoints(tmp_path)) == 1
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
    assert max(checkpoints(tmp_path)) == 1


def test_another_architecture_is_refused_with_names_and_numbers(make_actor, hf, tmp_path):
    make_actor("qwen3").save_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError) as error:
        make_actor("qwen2").load_checkpoint(tmp_path)
    assert "head_dim" in str(error.value) and "16" in str(error.value) and "8" in str(error.value)
    with pytest.raises(ConfigError, match="tied_embeddings"):
        make_actor("qwen3_tied").load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="dtype"):
        make_actor("qwen3", train_dtype="bfloat16").load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="use_distributed_optimizer"):
        make_actor("qwen3", use_distributed_optimizer=False).load_checkpoint(tmp_path)


def test_another_format_is_refused(make_actor, tmp_path):
    actor = make_actor("qwen3")
    marker: Path = actor.save_checkpoint(tmp_path, 1) / "checkpoint.json"
    written = json.loads(marker.read_text())
    for version in (written["format"] - 1, 99):
        marker.write_text(json.dumps(written | {"format": version}))
        with pytest.raises(ConfigError, match=rf"format = {version}\b.*another version of Myxo"):
            actor.load_checkpoint(tmp_path)


class Runs:
    """What a pickle of code looks like: reading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Gets:
    """A pickle that takes an attribute of a class: early releases of Python 3.11 write members of enums so."""

    def __reduce__(self):
        return getattr, (torch.Size, "count")


def test_a_checkpoint_runs_no_code(make_actor, tmp_path):
    actor = make_actor("qwen3")
    path, proof = actor.save_checkpoint(tmp_path, 1), tmp_path / "ran"
    metadata, good = path / ".metadata", (path / ".metadata").read_bytes()
    for bad, said in ((pickle.dumps(Runs(proof)), "posix.mkdir"), (good[:-20], "metadata"), (b"", "metadata")):
        metadata.write_bytes(bad)
        with pytest.raises(ConfigError, match=said):
            actor.load_checkpoint(tmp_path)
    metadata.write_bytes(pickle.dumps(Gets()))
    with pytest.raises(ConfigError, match="no enum"):
        actor.load_checkpoint(tmp_path)
    metadata.write_bytes(good)
    state = torch.load(path / "common.pt", weights_only=False)
    torch.save({**state, "content": Runs(proof)}, path / "common.pt")
    with pytest.raises(BaseException, match=r"[Ww]eights[_ ]only"):  # PyTorch gathers what ranks raise in one of those
        actor.load_checkpoint(tmp_path)
    torch.save(state, path / "common.pt")
    rewrite_first_bytes_entry(path, Runs(proof))
    with pytest.raises(BaseException, match=r"[Ww]eights[_ ]only"):  # PyTorch gathers what ranks raise in one of those
        actor.load_checkpoint(tmp_path)
    assert not proof.exists()


def rewrite_first_bytes_entry(path: Path, value: object) -> None:
    """Puts a value in the place of the random states, the entry that PyTorch reads as a pickle."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index = next(index for index in metadata.storage_data if index.fqn.startswith("random"))
    saved = io.BytesIO()
    torch.save(value, saved)
    (path / "other.distcp").write_bytes(saved.getvalue())
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path="other.distcp", offset=0, length=saved.tell())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_checkpoint_is_made_of_plain_files(make_actor, tmp_path):
    actor = make_actor("qwen3")
    good = actor.save_checkpoint(tmp_path / "good", 1)

    def spoilt(kind: str) -> Path:
        path = shutil.copytree(good, tmp_path / kind / good.name)
        shard = next(path.glob("*.distcp"))
        if kind == "linked shard":
            shutil.move(shard, tmp_path / "elsewhere")
            shard.symlink_to(tmp_path / "elsewhere")
        elif kind == "pipe":
            os.mkfifo(path / "more.distcp")
        elif kind == "shard elsewhere":
            shutil.move(shard, tmp_path / shard.name)
            content = (path / ".metadata").read_bytes()
            (path / ".metadata").write_bytes(renamed_in_pickle(content, shard.name, f"../{shard.name}"))
        else:
            (path / "checkpoint.json").write_text("[" * 100_000 if kind == "nested" else "no JSON")
        return path.parent

    for kind in ("linked shard", "pipe", "shard elsewhere", "nested", "not JSON"):
        with pytest.raises(ConfigError, match="plain file|readable"):
            actor.load_checkpoint(spoilt(kind))
            pytest.fail(kind)


def renamed_in_pickle(content: bytes, name: str, other: str) -> bytes:
    metadata = pickle.loads(content)
    storage = metadata.storage_data
    metadata.storage_data = {key: replace(info, relative_path=info.relative_path.replace(name, other)) for key, info in storage.items()}
    return pickle.dumps(metadata)


def test_extra_must_be_json(make_actor, tmp_path):
    actor = make_actor("qwen3")
    for bad in (float("nan"), object()):
        with pytest.raises(ConfigError, match="JSON"):
            actor.save_checkpoint(tmp_path, 1, {"bad": bad})
    assert list(tmp_path.iterdir()) == []


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
