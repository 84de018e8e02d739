"""Weights out: bit-equal to what was loaded, in buckets, on disk."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.actor import PolicyExporter
from services.trainer.megatron.hf_conversion import MegatronGatherPlan
from services.trainer.parallel import export
from shared.model.final_exports import MARK
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps, save_steps
from tests.unit.trainer.megatron.tiny import KINDS, pack, sequences

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
TWO_RANKS = [("qwen3_tied", PIPELINE), ("qwen2", TENSOR), ("qwen3_moe", EXPERT)]
MORE = [("qwen3_tied", TENSOR), ("qwen2", PIPELINE), ("qwen3_moe", PIPELINE)]  # the newer families: test_family_layouts
MORE += [("glm4", TENSOR), ("qwen3_moe", SEQUENCE), ("gpt_oss", EXPERT)]
MORE += [(kind, layout) for kind in ("qwen3", "llama") for layout in (TENSOR, PIPELINE)]


@table("kind", KINDS)
def test_round_trip_is_bit_equal(kind, hf, make_actor):
    loaded = load_file(hf(kind) / "model.safetensors")
    actor = make_actor(kind)
    for out in (rank_steps.exported(actor), rank_steps.pushed(actor)):
        assert out.keys() == loaded.keys()
        for name, tensor in out.items():
            assert torch.equal(tensor, loaded[name]), name


@pytest.mark.parametrize(("kind", "config"), [*TWO_RANKS, *(pytest.param(*case, marks=pytest.mark.extra) for case in MORE)])
def test_round_trip_over_two_ranks_is_bit_equal(kind, config, hf, two_ranks):
    loaded = load_file(hf(kind) / "model.safetensors")
    (first, first_sent), (second, second_sent) = two_ranks.run(rank_steps.load_and_export, hf(kind), config)
    assert first.keys() == loaded.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, loaded[name]), name
    assert list(second) == list(first)
    assert set(second.values()) == {None}
    sent = {**first_sent, **second_sent}  # each pipeline stage sends its own
    assert sent.keys() == loaded.keys() and not first_sent.keys() & second_sent.keys()
    assert bool(second_sent) == ("pipeline_model_parallel_size" in config)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in sent.items())


def test_buckets_keep_to_their_size_and_to_the_models_order(hf, make_actor):
    actor = make_actor("qwen3")
    limit = 20_000  # the largest parameter has 16 KiB
    buckets = list(actor.export(limit))
    sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    assert max(sizes) <= limit and len(buckets) > 3
    assert all(a + b > limit for a, b in pairwise(sizes))  # filled, not one tensor each
    names = [name for bucket in buckets for name, _ in bucket]
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert len(list(actor.export(1))) > len(buckets)  # a parameter that exceeds the limit travels alone
    assert len(list(actor.export(10**9))) == 1


def test_tensors_are_contiguous_and_in_the_models_dtype(make_actor):
    for bucket in make_actor("qwen2", train_dtype="bfloat16").export(4096):
        for name, tensor in bucket:
            assert tensor.is_contiguous() and tensor.dtype == torch.bfloat16, name


def test_an_export_shows_the_present_weights(make_actor):
    actor = make_actor("qwen3")
    before = rank_steps.exported(actor)
    rank_steps.steps(actor, 1)
    after = rank_steps.exported(actor)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_saved_model_loads_in_transformers_and_scores_the_same(hf, make_actor, tmp_path):
    import transformers

    (hf("qwen3_tied") / "tokenizer_config.json").write_text('{"some": "tokenizer"}')
    template = hf("qwen3_tied") / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir(exist_ok=True)
    template.write_text("T")
    (hf("qwen3_tied") / "adapter_config.json").write_text("{}")  # of an adapter beside the model: transformers would look for it first
    actor = make_actor("qwen3_tied")
    rank_steps.steps(actor, 2)
    actor.save_hf(tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"some": "tokenizer"}'
    (hf("qwen3_tied") / "adapter_config.json").unlink()
    assert not (tmp_path / "out" / "adapter_config.json").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    seq = sequences(1)[0]
    with torch.no_grad():
        theirs = model(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1)
    torch.testing.assert_close(actor.log_probs([pack([seq])])[0][:-1], theirs, atol=1e-5, rtol=0)


def test_saving_replaces_an_older_model_and_states_the_dtype(hf, make_actor, tmp_path):
    make_actor("qwen3").save_hf(tmp_path / "out")
    (tmp_path / "out" / "left-over").write_text("x")
    make_actor("qwen3", train_dtype="bfloat16").save_hf(tmp_path / "out")
    assert not (tmp_path / "out" / "left-over").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_large_model_is_saved_in_several_files(hf, make_actor, tmp_path):
    export.start_export(MegatronGatherPlan(make_actor("qwen3").model), hf("qwen3"), tmp_path / "out", 20_000, copied=False).finish()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    loaded = load_file(hf("qwen3") / "model.safetensors")
    assert index["weight_map"].keys() == loaded.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values())
    assert len(set(index["weight_map"].values())) > 2
    reloaded = rank_steps.exported(rank_steps.actor(tmp_path / "out"))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in reloaded.items())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("qwen3", {"tensor_model_parallel_size": 2}, marks=pytest.mark.extra),
        ("qwen3_tied", {"pipeline_model_parallel_size": 2}),
        pytest.param("qwen3_moe", {"expert_model_parallel_size": 2}, marks=pytest.mark.extra),
        pytest.param("qwen3", {}, marks=pytest.mark.extra),
    ],
)
def test_two_ranks_write_their_shares_side_by_side(kind, config, hf, two_ranks, tmp_path):
    two_ranks.run(rank_steps.load_and_save, hf(kind), config, tmp_path / "out")
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) == 2, "each rank writes a file"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    saved = {name: tensor for held in files.values() for name, tensor in held.items()}
    assert index == {name: file for file, held in files.items() for name in held}
    loaded = load_file(hf(kind) / "model.safetensors")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    small, large = sorted(sum(tensor.nbytes for tensor in held.values()) for held in files.values())
    assert large < 2 * small


def test_a_reference_that_lies_on_the_disk_of_one_node_is_refused_on_all(hf, two_ranks, tmp_path):
    said = two_ranks.run(save_steps.reference_on_own_disks, hf("qwen3"), tmp_path)
    assert [len(outcomes) for outcomes in said] == [4, 4]
    for own, renewed, given, shared in said:
        assert own == renewed and own.startswith("ConfigError: trainer.save = ") and "all nodes see" in own
        assert given == shared == "made"


def test_ranks_without_rank_0s_disk_send_their_parts(hf, four_ranks, tmp_path):
    config = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    four_ranks.run(save_steps.export_to_own_disks, hf("qwen3"), config, tmp_path, 2)
    assert [path.name for path in tmp_path.glob("node*/out")] == ["out"] and (tmp_path / "node0" / "out").is_dir()
    saved = {name: tensor for path in (tmp_path / "node0" / "out").glob("*.safetensors") for name, tensor in load_file(path).items()}
    loaded = load_file(hf("qwen3") / "model.safetensors")
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())


# --- exports at intervals, beside the training


def exporter(actor: Any, tmp_path: Path, **trainer: Any) -> PolicyExporter:
    given = {"save_hf": str(tmp_path / "policy" / "{rollout_id}"), "save_interval": 2, **trainer}
    return PolicyExporter(run_config(tmp_path, trainer=given), None, actor)


def test_an_export_holds_the_weights_of_its_step_though_training_goes_on(make_actor, tmp_path):
    import transformers

    actor, seq = make_actor("qwen3_tied"), sequences(1)[0]
    exports = exporter(actor, tmp_path)
    rank_steps.steps(actor, 2)
    expected = actor.log_probs([pack([seq])])[0][:-1]
    exports.begin(2)
    rank_steps.steps(actor, 1)
    exports.finish()
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["1"]  # the rollout id of the second step
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy" / "1").eval()
    with torch.no_grad():
        theirs = model(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1)
    torch.testing.assert_close(expected, theirs, atol=1e-5, rtol=0)
    assert (actor.log_probs([pack([seq])])[0][:-1] - theirs).abs().max() > 1e-4  # the live weights are others by now


def test_exports_have_an_interval_of_their_own(make_actor, tmp_path):
    exports = exporter(make_actor("qwen3"), tmp_path, async_save=False, save_hf_interval=4)
    for steps in (2, 4, 6, 8):
        exports.begin(steps)
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["3", "7"]


def test_an_interval_that_no_checkpoint_ends_at_is_exported_with_the_next_checkpoint(make_actor, tmp_path):
    exports = exporter(make_actor("qwen3"), tmp_path, async_save=False, save_hf_interval=5)
    for steps in (2, 4, 6, 8, 10, 12):
        exports.begin(steps)
        exports.begin(steps)  # as after a restart
    assert sorted(int(path.name) for path in (tmp_path / "policy").iterdir()) == [3, 5, 9], "that of 4 steps is the run's last"


def test_a_copied_export_is_the_same_as_one_that_is_written_at_once(hf, make_actor, tmp_path):
    plan = MegatronGatherPlan(make_actor("qwen3").model)
    export.start_export(plan, hf("qwen3"), tmp_path / "at-once", file_bytes=20_000, copied=False).finish()
    export.start_export(plan, hf("qwen3"), tmp_path / "deep" / "copied", file_bytes=20_000).finish()
    once, copied = (
        {path.name: path.read_bytes() for path in directory.iterdir()} for directory in (tmp_path / "at-once", tmp_path / "deep" / "copied")
    )
    assert once == copied


def test_what_a_predecessor_did_not_get_to_write_is_made_up_for(make_actor, tmp_path):
    exports = exporter(make_actor("qwen3"), tmp_path, async_save=False)
    exports.begin(0)
    exports.begin(3)  # no step of the interval
    assert not (tmp_path / "policy").exists()
    exports.begin(2)
    assert (tmp_path / "policy" / "1" / "model.safetensors").is_file()
    (tmp_path / "policy" / "1" / "mark").touch()
    exports.begin(2)
    assert (tmp_path / "policy" / "1" / "mark").exists()  # it is there: it is not written again
    exports.begin(2, anew=True)
    assert not (tmp_path / "policy" / "1" / "mark").exists(), "of a history that was left, though its mark could not be changed"


def test_an_export_replaces_what_an_earlier_life_made_and_nothing_that_is_not_the_runs(make_actor, tmp_path, capsys):
    exports, place = exporter(make_actor("qwen3"), tmp_path, async_save=False), tmp_path / "policy" / "1"
    exports.begin(2)
    assert json.loads((place / MARK).read_text()) == {"steps": 2, "run": "test"}
    (place / MARK).write_text('{"steps": 3}')
    exports.begin(2)
    assert json.loads((place / MARK).read_text())["steps"] == 2
    (place / MARK).write_text('{"steps": 2, "run": "other"}')
    (place / "own").touch()
    exports.begin(2)
    assert (place / "own").exists() and "policy_not_exported" in capsys.readouterr().out
    exports.begin(4)
    assert (tmp_path / "policy" / "3" / MARK).is_file(), "the next one is tried"


def test_a_disk_that_fails_is_told_of_and_training_goes_on(make_actor, tmp_path, capsys):
    (tmp_path / "policy").write_text("a file where the directory belongs")
    exports = exporter(make_actor("qwen3"), tmp_path)
    exports.begin(2)
    exports.finish()
    (tmp_path / "policy").unlink()
    exports.begin(4)
    exports.finish()
    assert (tmp_path / "policy" / "3" / "model.safetensors").is_file()
    assert "policy_not_exported" in capsys.readouterr().out


def test_without_a_path_nothing_is_exported(make_actor, tmp_path):
    exports = exporter(make_actor("qwen3"), tmp_path, save_hf=None)
    exports.begin(2)
    exports.finish()
    assert list(tmp_path.iterdir()) == []
