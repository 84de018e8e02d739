"""Hugging Face to torch_dist and back: bit-equal, streamed, loadable by a trainer in any layout, complete or absent."""

import json
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer import convert_command
from services.trainer.megatron import hf_conversion
from services.trainer.parallel.checkpoint import CheckpointMissing
from services.trainer.parallel.safetensors_reader import SafetensorsReader
from shared.model.families import read_architecture
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import make_checkpoint

STEP = "step_00000000"


def quiet(done, total):
    pass


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.fixture
def loaded(hf):
    return lambda kind: load_file(hf(kind) / "model.safetensors")


MORE_KINDS = [
    *("qwen3_moe_mixed", "minimax_m2", "deepseek_v32", "gpt_oss", "qwen3_next"),
    *("qwen2", "llama3_rope", "glm4", "glm4_moe", "gemma3_text", "mistral"),
]


@pytest.mark.parametrize("kind", ["qwen3_tied", "deepseek_v3", *(pytest.param(kind, marks=pytest.mark.extra) for kind in MORE_KINDS)])
def test_there_and_back_is_bit_equal(kind, hf, loaded, tmp_path):
    seen = []
    made = hf_conversion.to_torch_dist(hf(kind), tmp_path / "dist", None, lambda *progress: seen.append(progress))
    assert made == tmp_path / "dist" / STEP
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in loaded(kind).values())
    assert json.loads((made / "checkpoint.json").read_text())["architecture"]["num_layers"] == 2
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, quiet)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), loaded(kind))
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((hf(kind) / "config.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "hf"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen2"])
def test_an_output_layer_beside_a_tied_embedding_has_to_be_the_same(kind, sharded, hf, loaded, tmp_path):
    """SGLang would generate with the embedding, transformers with the file's output layer."""
    source = shutil.copytree(hf(kind), tmp_path / "model")
    tensors, config = loaded(kind), json.loads((source / "config.json").read_text())
    output = tensors["model.embed_tokens.weight"].clone()

    def written(**changes):
        if sharded:
            save_file({"lm_head.weight": output}, source / "output.safetensors", {"format": "pt"})
        save_file(tensors | ({} if sharded else {"lm_head.weight": output}), source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps({**config, **changes}))
        return SafetensorsReader(source).check(read_architecture(source))

    written()
    output[-1, -1] += 1
    with pytest.raises(ConfigError, match="lm_head.weight = 'another matrix': model.embed_tokens.weight, .*tie_word_embeddings to false"):
        written()
    with pytest.raises(ConfigError, match="lm_head.weight"):
        hf_conversion.to_torch_dist(source, tmp_path / "dist", None, quiet)
    written(tie_word_embeddings=False)


def test_little_is_in_memory_at_a_time(hf, tmp_path, monkeypatch):
    read, alive = SafetensorsReader.read, []
    most = 0

    def counted(self, *given):
        nonlocal most
        tensor = read(self, *given)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    hf_conversion.to_torch_dist(hf("qwen3_moe"), tmp_path / "dist", None, quiet)
    assert len(alive) > 30 and most <= 3  # q, k and v become one parameter


def test_in_buckets_and_several_files(hf, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_conversion, "FILE_BYTES", 20_000)
    hf_conversion.to_torch_dist(hf("qwen3"), tmp_path / "dist", None, quiet)
    hf_conversion.to_hf(tmp_path / "dist" / STEP, tmp_path / "hf", None, None, quiet)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert same({name: tensor for file in files for name, tensor in load_file(file).items()}, loaded("qwen3"))


def test_a_trainer_starts_from_it(hf, loaded, make_actor, tmp_path):
    hf_conversion.to_torch_dist(hf("deepseek_v3"), tmp_path / "dist", None, quiet)
    fresh = [(step.loss, step.grad_norm) for step in rank_steps.steps(make_actor("deepseek_v3"), 2)]
    actor = make_actor("deepseek_v3")
    rank_steps.steps(actor, 2, first=7)
    assert actor.load_checkpoint(tmp_path / "dist") == {}
    assert same(rank_steps.exported(actor), loaded("deepseek_v3"))
    assert [(step.loss, step.grad_norm) for step in rank_steps.steps(actor, 2)] == fresh  # nothing of the steps before is left


