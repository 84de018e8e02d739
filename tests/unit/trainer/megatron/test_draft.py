"""Draft layers: their loss and gradients against transformers' modules, the policy untouched, layouts, resume, exports, refusals."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from services.trainer.megatron import hf_conversion
from services.trainer.weights.snapshot_writer import SnapshotWriter
from tests.support.run_config import run_config
from tests.support.tables import not_refused
from tests.unit.trainer.megatron import draft_steps, rank_steps
from tests.unit.trainer.megatron.draft_steps import family_names, make_drafted, make_family
from tests.unit.trainer.megatron.test_checkpoint import assert_exact
from tests.unit.trainer.megatron.tiny import pack, sequences

OF = {"mimo": "qwen2", "qwen3_next": "qwen3_next"}
ON = {"enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3}
DRAFT = "model.layers.2."
COPIES = {f"{DRAFT}embed_tokens.weight": "model.embed_tokens.weight", f"{DRAFT}shared_head.head.weight": "lm_head.weight"}


@pytest.fixture(scope="session")
def drafted(tmp_path_factory):
    """``drafted(kind, count)``: the directory of a tiny checkpoint with draft layers, written once."""
    root, made = tmp_path_factory.mktemp("drafted"), {}

    def directory(kind, count=1):
        if (kind, count) not in made:
            target = root / f"{kind}-{count}"
            made[kind, count] = make_family(kind, OF[kind], target) if kind in OF else make_drafted(kind, target, count)
        return made[kind, count]

    return directory


def norm(hidden, weight, centre=0.0):
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * (weight + centre)


def reference(directory, target, seqs, mask, family=None):
    """Returns the mean loss of the draft layer, by itself from transformers' modules on single sequences, and its gradients by name."""
    import transformers

    config = json.loads((directory / "config.json").read_text())
    kinds = [*config["layer_types"], "full_attention"] if config.get("layer_types") else None
    centre = float(family == "qwen3_next")
    shutil.copytree(directory, target)
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0, "layer_types": kinds}))
    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)  # its third layer is the draft's
    policy = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    own = {name: tensor.requires_grad_() for name, tensor in load_file(directory / "model.safetensors").items() if name.startswith(DRAFT)}
    layer, losses = whole.model.layers[2], []
    for tokens, trained in zip(seqs, mask, strict=True):
        with torch.no_grad():
            hidden = policy.model(tokens[None]).last_hidden_state[:, :-2]
            embedded = policy.model.embed_tokens(tokens[None, 1:-1])
            embedded[:, :1] *= family != "mimo"
        if not hidden.size(1):
            continue
        places = torch.arange(hidden.size(1))[None]
        joined = torch.cat([norm(embedded, own[f"{DRAFT}enorm.weight"], centre), norm(hidden, own[f"{DRAFT}hnorm.weight"], centre)], -1)
        joined = joined @ own[f"{DRAFT}eh_proj.weight"].T
        output = layer(joined, position_embeddings=whole.model.rotary_emb(joined, places), position_ids=places, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        logits = F.linear(norm(output, own[f"{DRAFT}shared_head.norm.weight"], centre), policy.lm_head.weight.detach())
        found = F.cross_entropy(logits[0], tokens[2:], reduction="none")
        losses.append((found * trained[1:-1]).sum())
    loss = torch.stack(losses).sum() / sum(float(trained[1:-1].sum()) for trained in mask)
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in own.items() if tensor.grad is not None}
    gradients |= {f"{DRAFT}{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None and ".experts." not in name}
    return float(loss.detach()), gradients


def gradients_of(model):
    """The gradients of the last step under Hugging Face names: the exporter's conversion of the gradient buffers."""
    parameters = [p for chunk in model.model.chunks for p in chunk.module.parameters()]
    kept = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.data.copy_(p.main_grad)
    found = rank_steps.exported(model)
    for p, content in zip(parameters, kept, strict=True):
        p.data.copy_(content)
    return found


@pytest.mark.parametrize("kind", [pytest.param("glm4_moe", marks=pytest.mark.extra), "deepseek_v3"])
def test_loss_and_gradients_are_those_of_single_sequences_in_transformers(kind, drafted, tmp_path):
    seqs = [*sequences(5, seed=4), torch.tensor([3, 5])]  # the last is too short for a target
    batch = pack(seqs)
    mask = batch.loss_mask * (torch.arange(len(batch.loss_mask)) % 3 > 0)
    batch.loss_mask.copy_(mask)
    model = rank_steps.actor(drafted(kind), clip_grad=0.0, **ON)
    assert model.model.least_saved is None and "draft layer" in model.backend.unshared  # which the start logs
    step = model.train_step([batch], rank_steps.weighted_loss, need_entropy=True)
    loss, expected = reference(drafted(kind), tmp_path / "whole", seqs, mask.split([len(s) for s in seqs]))
    assert step.metrics["mtp_loss"] == pytest.approx(loss, rel=1e-5)
    found = gradients_of(model)
    compared = [name for name in expected if name in found]
    assert len(compared) > 8 and f"{DRAFT}eh_proj.weight" in compared and f"{DRAFT}mlp.shared_experts.down_proj.weight" in compared
    for name in compared:
        torch.testing.assert_close(found[name] / 0.3, expected[name], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(*item, marks=() if item[0] == "mimo" else pytest.mark.extra) for item in OF.items()]
)
def test_a_familys_draft_layer_trains_under_its_names_and_is_exported(family, kind, tmp_path):
    seqs = sequences(5, seed=4)
    directory = make_family(family, kind, tmp_path / "usual")
    model = rank_steps.actor(directory, clip_grad=0.0, **ON)
    model.save_hf(tmp_path / "same")
    before = saved(directory)
    assert saved(tmp_path / "same").keys() == before.keys()
    assert all(torch.equal(saved(tmp_path / "same")[name], tensor) for name, tensor in before.items())
    batch = pack(seqs)
    step = model.train_step([batch], rank_steps.weighted_loss, need_entropy=True)
    masks = batch.loss_mask.split([len(one) for one in seqs])
    loss, expected = reference(tmp_path / "usual", tmp_path / "whole", seqs, masks, family)
    assert step.metrics["mtp_loss"] == pytest.approx(loss, rel=1e-5)
    found, expected = gradients_of(model), family_names(family, expected)
    assert {name for name in expected if ".mlp." not in name} == {name for name in before if "mtp" in name and ".mlp." not in name}
    for name in expected.keys() & found.keys():
        torch.testing.assert_close(found[name] / 0.3, expected[name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.extra)])
