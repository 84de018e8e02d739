"""Adapters against plain PyTorch, in every layout, on disk and back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.megatron import hf_conversion
from shared.runtime.errors import ConfigError
from tests.support.tables import not_refused, rare
from tests.unit.trainer.megatron import lora_steps, rank_steps
from tests.unit.trainer.megatron.test_checkpoint import LORA
from tests.unit.trainer.megatron.test_layouts import CP2, EP2, PP2, TP2, TP2_SP, VPP2, WHOLE, assert_steps, etp
from tests.unit.trainer.megatron.test_train_step import reference_steps
from tests.unit.trainer.megatron.tiny import pack, sequences

ATTENTION = {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}
EXPERTS = {"target_modules": ("gate_proj", "up_proj", "down_proj")}
LATENT = {"target_modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}

TWO_RANKS = {"TP2 SP recompute": ("qwen3_tied", {**TP2_SP, "recompute": True})}
MORE = {
    "experts: EP2": ("qwen3_moe", EP2),
    "DP2": ("qwen3", {}),
    "PP2": ("qwen3_tied", PP2),
    "TP2 some matrices": ("qwen3", {**TP2, "target_modules": ("k_proj", "up_proj", "down_proj")}),
    "latent attention: TP2 SP": ("deepseek_v3", {**TP2_SP, **LATENT}),
    "experts: TP2 SP ETP2": ("qwen3_moe", {**TP2_SP, **EXPERTS}),
    "TP2": ("qwen3", TP2),
    "TP2 SP": ("qwen3", TP2_SP),
    "DP2 whole optimizer": ("qwen3", WHOLE),
    "CP2": ("qwen3", CP2),
    "DP2 recompute attention": ("qwen3", {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}),
    "PP2 VPP2 recompute": ("deep", {**VPP2, "recompute": True}),
    "experts: DP2 some matrices": ("qwen3_moe_mixed", {"target_modules": ("q_proj", "up_proj")}),
    "experts: TP2 SP ETP1 recompute": ("qwen3_moe", {**TP2_SP, **etp(1), "recompute": True}),
    "experts: CP2 EP2, whole optimizer": ("qwen3_moe", {**CP2, **EP2, **EXPERTS, **WHOLE}),
    "shared experts: TP2 SP EP2": ("glm4_moe", {**TP2_SP, **EP2}),
    "experts: PP2": ("deep_moe", PP2),
    "MoE, attention: TP2 SP EP2": ("qwen3_moe", {**TP2_SP, **EP2, **ATTENTION}),
}


class Adapted(torch.nn.Module):
    """PEFT's linear layer, written down again."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A, self.lora_B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, given):
        return self.base(given) + self.scale * (given @ self.lora_A.T) @ self.lora_B.T


class Merged(torch.nn.Module):
    """Adds the products of all experts' pairs to the matrices that transformers keeps in one tensor [experts, outputs, inputs]."""

    def __init__(self, experts, scale):
        super().__init__()
        self.scale = scale
        self.experts = torch.nn.ModuleList(torch.nn.ModuleList(pairs) for pairs in experts)

    def forward(self, whole):
        return whole + self.scale * torch.stack([torch.cat([pair.lora_B @ pair.lora_A for pair in pairs]) for pairs in self.experts])


class Pair(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())