def load_and_export(hf_dir, config, root):
    actor = rank_steps.actor(hf_dir, **config)
    rank_steps.steps(actor, 1)
    actor.load_checkpoint(root)
    return rank_steps.exported(actor)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("glm4", {"tensor_model_parallel_size": 2}, marks=pytest.mark.extra),
        pytest.param("deepseek_v3", {"expert_model_parallel_size": 2}, marks=pytest.mark.extra),
        ("deepseek_v3", {"pipeline_model_parallel_size": 2}),
        pytest.param("gpt_oss", {"expert_model_parallel_size": 2}, marks=pytest.mark.extra),
    ],
)
def test_a_trainer_of_two_ranks_starts_from_it(kind, config, hf, loaded, two_ranks, tmp_path):
    hf_conversion.to_torch_dist(hf(kind), tmp_path / "dist", None, quiet)
    exported, _ = two_ranks.run(load_and_export, hf(kind), config, tmp_path / "dist")
    assert same(exported, loaded(kind))


def test_a_trainers_checkpoint_becomes_a_hugging_face_one(hf, make_actor, tmp_path):
    actor = make_actor("moonlight")
    actor.save_checkpoint(tmp_path / "run", 0)
    rank_steps.steps(actor, 1)
    actor.save_checkpoint(tmp_path / "run", 1)
    exported = rank_steps.exported(actor)
    with pytest.raises(ConfigError, match="--hf"):
        hf_conversion.to_hf(tmp_path / "run", tmp_path / "out", None, None, quiet)
    with pytest.raises(CheckpointMissing, match="step 7"):
        hf_conversion.to_hf(tmp_path / "run", tmp_path / "out", hf("moonlight"), 7, quiet)
    with pytest.raises(ConfigError) as error:
        hf_conversion.to_hf(tmp_path / "run", tmp_path / "out", hf("deepseek_v3"), None, quiet)
    assert "latent.q_lora_rank" in str(error.value) or "experts.groups" in str(error.value)
    hf_conversion.to_hf(tmp_path / "run", tmp_path / "out", hf("moonlight"), None, quiet)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), exported)


def test_bfloat16_is_asked_for_or_found(hf, tmp_path):
    hf_conversion.to_torch_dist(hf("qwen2"), tmp_path / "dist", "bfloat16", quiet)
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, quiet)
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    hf_conversion.to_torch_dist(tmp_path / "hf", tmp_path / "again", None, quiet)
    assert json.loads((tmp_path / "again" / STEP / "checkpoint.json").read_text())["dtype"] == "bfloat16"


def quantized(tensors, block):
    """Matrices in float8 with a factor for each block; embeddings, routers and vectors as they are."""
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or "embed" in name or "lm_head" in name or name.endswith(("gate.weight", "weights_proj.weight")):
            made[name] = tensor.bfloat16() if tensor.dim() > 1 else tensor
            continue
        rows, columns = -(-tensor.size(0) // block), -(-tensor.size(1) // block)
        factors = torch.rand(rows, columns) + 0.5
        made[name] = tensor.to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = factors
    return made


@pytest.mark.parametrize("kind", ["deepseek_v3", pytest.param("deepseek_v32", marks=pytest.mark.extra)])
def test_8_bit_weights_become_what_they_stand_for(kind, hf, loaded, tmp_path):
    source = shutil.copytree(hf(kind), tmp_path / "source")
    tensors = quantized(loaded(kind), 16)
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": method, "dtype": "bfloat16"}))
    hf_conversion.to_torch_dist(source, tmp_path / "dist", None, quiet)
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, quiet)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    out = load_file(tmp_path / "hf" / "model.safetensors")
    assert out.keys() == loaded(kind).keys()
    scaled = [name for name in out if f"{name}_scale_inv" in tensors]
    assert len(scaled) > 30
    for name in scaled:
        factors = tensors[f"{name}_scale_inv"]
        for row, column in torch.cartesian_prod(*map(torch.arange, factors.shape)).tolist():
            here = (slice(16 * row, 16 * row + 16), slice(16 * column, 16 * column + 16))
            wanted = (tensors[name][here].float() * factors[row, column]).bfloat16()
            assert torch.equal(out[name][here], wanted), (name, row, column)
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigError, match="quantization_config"):
        hf_conversion.to_torch_dist(source, tmp_path / "other", None, quiet)