def test_the_policy_trains_bit_for_bit_as_without_them(kind, drafted):
    on, off = (draft_steps.train_drafts(drafted(kind), config, 3) for config in (ON, {}))
    assert [(s.loss, s.grad_norm) for s in on["steps"]] == [(s.loss, s.grad_norm) for s in off["steps"]]
    assert all(torch.equal(on["weights"][name], tensor) for name, tensor in off["weights"].items())
    more = on["weights"].keys() - off["weights"].keys()
    before = load_file(drafted(kind) / "model.safetensors")
    assert more == {name for name in before if name.startswith(DRAFT)} - COPIES.keys()
    changed = [name for name in more if not torch.equal(on["weights"][name], before[name])]
    assert len(more) - len(changed) <= 1  # the bias of the router
    assert on["pushed"].keys() == on["weights"].keys()


LAYOUTS = [
    pytest.param("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.extra),
    ("glm4_moe", {"pipeline_model_parallel_size": 2}),
    pytest.param("deepseek_v3", {"context_parallel_size": 2}, marks=pytest.mark.extra),
    pytest.param("deepseek_v3", {"expert_model_parallel_size": 2}, marks=pytest.mark.extra),
    pytest.param("mimo", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.extra),
    pytest.param("mimo", {"context_parallel_size": 2}, marks=pytest.mark.extra),
    pytest.param("qwen3_next", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.extra),
    pytest.param("qwen3_next", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.extra),
    pytest.param("glm4_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.extra),
    pytest.param("glm4_moe", {"use_distributed_optimizer": False}, marks=pytest.mark.extra),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_layout_changes_nothing(kind, layout, drafted, two_ranks, once):
    expected = once(draft_steps.train_drafts, drafted(kind), ON, 2)
    found, other = two_ranks.run(draft_steps.train_drafts, drafted(kind), ON | layout)
    for step, wanted in zip(found["steps"], expected["steps"], strict=True):
        assert step.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-5)
        assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert step.metrics["mtp_loss"] == pytest.approx(wanted.metrics["mtp_loss"], rel=1e-5)
        assert step.metrics["mtp_accuracy"] == pytest.approx(wanted.metrics["mtp_accuracy"], abs=1e-6)
    assert (found["pushed"] | other["pushed"]).keys() == expected["pushed"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.extra
def test_a_resumed_run_goes_on_bit_for_bit(drafted, two_ranks, tmp_path):
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for outcome in [rank_steps.resume(drafted("glm4_moe"), ON, tmp_path / "one"), two_ranks.run(
        rank_steps.resume, drafted("deepseek_v3"), {**ON, **tensor, "train_dtype": "bfloat16"}, tmp_path / "two")[0]]:  # fmt: skip
        assert_exact(outcome)
        assert any(name.startswith(DRAFT) for name in outcome["weights"][0])
    refused = rank_steps.actor(drafted("glm4_moe"))
    assert not not_refused(refused.load_checkpoint, [(tmp_path / "one", ["trained_drafts", "1", "enable_mtp_training"])])


def saved(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_exports_have_the_draft_layers_trained_or_not(drafted, tmp_path):
    """The copies of embedding and output layer are the policy's; the rest is what was trained, or the checkpoint's own."""
    for config in (ON, {}):
        directory, target = drafted("glm4_moe"), tmp_path / str(len(config))
        before, model = saved(directory), rank_steps.actor(directory, **config)
        model.save_hf(target)
        found = saved(target)
        assert found.keys() == before.keys() and all(torch.equal(found[name], tensor) for name, tensor in before.items())
        rank_steps.steps(model, 1)
        model.save_hf(target, wait=False).finish()
        found, weights = saved(target), rank_steps.exported(model)
        for name, copied in COPIES.items():
            weights[name] = weights[copied]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert not torch.equal(found[f"{DRAFT}embed_tokens.weight"], before[f"{DRAFT}embed_tokens.weight"])
        untouched = {name for name in before if name.startswith(DRAFT) and name not in weights}
        assert bool(untouched) == (config == {}) and all(torch.equal(found[name], before[name]) for name in untouched)
        assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
        index = target / "model.safetensors.index.json"
        assert not index.exists() or json.loads(index.read_text())["weight_map"].keys() == before.keys()
        rank_steps.actor(target, **ON)  # an export is a checkpoint to begin with


@pytest.mark.parametrize(("config", "layers"), [(ON, 1), ({}, 0)])
def test_the_config_of_a_snapshot_counts_the_draft_layers_that_are_in_it(config, layers, drafted, tmp_path):
    model, target = rank_steps.actor(drafted("glm4_moe"), **config), tmp_path / "snapshot"
    target.mkdir()
    SnapshotWriter(run_config(tmp_path), None, model)._write_beside(target)
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == layers
    assert any(name.startswith(DRAFT) for name in rank_steps.exported(model)) == bool(layers)


def test_conversion_there_and_back_keeps_the_draft_layers(drafted, tmp_path):
    directory = drafted("deepseek_v3")
    hf_conversion.to_torch_dist(directory, tmp_path / "dist", None, lambda *_: None)
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", directory, None, lambda *_: None)
    found, before = saved(tmp_path / "hf"), saved(directory)
    assert found.keys() == before.keys() and all(torch.equal(found[name], tensor) for name, tensor in before.items())
    rank_steps.actor(directory, **ON).load_checkpoint(tmp_path / "dist")
    rank_steps.actor(directory).load_checkpoint(tmp_path / "dist")


@pytest.mark.extra
def test_the_loss_falls_and_the_draft_becomes_right(drafted):
    model = rank_steps.actor(drafted("glm4_moe"), **{**ON, "lr": 1e-2, "freeze_params_name_list": ["decoder"]})
    cycle = [(torch.arange(30) + first) % 11 for first in range(4)]
    found = [model.train_step([pack(cycle)], rank_steps.weighted_loss, need_entropy=True).metrics for _ in range(25)]
    assert found[-1]["mtp_loss"] < 0.3 * found[0]["mtp_loss"] and found[-1]["mtp_accuracy"] > 0.9


def test_two_draft_layers_train(drafted):
    step = rank_steps.steps(rank_steps.actor(drafted("glm4_moe", 2), **ON), 1)[0]
    assert step.skipped is None and 0 < step.metrics["mtp_loss"] < 10


def test_what_does_not_go_with_them_is_refused(drafted, hf):
    cases = [
        (hf("glm4_moe"), ON, ["enable_mtp_training", "num_nextn_predict_layers"]),
        (hf("qwen3"), ON, ["enable_mtp_training", "qwen3"]),
        (drafted("glm4_moe"), {**ON, "mtp_num_layers": 2}, ["mtp_num_layers", "2", "1"]),
        (drafted("glm4_moe"), {"mtp_num_layers": 2}, ["mtp_num_layers", "2", "1"]),
    ]
    assert not not_refused(lambda directory, config: rank_steps.actor(directory, **config), cases)
    rank_steps.actor(drafted("glm4_moe"), mtp_num_layers=1)
