"""Blocks of 8-bit floats and groups of 4-bit integers: what they are rounded to, which checkpoints have them, what cannot be divided."""

import ast
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.parallel.safetensors_reader import reader_of
from shared.model.quantization import QuantizedFormat, engine_bytes, format_of, in_groups, quantization_of, split_problems
from shared.runtime.errors import ConfigError
from shared.transfer import quantizer
from shared.transfer.quantizer import plain, quantized
from tests.support.converting import convert, quantized_checkpoint, to_8_bits
from tests.support.tables import table
from tests.unit.trainer.megatron.tiny import make_checkpoint

SGLANG = Path(torch.__file__).parents[1] / "sglang"
SHAPES = [(128, 128), (130, 257), (1, 1), (3, 300), (256, 8)]


def sglangs(file: str, *names: str) -> dict[str, Any]:
    """Functions of a file of SGLang's, without its imports, which want a GPU's packages."""
    nodes = {node.name: node for node in ast.parse((SGLANG / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    found: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Tuple": tuple, "List": list, "FP8_MAX": 448.0, "FP8_MIN": -448.0}
    found |= {"ceil_align": lambda x, y: -(-x // y) * y, "ceildiv": lambda x, y: -(-x // y)}
    exec(compile(ast.Module([nodes[name] for name in names], []), file, "exec"), found)
    return found


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(dtype)


@table("dtype", [torch.float32, torch.bfloat16])
@table("shape", SHAPES)
def test_they_are_sglangs_own(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = matrix(shape, dtype)
    powers = sglangs("srt/layers/quantization/fp8_utils.py", "per_block_cast_to_fp8", "ceil_to_ue8m0")["per_block_cast_to_fp8"](weight)
    plainly = sglangs("multimodal_gen/tools/convert_hf_to_fp8.py", "block_fp8")["block_fp8"](weight, [128, 128])
    for (made, factors), form in ((powers, QuantizedFormat(powers_of_two=True)), (plainly, QuantizedFormat())):
        own, own_factors = quantized(weight, form)
        assert torch.equal(own.view(torch.uint8), made.view(torch.uint8)) and torch.equal(own_factors, factors.view_as(own_factors))
        assert own.shape == weight.shape and own_factors.shape == form.factors(shape)


@pytest.mark.parametrize("powers", [False, True])
def test_a_number_is_rounded_to_the_nearest(powers: bool) -> None:
    """By at most half of the step between two 8-bit floats: 2⁻⁴ of itself, or 2⁻¹⁰ of the factor below the smallest normal one."""
    form = QuantizedFormat(16, 32, powers)
    weight = matrix((50, 70))
    made, factors = quantized(weight, form)
    spread = factors.repeat_interleave(16, 0)[:50].repeat_interleave(32, 1)[:, :70]
    apart = (plain((made, factors), form, torch.float32) - weight).abs()
    assert bool((apart <= torch.maximum(weight.abs() / 16, spread * 2.0**-10) * (1 + 1e-6)).all())
    again, same = quantized(plain((made, factors), form, torch.float32), form)
    assert torch.equal(again.view(torch.uint8), made.view(torch.uint8))
    assert torch.equal(same, factors) if powers else torch.allclose(same, factors, rtol=1e-6)


def test_blocks_of_zeros_and_of_one_size() -> None:
    made, factors = quantized(torch.zeros(5, 7), QuantizedFormat(4, 4))
    assert not plain((made, factors), QuantizedFormat(4, 4)).any() and bool((factors > 0).all())
    made, factors = quantized(torch.full((4, 4), -3.5), QuantizedFormat(4, 4))
    assert bool((made.float() == -448).all()) and math.isclose(float(factors), 3.5 / 448, rel_tol=1e-6)


@pytest.mark.parametrize("size", [32, 128])
def test_integers_are_those_of_compressed_tensors(size: int) -> None:
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=size, symmetric=True)
    for weight in (matrix((48, 256)), torch.zeros(2, 256), torch.full((1, 256), -3.5), matrix((3, 128), torch.bfloat16)):
        form = in_groups(size)
        words, scales = quantized(weight, form)
        given = {"scale": scales.float(), "zero_point": None, "args": arguments}
        assert torch.equal(words, pack_to_int32(quantize(x=weight.float(), **given, dtype=torch.int8), 4))
        unpacked = unpack_from_int32(words, 4, weight.shape)
        back = plain((words, scales), form, torch.float32)
        assert torch.equal(back, dequantize(x_q=unpacked, scale=scales.float(), args=arguments, dtype=torch.float32))
        assert [(str(part.dtype)[6:], tuple(part.shape)) for part in (words, scales)] == form.parts(weight.shape)
        assert form.shape(words.shape) == weight.shape
        step = scales.float().repeat_interleave(size, 1)
        assert bool(((back - weight.float()).abs() <= step * (0.5 + 7 * 2**-8)).all()), "scales are rounded to bfloat16"
        again = quantized(back, form)
        assert torch.equal(again[0], words) and torch.equal(again[1], scales)


@pytest.mark.parametrize("size", [32, 128])
def test_awqs_layout_is_read_by_sglang_as_here(size: int) -> None:
    read = sglangs("kernels/ops/quantization/awq_triton.py", "awq_dequantize_decomposition")["awq_dequantize_decomposition"]
    for weight in (matrix((48, 256)), torch.zeros(8, 256), torch.rand(8, 128) + 3):
        form = in_groups(size, awq=True, scales="float16")
        parts = quantized(weight, form)
        assert [(str(part.dtype)[6:], tuple(part.shape)) for part in parts] == form.parts(weight.shape)
        back = plain(parts, form, torch.float16)
        words, zeros, scales = parts
        assert torch.equal(back.t(), read(words, scales, zeros)) and form.shape(words.shape) == weight.shape
        step = scales.t().float().repeat_interleave(size, 1)
        assert bool(((back.float() - weight).abs() <= step * 1.01).all())


KIMI = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
                "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized", "quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def kimis(**weights: Any) -> dict[str, Any]:
    group = KIMI["config_groups"]["group_0"]  # type: ignore[index]
    return KIMI | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def test_entries_of_groups_are_known() -> None:
    assert format_of(Path("c"), KIMI) == in_groups(32) and format_of(Path("c"), AWQ) == in_groups(128, awq=True)
    for form in (in_groups(32), in_groups(128), in_groups(128, awq=True), QuantizedFormat(0, 0), QuantizedFormat(64, 32, True)):
        assert format_of(Path("c"), form.entry(["lm_head"])) == form


@pytest.mark.parametrize("form", [QuantizedFormat(), QuantizedFormat(8, 8, True), QuantizedFormat(0, 0), in_groups(), in_groups(awq=True)])
def test_matrices_together_are_as_one_after_the_other(form: QuantizedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "TOGETHER", 1 << 13)  # two of the first shape
    torch.manual_seed(0)
    shapes = [(64, 64)] * 3 + [(200, 96)] * 2 + [(8, 32)]
    matrices = [torch.randn(shape).to((torch.bfloat16, torch.float32)[index % 2]) for index, shape in enumerate(shapes)]
    matrices[0][0] = 0.0
    matrices.append(torch.randn(64, 128)[:, ::2])  # a view whose columns are apart
    for matrix, made in zip(matrices, quantizer.all_quantized(matrices, form), strict=True):
        for one, other in zip(made, quantized(matrix.clone(), form), strict=True):
            assert (
                one.shape == other.shape
                and one.dtype == other.dtype
                and torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (one, other)))
            )
    assert quantizer.all_quantized([], form) == []


def test_a_checkpoint_in_groups_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "whole", hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    layers = sum(tensor.numel() for name, tensor in whole.items() if ".layers." in name)
    for to, options in (("int4", []), ("int4", ["--layout", "awq"]), ("int4", ["--experts-only"]), ("fp8-tensor", [])):
        made = quantized_checkpoint(tmp_path / "whole", tmp_path / "-".join([to, *options]), to, *options)
        found, reader = quantization_of(made), reader_of(made)
        assert found is not None and reader.names() == whole.keys()
        assert all(".experts." in name for name in found.names) == bool(options[:1] == ["--experts-only"])
        apart = {name: float((reader.read(name) - tensor).abs().max() / tensor.abs().max()) for name, tensor in whole.items()}
        assert {name for name, distance in apart.items() if distance} == found.names and max(apart.values()) < 0.1
        assert tuple(reader.shape(min(found.names))) == whole[min(found.names)].shape
        whole_bytes = 4 * (1 - sum(whole[name].numel() for name in found.names) / layers)
        assert engine_bytes(made) == pytest.approx(whole_bytes + (2 * 0.5625 if to == "int4" else 1) * (1 - whole_bytes / 4), rel=0.03)
        assert quantization_of(made) is found, "headers are read once"
    assert engine_bytes(tmp_path / "whole") is None
    for options, says in (
        (["int4", "--group-size", "128"], "columns that groups of 128 divide"),
        (["int4", "--block", "8", "8"], "--block = '[8, 8]': not given; --to int4"),
        (["fp8-block", "--layout", "awq"], "--layout = 'awq': not given; --to fp8-block"),
    ):
        assert convert(tmp_path / "whole", tmp_path / "none", "--to", *options) != 0
        assert says in " ".join(capsys.readouterr().err.split())


ENTRY = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
OTHERS: list[Any] = [
    *({"quant_method": method} for method in ("awq", "gptq", "mxfp4", "fp8", "mxfp8", "compressed-tensors", None)),
    *(ENTRY | {"weight_block_size": size} for size in ([8], [8, 0], [8, -1], [8, 8.0], ["8", "8"], None, 8, [8, 8, 8])),
    *(ENTRY | other for other in ({"fmt": "e5m2"}, {"activation_scheme": "static"}, {"scale_fmt": "e8m0"}, {"fmt": None})),
    *([], "fp8", 8, {}),
    *(kimis(**other) for other in ({"group_size": 64}, {"num_bits": 8}, {"symmetric": False}, {"actorder": "group"}, {"type": "float"})),
    *(KIMI | other for other in ({"format": "nvfp4-pack-quantized"}, {"config_groups": {}}, {"config_groups": {"a": None}})),
    *(AWQ | other for other in ({"group_size": 64}, {"bits": 8}, {"version": "gemv"})),
]


@table("entry", OTHERS)
def test_another_format_is_named(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"config.json:quantization_config = .*: 8-bit floats in blocks"):
        format_of(Path("config.json"), entry)


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eight")
    make_checkpoint("qwen3_moe", directory / "whole")
    return to_8_bits(directory / "whole", directory / "made", 8)


def test_a_checkpoint_tells_what_is_quantized(eight_bits: Path) -> None:
    found, whole = quantization_of(eight_bits), load_file(eight_bits.parent / "whole" / "model.safetensors")
    assert found is not None and found.format == QuantizedFormat(8, 8) and quantization_of(eight_bits.parent / "whole") is None
    assert {name.split(".")[-2] for name in found.names} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    made = load_file(eight_bits / "model.safetensors")
    assert made.keys() == whole.keys() | {f"{name}_scale_inv" for name in found.names}
    for name, tensor in whole.items():
        apart = plain((made[name], made[f"{name}_scale_inv"]), found.format, torch.float32) if name in found.names else made[name]
        assert torch.allclose(apart, tensor, rtol=1 / 16, atol=1e-2) and (name in found.names or torch.equal(apart, tensor))
    kept = json.loads((eight_bits / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in kept and "model.layers.0.mlp.gate" in kept


NAME = "model.layers.0.self_attn.o_proj.weight"


@table(
    ("change", "says"),
    [
        (lambda held: held.pop(f"{NAME}_scale_inv"), rf"{NAME}_scale_inv = 'absent \[\]': float32 \[4, 8\]"),
        (lambda held: held.update({f"{NAME}_scale_inv": torch.ones(2, 4)}), r"float32 \[2, 4\]': float32 \[4, 8\]"),
        (lambda held: held.update({f"{NAME}_scale_inv": torch.ones(4, 4, dtype=torch.uint8)}), r"uint8 \[4, 4\]': float32"),
        (lambda held: held.pop(NAME), rf"{NAME} = 'absent \[\]': a matrix in blocks of 8-bit floats"),
        (lambda held: held.update({NAME: held[NAME].float()}), rf"{NAME} = 'float32 .*: a matrix in blocks of 8-bit floats"),
    ],
)
def test_factors_that_do_not_fit(change: Any, says: str, eight_bits: Path, tmp_path: Path) -> None:
    held = load_file(eight_bits / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((eight_bits / "config.json").read_text())
    with pytest.raises(ConfigError, match=says):
        quantization_of(tmp_path)


def test_what_cannot_be_converted(eight_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = eight_bits.parent / "whole"
    broken = {"model.layers.0.self_attn.q_proj.weight": torch.full((4, 4), math.inf)}
    save_file(broken, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for source, options, says in (
        (eight_bits, [], "no such entry: a checkpoint of plain numbers"),
        (tmp_path, [], "finite numbers of 16 or 32 bits"),
        (whole, ["--block", "8", "0"], "--block = [8, 0]: two numbers from 1 up"),
        (whole, ["--dtype", "float32"], "--dtype = 'float32': not given"),
    ):
        assert convert(source, tmp_path / "made", "--to", "fp8-block", *options) != 0
        assert says in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "made").exists()
    assert convert(whole, tmp_path / "made", "--block", "8", "8") != 0
    assert "--block = '[8, 8]': not given" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("options", [(), ("--to", "fp8-block", "--block", "8", "8")])
def test_files_that_are_not_one_whole_model(
    options: tuple[str, ...], eight_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a checkpoint became half of a checkpoint, and of a tensor in two files the last one was taken."""
    for name, removed, says in (
        ("model-00001-of-00002.safetensors", True, "all files model-…-of-00002.safetensors; 1 are there"),
        ("old.safetensors", False, "each tensor in one file; model.safetensors has"),
    ):
        source = shutil.copytree(eight_bits.parent / "whole", tmp_path / name)
        shutil.copyfile(source / "model.safetensors", source / name)
        if removed:
            (source / "model.safetensors").unlink()
        assert convert(source, tmp_path / "made", *options) != 0
        assert says in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "made").exists()


def test_engines_divide_whole_blocks() -> None:
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in (
        ("self_attn.q_proj", (512, 300)), ("self_attn.k_proj", (256, 300)), ("self_attn.o_proj", (300, 512)),
        ("mlp.experts.3.up_proj", (128, 300)), ("mlp.experts.3.down_proj", (300, 128)),
    )}  # fmt: skip
    form = QuantizedFormat()
    assert list(split_problems(form, shapes, 1, 1, 1)) == list(split_problems(form, shapes, 4, 2, 1)) == []
    problems = list(split_problems(form, shapes, 8, 4, 2))
    assert len(problems) == 5 and "o_proj.weight has 512 columns, which 8 ranks of an engine cannot" in problems[2]