def packed_in_four_bits(tensors, generator):
    """Matrices of experts as random numbers of four bits with exponents, and what they stand for."""
    made, wanted = dict(tensors), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = made.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
        scales = torch.randint(115, 130, (experts, outputs, -(-inputs // 32)), generator=generator)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
        wanted[name] = (numbers * 2.0 ** (scales.repeat_interleave(32, -1) - 127)).transpose(1, 2).bfloat16()
        made[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).unflatten(-1, (-1, 16))
        made[f"{name}_scales"] = scales.to(torch.uint8)
    return made, wanted


def test_mxfp4_experts_become_what_they_stand_for(tmp_path):
    source = tmp_path / "source"
    make_checkpoint("gpt_oss", source, intermediate_size=64)
    before = load_file(source / "model.safetensors")
    tensors, wanted = packed_in_four_bits(before, torch.Generator().manual_seed(1))
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != "dtype"}))
    hf_conversion.to_torch_dist(source, tmp_path / "dist", None, quiet)
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, quiet)
    out = load_file(tmp_path / "hf" / "model.safetensors")
    assert same(out, {name: tensor.bfloat16() for name, tensor in before.items()} | wanted) and len(wanted) == 4
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["swiglu_limit"] == 7 and "quantization_config" not in config


def test_what_fails_leaves_nothing_behind(hf, tmp_path, monkeypatch):
    source = shutil.copytree(hf("qwen2"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: model\.norm\.weight"):
        hf_conversion.to_torch_dist(source, tmp_path / "dist", None, quiet)

    def broken(done, total):
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        hf_conversion.to_torch_dist(hf("qwen2"), tmp_path / "dist", None, broken)
    assert not (tmp_path / "dist").exists()
    hf_conversion.to_torch_dist(hf("qwen2"), tmp_path / "dist", None, quiet)  # what was left half-way is in nobody's way
    with pytest.raises(OSError, match="no space"):
        hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, broken)
    assert not (tmp_path / "hf").exists()


def test_bad_input_is_named(hf, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source, target = str(hf("qwen2")), str(tmp_path / "out")
    for arguments, names in (
        ([str(tmp_path / "nowhere"), target], ["SOURCE", "nowhere"]),
        ([source, source], ["TARGET", "nothing is yet"]),
        ([source, target, "--step", "3"], ["--step", "Hugging Face"]),
        ([str(tmp_path), target, "--dtype", "bfloat16"], ["--dtype", "torch_dist"]),
        ([source], ["TARGET"]),
    ):
        try:
            code = convert_command.main(arguments)
        except SystemExit as exit:
            code = exit.code
        assert code == exit_codes.BAD_INPUT
        complaint = capsys.readouterr().err
        assert all(name in complaint for name in names), complaint


@pytest.mark.extra(each=True)  # the tests above have what it calls
def test_the_command(hf, loaded, tmp_path):
    command = [sys.executable, "-m", "myxo.main", "convert"]
    run = subprocess.run([*command, str(hf("qwen3")), str(tmp_path / "dist")], capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stdout) == (exit_codes.DONE, f"{tmp_path / 'dist' / STEP}\n"), run.stderr
    assert "to torch_dist" in run.stderr
    hf_conversion.to_hf(tmp_path / "dist", tmp_path / "hf", None, None, quiet)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), loaded("qwen3"))
