"""Which kernels an engine compiles with nvcc while it starts, for a model and the engine's flags. Pure.

SGLang and FlashInfer come without binaries of some kernels, and compile each when it is first called: the norms, the rotary embedding,
the activation, what writes to the KV cache, the positions of a decode step, sums over the ranks of one node, and top-k and top-p sampling
where FlashInfer does it. Which ones, and for which sizes, follows from the checkpoint's config.json and from flags, as SGLang has
them (``srt/models``, ``srt/layers``, ``srt/mem_cache/memory_pool.py``). Where the list is wrong, an engine compiles what is missing,
as it always does; a kernel too many costs a few seconds of one core.

Left out: FlashInfer's kernels of attention, whose generated sources are written outside of its lock. Those of Triton and of
FlashAttention 3 are no matter of nvcc.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine.flag_values import DATA, NODES, TENSOR, engine_flags, flag_number

Argument = int | bool | str

TVM_FFI_CACHE, FLASHINFER_CACHE = "TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_OTHER_NAMES = {"half": "float16", "float": "float32"}
_FUSED_ROTARY, _FUSED_NORMS = (64, 128, 256, 512), (64, 128, 256, 512, 1024)
"""The sizes of a head for which there is a fused kernel of the rotary embedding, and of the norms of queries and keys."""


@dataclass(frozen=True)
class JitKernel:
    """One kernel that is compiled when a Python function asks for it.

    Args:
        name: for the log. cache: the variable that names the directory where it is kept.
        ways: ``module:function`` and its arguments in one release and another of its library; the first whose function exists is taken.
            An argument that begins with ``torch.`` is a data type.
        unless_false: ``module:attribute`` that is false where the library does without this kernel.
    """

    name: str
    cache: str
    ways: tuple[tuple[str, tuple[Argument, ...]], ...]
    unless_false: str = ""


def jit_kernels(config: Mapping[str, Any], arguments: Sequence[str]) -> list[JitKernel]:
    """Returns the kernels for a model, those that take longest first.

    Args:
        config: the checkpoint's config.json; empty where it is not known: what depends on it is left out.
        arguments: the engine's, as on its command line. Raises KeyError, ValueError or TypeError where sizes are
            missing or no numbers.
    """
    flags = engine_flags(arguments)
    found = []
    model = config.get("text_config") or config
    dtype = _dtype(flags.get("dtype") or "auto", model)
    if dtype != "float32":
        found.append(JitKernel("norm", FLASHINFER_CACHE, (("flashinfer.norm:get_norm_module", ()),), "flashinfer.norm:_USE_CUDA_NORM"))
    ranks = flag_number(flags, TENSOR)
    if ranks > 1 and flag_number(flags, NODES) == 1:
        found.append(_sglang("custom_all_reduce", "communication", "get_all_reduce_module", (f"torch.{dtype}", ranks), module="all_reduce"))
        found += [_sglang(name, "communication", f"_init_{name}", (), module="all_reduce") for name in ("communicator", "ipc_manager")]
    found.append(_sglang("clamp_position", "attention", "_jit_clamp_position_module", ("torch.int64",)))
    if model:
        element = f"torch.{dtype}"
        newer = ("sglang.kernels.ops.activation.activation:activation_module", (element,))
        older = ("sglang.jit_kernel.activation:_jit_activation_module", (element,))
        found.append(JitKernel("activation", TVM_FFI_CACHE, (newer, older)))
        if "kv_lora_rank" not in model:  # latent attention has kernels of its own
            found += _attention(model, flags, dtype)
    if flags.get("sampling-backend", "flashinfer") == "flashinfer":
        found.append(JitKernel("sampling", FLASHINFER_CACHE, (("flashinfer.sampling:get_sampling_module", ()),)))
    return found


def _attention(model: Mapping[str, Any], flags: Mapping[str, str], dtype: str) -> list[JitKernel]:
    """Returns what queries, keys and values go through before attention itself."""
    heads = int(model["num_attention_heads"])
    size = int(model.get("head_dim") or model["hidden_size"] // heads)
    element = f"torch.{dtype}"
    found: list[JitKernel] = []
    if size in _FUSED_ROTARY:
        width = int(size * _rotary_share(model))
        newer = ("sglang.kernels.ops.attention.rope:_jit_fused_rope_module", (True, width, element, element))
        older = ("sglang.jit_kernel.rope:_jit_fused_rope_module", (True, width, element))
        found.append(JitKernel("fused_rope", TVM_FFI_CACHE, (newer, older)))
    else:
        found.append(_sglang("rotary_embedding", "attention", "_jit_rotary_embedding_module", (), module="rope"))
    if size in _FUSED_NORMS and (str(model.get("model_type")).startswith("qwen3") or model.get("use_qk_norm")):
        found.append(_sglang("qknorm", "layernorm", "_jit_qknorm_module", (size, element), module="norm"))
    row = _kv_heads(model, flags, heads) * size * _BYTES.get(flags.get("kv-cache-dtype", "auto"), _BYTES[dtype])
    both = ("sglang.kernels.ops.kvcache.kvcache:_jit_kvcache_module", (row, row))  # of keys and of values
    one = ("sglang.jit_kernel.kvcache:_jit_kvcache_module", (row,))
    return [*found, JitKernel("kvcache", TVM_FFI_CACHE, (both, one))]


def _sglang(name: str, folder: str, function: str, arguments: tuple[Argument, ...], *, module: str = "") -> JitKernel:
    """Returns a kernel of SGLang's whose function takes the same arguments in the releases that have it here and there."""
    places = (f"sglang.kernels.ops.{folder}.{module or name}", f"sglang.jit_kernel.{module or name}")
    return JitKernel(name, TVM_FFI_CACHE, tuple((f"{place}:{function}", arguments) for place in places))


def _dtype(flag: str, model: Mapping[str, Any]) -> str:
    """Returns the data type in which an engine computes: its ``auto`` is the checkpoint's own, but float16 for float32."""
    if (chosen := _OTHER_NAMES.get(flag, flag)) != "auto":
        return chosen
    own = str(model.get("dtype") or model.get("torch_dtype") or ("float32" if model else "bfloat16")).removeprefix("torch.")
    return "float16" if own == "float32" else own


def _rotary_share(model: Mapping[str, Any]) -> float:
    """Returns the share of a head that is rotated."""
    further = model.get("rope_parameters") or {}
    return float(model.get("partial_rotary_factor") or further.get("partial_rotary_factor") or 1.0)


def _kv_heads(model: Mapping[str, Any], flags: Mapping[str, str], heads: int) -> int:
    """Returns the heads of keys that one rank has; it has one at least."""
    ranks = flag_number(flags, TENSOR)
    if "enable-dp-attention" in flags:
        ranks //= flag_number(flags, DATA)
    return max(1, int(model.get("num_key_value_heads") or heads) // max(1, ranks))