def adapt_experts(model, tensors, scale):
    """Does that to every layer of experts. Returns the pairs by the names of their matrices."""
    found = {}
    for name in [name for name in tensors if ".experts." in name and ".lora_A." in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        found[path] = Pair(tensors[name], tensors[name.replace("lora_A", "lora_B")])
    for path, module in model.named_modules():
        if path.endswith(".mlp.experts") and found:
            for whole, parts in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
                pairs = [[found[f"{path}.{number}.{part}"] for part in parts] for number in range(module.num_experts)]
                torch.nn.utils.parametrize.register_parametrization(module, whole, Merged(pairs, scale))
    return found


def adapt(model, tensors, scale):
    """Puts adapters on a Hugging Face model; all else is frozen. Returns the layers by their names."""
    model.requires_grad_(False)
    layers = adapt_experts(model, tensors, scale)
    for name in [name for name in tensors if ".lora_A." in name and ".experts." not in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        parent, _, own = path.rpartition(".")
        layer = Adapted(model.get_submodule(path), tensors[name], tensors[name.replace("lora_A", "lora_B")], scale)
        setattr(model.get_submodule(parent), own, layer)
        layers[path] = layer
    return layers


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", ("all-linear",)),
        rare("qwen2", ("q_proj", "v_proj", "up_proj")),
        ("qwen3_moe", ("all-linear",)),
        rare("gpt_oss", ("q_proj", "v_proj")),
        rare("glm4", ("all-linear",)),
    ],
)
def test_steps_equal_plain_pytorch(kind, targets, make_actor, hf, monkeypatch):
    import transformers

    actor = make_actor(kind, **LORA, target_modules=targets, lr=2e-3, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.8)
    first = lora_steps.adapters(actor)
    made, load = [], transformers.AutoModelForCausalLM.from_pretrained

    def adapted(*args, **kwargs):
        model = load(*args, **kwargs)
        made.append(adapt(model, first, 6 / 4))
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", adapted)
    data = [rank_steps.share(actor, seed) for seed in range(3)]
    expected, _ = reference_steps(hf(kind), data, lr=2e-3, clip=0.8, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert_steps(rank_steps.steps(actor, 3), expected)
    last = lora_steps.adapters(actor)
    assert {name.split(".")[-3] for name in last} >= ({"q_proj", "down_proj"} if targets == ("all-linear",) else set(targets))
    for path, layer in made[0].items():
        for part in ("lora_A", "lora_B"):
            name = f"base_model.model.{path}.{part}.weight"
            assert not torch.equal(last[name], first[name])
            torch.testing.assert_close(last[name], getattr(layer, part).detach(), atol=2e-5, rtol=0)


def test_nothing_is_added_at_first(make_actor, hf):
    batch = [pack(sequences(6, seed=9))]
    base, adapted = make_actor("qwen3"), make_actor("qwen3", **LORA)
    assert torch.equal(base.log_probs(batch)[0], adapted.log_probs(batch)[0])
    loaded = load_file(hf("qwen3") / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in rank_steps.exported(adapted).items())
    for name, tensor in lora_steps.adapters(adapted).items():
        assert (tensor == 0).all() if ".lora_B." in name else 0.5 < tensor.abs().max() * tensor.size(1) ** 0.5 <= 1, name


@pytest.fixture
def one_process(hf, once):
    return lambda kind, targets: once(lora_steps.train, hf(kind), {**LORA, "target_modules": targets})


def assert_equal(expected, ranks):
    for rank in ranks:
        assert_steps(rank["steps"], expected["steps"])
        assert (rank["log_probs"] - expected["log_probs"]).abs().max() < 1e-4
    first = ranks[0]
    for what in ("weights", "adapters", "first"):
        assert first[what].keys() == expected[what].keys()
        for name, tensor in first[what].items():
            assert (tensor - expected[what][name]).abs().max() < (1e-4 if what != "first" else 1e-9), name
    assert all(torch.equal(tensor, expected["base"][name]) for name, tensor in first["base"].items())
    assert all(other["adapters"] is None for other in ranks[1:])


@pytest.mark.parametrize("layout", [*TWO_RANKS, *map(rare, MORE)])
def test_two_ranks_equal_one_process(layout, hf, one_process, two_ranks):
    kind, config = (TWO_RANKS | MORE)[layout]
    expected = one_process(kind, config.get("target_modules", ("all-linear",)))
    assert_equal(expected, two_ranks.run(lora_steps.train, hf(kind), {**LORA, **config}))


def test_what_lies_under_the_adapters_stays_as_it_was(one_process, hf):
    report, loaded = one_process("qwen3", ("all-linear",)), load_file(hf("qwen3") / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in report["base"].items())
    changed = {name for name, tensor in report["weights"].items() if not torch.equal(tensor, loaded[name])}
    assert changed == {name for name in loaded if "_proj." in name}
    assert all(not torch.equal(tensor, report["first"][name]) for name, tensor in report["adapters"].items())


def test_every_experts_matrix_is_merged_with_its_own_pair(one_process):
    report = one_process("qwen3_moe", ("all-linear",))
    experts = [name for name in report["weights"] if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name in experts:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        product = report["adapters"][f"{stem}.lora_B.weight"] @ report["adapters"][f"{stem}.lora_A.weight"]
        assert product.abs().max() > 1e-4
        torch.testing.assert_close(report["weights"][name], report["base"][name] + 6 / 4 * product, atol=1e-6, rtol=0)


def test_a_checkpoint_of_other_adapters_is_refused(make_actor, tmp_path):
    make_actor("qwen3", **LORA).save_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigError, match="lora.*'rank': 4.*None"):
        make_actor("qwen3").load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="lora.*'rank': 4.*'rank': 8"):
        make_actor("qwen3", lora_rank=8).load_checkpoint(tmp_path)


@pytest.mark.parametrize("config", [TP2, rare(PP2)])
def test_a_saved_model_is_merged_and_beside_it_lie_the_adapters(config, hf, two_ranks, tmp_path):
    import transformers

    live = two_ranks.run(lora_steps.saved_policies, hf("qwen3"), {**LORA, **config}, tmp_path)[0]["live"]
    merged = {name: tensor for file in (tmp_path / "2").glob("*.safetensors") for name, tensor in load_file(file).items()}
    base = load_file(hf("qwen3") / "model.safetensors")
    adapter = load_file(tmp_path / "2" / "adapter" / "adapter_model.safetensors")
    entries = json.loads((tmp_path / "2" / "adapter" / "adapter_config.json").read_text())
    assert (entries["peft_type"], entries["r"], entries["lora_alpha"]) == ("LORA", 4, 6.0)
    assert entries["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert len(adapter) == 2 * 2 * 7
    for name, weight in base.items():
        a = adapter.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight", None)
        if a is None:
            assert torch.equal(merged[name], weight)
            continue
        b = adapter.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
        torch.testing.assert_close(merged[name], weight + 6 / 4 * b @ a, atol=1e-6, rtol=0)
        assert not torch.equal(merged[name], weight)
    assert not adapter
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "2").eval()
    seqs = sequences(6, seed=9)
    with torch.no_grad():
        theirs = [model(input_ids=seq[None]).logits[0, :-1].log_softmax(-1).gather(1, seq[1:, None]).squeeze(1) for seq in seqs]
    trained = pack(seqs).loss_mask.bool()
    torch.testing.assert_close(live[2][trained], torch.cat(theirs), atol=1e-5, rtol=0)


