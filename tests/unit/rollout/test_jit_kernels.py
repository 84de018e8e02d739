"""An engine's kernels are told by its model and its flags, as SGLang's own code chooses them."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from services.rollout.engine.early_processes import engine_flags
from services.rollout.engine.kernel_builds import TVM_FFI_CACHE, Argument, JitKernel, jit_kernels
from tests.support.tables import table

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
"""Of Qwen3-0.6B."""
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "torch_dtype": "bfloat16"}
DENSE = ["norm", "clamp_position", "activation", "fused_rope", "qknorm", "kvcache"]


def arguments_of(config: dict[str, Any], *flags: str) -> dict[str, tuple[Argument, ...]]:
    """Kernel → the arguments of SGLang 0.5.16's function, or of the only one."""
    return {kernel.name: kernel.ways[-1][1] for kernel in jit_kernels(config, flags)}


def test_a_dense_model_has_its_sizes_in_its_kernels() -> None:
    found = arguments_of(QWEN3, "--sampling-backend", "pytorch")
    assert list(found) == DENSE
    assert found["qknorm"] == (128, "torch.bfloat16")
    assert found["fused_rope"] == (True, 128, "torch.bfloat16")
    assert found["kvcache"] == (8 * 128 * 2,)
    assert found["clamp_position"] == ("torch.int64",)


def test_sampling_is_flashinfers_where_no_flag_says_otherwise() -> None:
    assert list(arguments_of(QWEN3)) == [*DENSE, "sampling"]


def test_4_bit_weights_are_multiplied_by_kernels_that_are_compiled_first() -> None:
    model = {**QWEN3, "num_experts": 8, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert list(arguments_of(model))[:3] == ["gptq_marlin", "moe_wna16_marlin", "gptq_marlin_repack"]
    assert arguments_of(model)["gptq_marlin"] == ("torch.bfloat16",)
    assert list(arguments_of({**QWEN3, "quantization_config": {"quant_method": "awq"}}))[:2] == ["gptq_marlin", "awq_marlin_repack"]


def test_a_model_without_norms_of_queries_and_keys_has_no_kernel_of_them() -> None:
    found = arguments_of(SMOLLM2, "--sampling-backend", "pytorch")
    assert "qknorm" not in found
    assert found["fused_rope"] == (True, 64, "torch.bfloat16") and found["kvcache"] == (3 * 64 * 2,)


@table(
    ("flags", "row"),
    [
        (["--tp-size", "4"], 2 * 128 * 2),
        (["--tensor-parallel-size=16"], 128 * 2),
        (["--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"], 8 * 128 * 2),
        (["--kv-cache-dtype", "fp8_e4m3"], 8 * 128),
        (["--dtype", "float"], 8 * 128 * 4),
    ],
)
def test_the_rows_of_the_cache_are_those_of_one_rank(flags: list[str], row: int) -> None:
    found = {kernel.name: kernel.ways for kernel in jit_kernels(QWEN3, flags)}
    assert [arguments for _, arguments in found["kvcache"]] == [(row, row), (row,)]


def test_ranks_of_one_node_sum_by_kernels_of_their_own() -> None:
    found = arguments_of(QWEN3, "--tp-size", "2")
    assert found["custom_all_reduce"] == ("torch.bfloat16", 2) and found["communicator"] == found["ipc_manager"] == ()
    assert "custom_all_reduce" not in arguments_of(QWEN3) | arguments_of(QWEN3, "--tp-size", "2", "--nnodes", "2")


def test_a_checkpoint_in_float32_is_computed_in_float16() -> None:
    assert arguments_of(QWEN3 | {"torch_dtype": "float32"})["activation"] == ("torch.float16",)
    assert arguments_of(QWEN3 | {"torch_dtype": "float32"}, "--dtype", "half")["activation"] == ("torch.float16",)
    assert "norm" not in arguments_of(QWEN3, "--dtype", "float32"), "FlashInfer's are of half precision"


def test_heads_of_unusual_sizes_and_parts_of_heads_are_rotated_otherwise() -> None:
    assert arguments_of(QWEN3 | {"head_dim": 80})["rotary_embedding"] == ()
    assert arguments_of(QWEN3 | {"rope_parameters": {"partial_rotary_factor": 0.5}})["fused_rope"][1] == 64


def test_text_is_part_of_larger_models_and_latent_attention_has_other_kernels() -> None:
    assert arguments_of({"model_type": "qwen3_vl", "text_config": QWEN3})["kvcache"] == (2048,)
    assert list(arguments_of(QWEN3 | {"kv_lora_rank": 512}, "--sampling-backend", "pytorch")) == DENSE[:3]


def test_of_an_unknown_model_only_what_all_models_have_is_built() -> None:
    assert list(arguments_of({})) == ["norm", "clamp_position", "sampling"]


def test_flags_have_their_first_value() -> None:
    assert engine_flags(["--port", "1", "--bare", "--many", "2", "3", "--with_line=x"]) == {
        "port": "1",
        "bare": "",
        "many": "2",
        "with-line": "x",
    }


@table("kernel", [k for k in jit_kernels(QWEN3, ["--tp", "2"]) + jit_kernels(QWEN3 | {"head_dim": 80}, []) if k.cache == TVM_FFI_CACHE])
def test_the_installed_release_has_the_function(kernel: JitKernel) -> None:
    """It is read, not imported: that takes seconds and a GPU."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    places = [
        (root.parent / f"{name.partition(':')[0].replace('.', '/')}.py", name.partition(":")[2], len(given)) for name, given in kernel.ways
    ]
    file, function, count = next(place for place in places if place[0].is_file())
    (found,) = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef) and one.name == function]
    assert len(found.args.args) == count