@pytest.mark.extra  # the torch backend's `test_adapters_are_megatrons` has it as well
def test_a_policy_of_before_takes_its_adapters_only(hf, two_ranks, tmp_path):
    for rank in two_ranks.run(lora_steps.saved_policies, hf("qwen3"), {**LORA, **TP2_SP, "train_dtype": "bfloat16"}, tmp_path):
        for live, saved in zip(rank["live"], rank["saved"], strict=True):
            assert torch.equal(live, saved)  # not so through merged weights, which bfloat16 rounds
        assert not torch.equal(rank["live"][0], rank["live"][2])
        assert torch.equal(*rank["own"])
        assert 0 < (rank["merged"] - rank["live"][2]).abs().max() < 0.3


@pytest.mark.extra  # the torch backend's conversion has adapters, a saved model is merged above
def test_a_checkpoint_is_converted_to_the_merged_model(hf, two_ranks, tmp_path):
    two_ranks.run(rank_steps.save_after, hf("qwen3"), {**LORA, **TP2_SP}, tmp_path / "run", 2)
    hf_conversion.to_hf(tmp_path / "run", tmp_path / "hf", hf("qwen3"), None, lambda *_: None)
    actor = rank_steps.actor(hf("qwen3"), **LORA)
    actor.load_checkpoint(tmp_path / "run")
    expected, converted = rank_steps.exported(actor), load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == expected.keys()
    assert all(torch.allclose(tensor, expected[name], atol=1e-7) for name, tensor in converted.items())
    base = load_file(hf("qwen3") / "model.safetensors")
    changed = {name for name, tensor in converted.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if "_proj." in name}
    held = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    assert held.keys() == lora_steps.adapters(actor).keys()


@pytest.mark.parametrize("config", [rare(TP2), PP2])
def test_a_push_carries_each_stages_adapters_and_nothing_else(config, hf, two_ranks, make_actor):
    actor = make_actor("qwen3", **LORA, target_modules=("q_proj", "down_proj"))
    rank_steps.steps(actor, 1)
    expected = lora_steps.adapters(actor)
    ranks = two_ranks.run(lora_steps.pushed, hf("qwen3"), {**LORA, "target_modules": ("q_proj", "down_proj"), **config})
    (first, sent), (second, others) = ranks
    named = [[slot.name for slot in manifest.slots()] for manifest in (first, second)]
    if config == PP2:
        assert [*named[0], *named[1]] == list(expected)
        sent |= others
    else:
        assert named[0] == named[1] == list(expected) and not others
    assert (first.kind, first.scale) == ("adapter", 1.5) and len(first.buckets) > 1
    assert list(sent) == list(expected)
    for name, tensor in expected.items():
        assert sent[name].shape == tensor.shape
        assert (sent[name] - tensor).abs().max() < 1e-4


def test_what_cannot_be_adapted_is_refused_with_the_fields_name(make_actor):
    cases = [
        ("qwen3", {"lora_rank": 4, "target_modules": ("query_proj",)}, ["target_modules", "query_proj", "q_proj"]),
        ("deepseek_v3", {"lora_rank": 4, "target_modules": ("q_a_proj", "o_proj")}, ["target_modules", "kv_a_proj_with_mqa together"]),
        ("qwen3_moe", {"lora_rank": 4, "expert_tensor_parallel_size": 2}, ["expert_tensor_parallel_size", "2", "tensor-parallel size"]),
        (
            "glm4_moe",
            {"lora_rank": 4, "target_modules": ("up_proj",), "megatron": {"moe_shared_expert_overlap": True}},
            ["moe_shared_expert_overlap", "adapters on shared experts"],
        ),
        ("gpt_oss", {"lora_rank": 4}, ["target_modules", "all-linear", "some of q_proj, k_proj, v_proj, o_proj"]),
        ("gpt_oss", {"lora_rank": 4, "target_modules": ("gate_up_proj",)}, ["target_modules", "gate_up_proj", "q_proj"]),
        ("qwen3_next", {"lora_rank": 4}, ["trainer.lora_rank", "linear attention"]),
        ("glm4", {"lora_rank": 4, "target_modules": ("gate_up_proj",), **TP2}, ["target_modules", "one matrix", "down_proj"]),
    ]
    assert not not_refused(lambda kind, config: make_actor(kind, **config), cases)
