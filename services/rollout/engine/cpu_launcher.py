"""Starts SGLang's own HTTP server on a CPU, from PyPI's wheels alone.

    PYTHONPATH=ENGINE_SITE python cpu_launcher.py --model-path MODEL --device cpu ...    (sglang.launch_server's flags)

SGLang serves models with torch's native attention on a CPU, but imports packages that exist on PyPI as CUDA builds only. This file puts
stand-ins before the first import of ``sglang``, inside the engine's processes alone; nothing in site-packages is changed:

* ``torchvision``: its wheel's C++ operators load beside PyPI's torch, which is a build for CUDA, and do not beside a CPU build; there it is
  enough to declare them. It lies in a directory of its own on the engine's PYTHONPATH: a trainer's transformers would import it and fail.
* ``sgl_kernel``: some modules import names from it; no kernel is called on a CPU without AMX. Each name raises when called.
* ``triton``: an inert module, also where the wheel is installed: it compiles nothing here, a real one would look for a GPU's driver, and
  each process of the engine is 90 MB smaller without it.
* ``megatron``: hidden. SGLang's debug dumper imports it where it is installed, 0.8 s for nothing.

Its stores listen on loopback alone (`shared.transfer.channel_store`), as with `gpu_launcher`.

Children are forked, where SGLang asks for spawn: they need not import everything again, which halves both the time to start and the memory.
That is safe here and only here: no CUDA, and before the fork the parent has run no parallel region of torch's. A child that is spawned all
the same imports this file again, as ``__mp_main__``, and so gets the stand-ins as well.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read while sglang is imported
os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")  # of linear attention's states, or they are rounded (`attend_linearly`)
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # some routers are compiled functions: there is no compiler for them here

from shared.runtime import quick_imports

with quick_imports():
    import torch
    import torch.nn.functional as F

    from services.rollout.engine import cpu_speculation, quantized_layers, sglang_changes
    from services.rollout.engine.murmur_hash import murmur_hash32
    from services.rollout.engine.private_endpoints import close_sockets, leave_out_own_requests, serve_on_socket
    from shared.transfer import batch_invariant
    from shared.transfer.channel_store import bind_stores


class InertClass(Exception):
    """The class behind every capitalised name of an inert module; it can be constructed, subclassed, subscripted or named in ``except``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments)
        vars(self).update(options)

    def __class_getitem__(cls, _item: Any) -> "type[InertClass]":
        return cls


class InertModule(types.ModuleType):
    """A module of which every attribute exists: capitalised names are inert classes, the others inert modules. Called, as ``@triton.jit``
    or ``@triton.autotune(...)`` are, it is a decorator that changes nothing: kernels can be defined, none can be launched."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (InertClass,), {"__module__": self.__name__}) if name[0].isupper() else None
        value = value or importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one package and everything below it as ``InertModule``."""

    def __init__(self, package: str, attributes: dict[str, dict[str, Any]]) -> None:
        """Takes, in ``attributes`` by module name, the few values that must be real."""
        self.package, self.attributes = package, attributes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self.package or fullname.startswith(self.package + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.attributes.get(module.__name__, {}))


def load_torchvision_operators() -> torch.library.Library | None:
    """Loads torchvision's C++ operators as its own import will, or declares the two that its Python part registers fake kernels for.

    Only loading the extension shows whether it loads: it needs the libraries of the torch that it was built with. It cannot be left to
    torchvision's import, since an operator that is declared here and registered there ends the process. Returns the library that declares
    the operators, which must be kept alive; None where the extension has registered its own."""
    package = importlib.util.find_spec("torchvision")
    extension = package and importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    if extension and extension.origin:
        try:
            torch.ops.load_library(extension.origin)
            return None
        except OSError:  # "libtorch_cuda.so: cannot open shared object file", or a symbol that this torch has not
            pass
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


def stand_in_for_sgl_kernel() -> None:
    """Installs a ``sgl_kernel`` module whose CPU kernels can be imported and refuse to run."""
    module = types.ModuleType("sgl_kernel")

    def kernel(name: str) -> Callable[..., None]:
        if not name.endswith("_cpu"):  # the CUDA names stay missing: SGLang tests for them
            raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

        def refuse(*_arguments: Any, **_options: Any) -> None:
            raise NotImplementedError(f"sgl_kernel.{name}: PyPI has no CPU build of sgl_kernel; this model needs one")

        return refuse

    module.__getattr__ = kernel  # type: ignore[method-assign]
    vars(module).update(cpu_speculation.KERNELS)
    sys.modules["sgl_kernel"] = module
    cpu_speculation.stand_in_for_trees()


def stand_in_for_triton() -> None:
    """Installs an inert ``triton`` module, before an installed package is found."""
    attributes: dict[str, dict[str, Any]] = {
        "triton": {"__version__": "3.0.0", "cdiv": lambda a, b: -(a // -b), "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length()},
        "triton.language": {"constexpr": type("constexpr", (InertClass,), {})},
    }
    sys.meta_path.insert(0, InertFinder("triton", attributes))


def absorb_latent_attention(model_path: str) -> None:
    """Makes models with latent attention (DeepSeek-V3) prefill as they decode, in the low rank.

    Torch's native attention reads keys and values from the cache, which holds low-rank vectors. SGLang would project a prompt's keys and
    values first, for backends that take them directly; it has no other path besides its GPU kernels."""
    config = Path(model_path, "config.json")
    if not config.is_file() or "kv_lora_rank" not in json.loads(config.read_text()):
        return  # the import costs a second
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    from sglang.srt.models import deepseek_v2

    scaled = deepseek_v2.get_rope_wrapper

    def rope(*sizes: Any, rope_scaling: Any = None, device: Any = None, **more: Any) -> Any:
        # the embedding for CPUs is YaRN's; for another device SGLang takes the plain one, which needs none
        return scaled(*sizes, rope_scaling=rope_scaling, device=device if rope_scaling else "cuda", **more)

    deepseek_v2.get_rope_wrapper = rope


def norm_heads_jointly(model_path: str) -> None:
    """Gives MiniMax-M2 its norms over all heads of queries and of keys in plain torch; SGLang has kernels for GPUs and AMX only."""
    config = Path(model_path, "config.json")
    if not config.is_file() or json.loads(config.read_text()).get("model_type") != "minimax_m2":
        return
    from sglang.srt.models import minimax_m2

    def squares(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat([states.float().square().sum(-1) for states in (queries, keys)])

    def normed(states: torch.Tensor, weight: torch.Tensor, summed: torch.Tensor, tp_world: int, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(summed[:, None] / (states.shape[1] * tp_world) + eps)
        return (states.float() * scale * weight.float()).to(states.dtype)

    def apply(queries: torch.Tensor, keys: torch.Tensor, q: torch.Tensor, k: torch.Tensor, summed: torch.Tensor, *scale: Any) -> Any:
        return normed(queries, q, summed[: len(queries)], *scale), normed(keys, k, summed[len(queries) :], *scale)

    minimax_m2.rms_sumsq_serial, minimax_m2.rms_apply_serial = squares, apply


def attend_with_sinks(model_path: str) -> bool:
    """Gives gpt-oss to torch's native attention, which SGLang refuses for it: it applies windows, and sinks here. Returns whether this
    is such a model; its cache then has one part, for layers with windows and without."""
    config = Path(model_path, "config.json")
    if not config.is_file() or json.loads(config.read_text()).get("model_type") != "gpt_oss":
        return False
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention import torch_native_backend

    model_hook.attention_backends_of = lambda _: ("triton", "triton")  # what it compares with those that it knows
    backend, plain = torch_native_backend.TorchNativeAttnBackend, torch_native_backend.scaled_dot_product_attention
    now: list[torch.Tensor | None] = [None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> Any:
        if (sinks := now[0]) is None:
            return plain(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is None:  # decoding sees all
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
            attn_mask = attn_mask.tril() if options.pop("is_causal") else attn_mask
        options["is_causal"] = False
        mask = torch.zeros(1, query.shape[1], *attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        mask = torch.cat([mask, sinks.to(query.dtype)[:, None, None].expand(*mask.shape[:-1], 1)], -1)
        key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        return plain(query, key, value, attn_mask=mask, **options)

    def with_sinks(forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, sinks: torch.Tensor | None = None, **options: Any) -> Any:
            now[0] = sinks
            try:
                return forward(*arguments, **options)
            finally:
                now[0] = None

        return called

    torch_native_backend.scaled_dot_product_attention = attend
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, with_sinks(getattr(backend, name)))
    return True


class LinearAttentionKernels:
    """Gated delta net in plain torch, for SGLang's kernels of it; states lie in a pool, by requests' slots.

    The rule itself is transformers'. The names are those of SGLang's arguments: ``q``, ``k`` [1, T, key heads, width], ``v`` [1, T, value
    heads, width], ``a``, ``b`` [T, value heads]; ``x`` [channels, T], or [requests, channels] of one token each.
    """

    def __init__(self) -> None:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        self._rule, self._step = (partial(rule, **options) for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule))

    def convolve(self, x: Any, weight: Any, bias: Any, *, conv_states: Any, has_initial_state: Any, cache_indices: Any,
                 query_start_loc: Any, **_: Any) -> Any:  # fmt: skip
        pieces, lengths = [], query_start_loc.diff().tolist()
        for part, slot, begun in zip(x.split(lengths, 1), cache_indices.tolist(), has_initial_state.tolist(), strict=True):
            before = conv_states[slot].to(x.dtype) if begun else torch.zeros_like(conv_states[slot], dtype=x.dtype)
            whole = torch.cat([before, part], 1)
            conv_states[slot] = whole[:, -before.shape[1] :].to(conv_states.dtype)
            pieces.append(F.silu(F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]))
        return torch.cat(pieces, 1)

    def convolve_token(self, x: Any, states: Any, weight: Any, bias: Any, activation: str, *, conv_state_indices: Any, **_: Any) -> Any:
        whole = torch.cat([states[conv_state_indices].to(x.dtype), x[..., None]], 2)
        states[conv_state_indices] = whole[..., 1:].to(states.dtype)
        return F.silu(F.conv1d(whole, weight[:, None], bias, groups=len(weight))[..., 0])

    def gates(self, A_log: Any, a: Any, b: Any, dt_bias: Any) -> Any:
        return (-A_log.float().exp() * F.softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]

    def chunks(self, q: Any, k: Any, v: Any, g: Any, beta: Any, *, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any,
               **_: Any) -> Any:  # fmt: skip
        lengths = cu_seqlens.diff().tolist()
        of_sequences = zip(*[tensor.split(lengths, 1) for tensor in (*self._widened(q, k, v), g, beta)], strict=True)
        outputs = []
        for slot, given in zip(initial_state_indices.tolist(), of_sequences, strict=True):
            output, state = self._rule(*given, initial_state=initial_state[slot, None].mT)
            initial_state[slot] = state[0].mT
            outputs.append(output)
        return torch.cat(outputs, 1), None, None

    def token(self, *, A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, initial_state_source: Any,
              initial_state_indices: Any, disable_state_update: bool = False, **_: Any) -> Any:  # fmt: skip
        assert not disable_state_update
        given = (tensor.transpose(0, 1) for tensor in (*self._widened(q, k, v), *self.gates(A_log, a, b, dt_bias)))
        state = initial_state_source[initial_state_indices].mT
        output, state = self._step(*given, initial_state=state)
        initial_state_source[initial_state_indices] = state.mT
        return output.transpose(0, 1)

    def norm_heads(self, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, width: int) -> Any:
        heads = ((q.reshape(-1, width), q_weight), (k.reshape(-1, width), k_weight))
        return tuple(F.rms_norm(each.float(), (width,), 1 + weight.float(), eps).to(each.dtype) for each, weight in heads)

    def norm_gated_heads(self, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, width: int, heads: int) -> Any:
        queries, gate = q.reshape(-1, heads, 2 * width).chunk(2, -1)
        return *self.norm_heads(queries, k, q_weight, k_weight, eps, width), gate.contiguous()

    def divide(self, qkvz: Any, ba: Any, key_heads: int, heads: int, key_width: int, width: int) -> Any:
        qkv, z = qkvz.split([2 * key_heads * key_width + heads * width, heads * width], -1)
        b, a = ba.split(heads, -1)
        return qkv.contiguous(), z.reshape(-1, heads, width), b.contiguous(), a.contiguous()

    def _widened(self, q: Any, k: Any, v: Any) -> Any:
        times = v.shape[2] // q.shape[2]
        return q.repeat_interleave(times, 2), k.repeat_interleave(times, 2), v


def attend_linearly(model_path: str) -> None:
    """Gives models with linear attention (Qwen3-Next, Qwen3.5) kernels in plain torch; SGLang has some for GPUs and AMX only.

    Must come before the first import of a model. The convolution's state has the precision of the model's activations: SGLang keeps it in
    bfloat16 otherwise, by which a float32 engine's log-probs are off by up to 0.2."""
    config = Path(model_path, "config.json")
    entries = json.loads(config.read_text()) if config.is_file() else {}
    seeing = "vision_config" in entries  # the module that reads pictures for Qwen's models imports those with linear attention
    if not seeing and "linear_num_key_heads" not in {**entries, **entries.get("text_config", {})}:
        return
    kernels, names = LinearAttentionKernels(), types.ModuleType("sgl_kernel.mamba")
    operators: Any = torch.ops.sgl_kernel
    vars(names).update(
        causal_conv1d_fn_cpu=kernels.convolve, causal_conv1d_update_cpu=kernels.convolve_token, chunk_gated_delta_rule_cpu=kernels.chunks
    )
    sys.modules["sgl_kernel.mamba"] = names
    operators.fused_sigmoid_mul_cpu = lambda x, gate: x.mul_(torch.sigmoid(gate.reshape(x.shape)))
    operators.fused_qk_gemma_rmsnorm_cpu = kernels.norm_heads
    operators.fused_qk_gemma_rmsnorm_with_gate_cpu = kernels.norm_gated_heads
    operators.fused_qkvzba_split_reshape_cat_contiguous_cpu = kernels.divide
    operators.fused_gdn_gating_cpu, operators.fused_sigmoid_gating_delta_rule_update_cpu = kernels.gates, kernels.token
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.elementwise import elementwise

    def normed(self: Any, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(g.float()) if self.activation == "sigmoid" else F.silu(g.float())
        return (F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps) * gate).to(x.dtype)

    def weighted(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, output: torch.Tensor, *, do_add: bool) -> None:
        share = torch.sigmoid((hidden.float() @ gate.float())[:, None]) * shared.float()
        output.copy_(share + output if do_add else share)

    FusedRMSNormGated.forward = layernorm_gated.RMSNorm.forward = normed
    elementwise._launch_fused_gate_sigmoid_mul = weighted


def sample_by_seeds() -> torch.library.Library:
    """Lets torch's native attention sample by seeds (``--enable-deterministic-inference``), which SGLang has for GPUs and AMX only.

    It computes each sequence's attention by itself. The kernels that make a GPU's matrix products the same in every batch are left out: a
    product may differ in the last bit of a float32 then, by which a token changes once in millions of tokens. Returns the library that
    holds the hash of seed and position, which must be kept alive."""
    from sglang.srt import batch_invariant_ops, server_args

    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_arguments, **_options: None
    operators = torch.library.Library("sgl_kernel", "FRAGMENT")
    operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")

    def hashed(*given: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(murmur_hash32(*(tensor.to(torch.int64).numpy() for tensor in given)))

    operators.impl("murmur_hash32_cpu", hashed, "CPU")
    return operators


def keep_experts_unpinned() -> None:
    """Lets the engine keep the experts of each token (``--enable-return-routed-experts``) in plain memory; it would pin it for a GPU."""
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, *, dtype, device, **_: torch.empty(dims, dtype=dtype, device=device)


def pin_nothing() -> None:
    """Lets adapters (``--enable-lora``) be served from plain memory: SGLang pins what it copies to a GPU, and there is none."""
    for name in ("tensor", "zeros", "empty", "arange"):
        made = getattr(torch, name)
        setattr(torch, name, lambda *given, _made=made, pin_memory=False, **options: _made(*given, **options))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def pad_shared_attention() -> None:
    """Lets torch's native attention run with data-parallel attention: ranks pad their batches alike, by sequences of one token in the
    cache's spare place, whose length it does not tell."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def leave_out_far_experts() -> None:
    """Lets a CPU's experts be shared among ranks: to a rank the experts of others have the number -1, which torch's native layer takes for
    an index. Here they are experts of zeros, each of a token's choices another one, for a token has none twice."""
    from sglang.srt.layers.moe import fused_moe_native

    plain = fused_moe_native.moe_forward_native
    held = ("w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias")

    def with_zeros(layer: Any, hidden: torch.Tensor, chosen: Any, runner: Any) -> torch.Tensor:
        own, choices = layer.w13_weight.shape[0], chosen.topk_ids.shape[1]
        present = {name: tensor for name in held if (tensor := getattr(layer, name, None)) is not None}
        wider = {name: [*tensor, *torch.zeros_like(tensor[:1]).expand(choices, *tensor.shape[1:])] for name, tensor in present.items()}
        numbers = own + torch.arange(choices, dtype=chosen.topk_ids.dtype)
        ids = torch.where(chosen.topk_ids < 0, numbers, chosen.topk_ids)
        return plain(types.SimpleNamespace(num_experts=own + choices, **wider), hidden, chosen._replace(topk_ids=ids), runner)

    fused_moe_native.moe_forward_native = with_zeros


def fork_children() -> None:
    """Makes ``multiprocessing.set_start_method`` choose fork, whatever is requested, and keeps the parent's objects shared."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)
    os.register_at_fork(before=gc.freeze)  # or the children's collector would touch, and so copy, every page


batch_invariant.install()  # before SGLang takes its functions of torch's
torchvision_operators = load_torchvision_operators()
serve_on_socket()
bind_stores()
close_sockets()
stand_in_for_sgl_kernel()
stand_in_for_triton()
sys.modules["megatron"] = None  # type: ignore[assignment]  # `import megatron` raises ImportError

PATCHES: tuple[tuple[set[str], Callable[[], object]], ...] = (
    ({"--enable-deterministic-inference"}, sample_by_seeds),
    ({"--enable-return-routed-experts"}, keep_experts_unpinned),
    ({"--enable-lora"}, pin_nothing),
    ({"--enable-dp-attention"}, pad_shared_attention),
    ({"--ep-size", "--ep", "--expert-parallel-size"}, leave_out_far_experts),
    ({"--speculative-algo", "--speculative-algorithm"}, cpu_speculation.install),
)
"""What SGLang lacks on a CPU for flags of some names."""


def main() -> None:
    """Serves as the command line says, to the end."""
    fork_children()
    with quick_imports():
        from sglang.srt.configs import model_config

        # sparse attention has kernels for GPUs only; `shared.config.engine_limits` keeps contexts to those that attend to every key
        model_config.is_deepseek_dsa = lambda _: False
        from sglang.launch_server import run_server
        from sglang.srt.entrypoints import http_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    leave_out_own_requests(http_server)
    load_plugins()
    flags = {argument.partition("=")[0] for argument in sys.argv}
    kept = [patch() for names, patch in PATCHES if names & flags]  # noqa: F841 (one is a library of operators)
    arguments = prepare_server_args(sys.argv[1:])
    quantized_layers.install(arguments.model_path, on_cpu=True)
    for adapt in (attend_linearly, absorb_latent_attention, norm_heads_jointly, sglang_changes.read_media):
        adapt(arguments.model_path)
    if attend_with_sinks(arguments.model_path):
        arguments.disable_hybrid_swa_memory = True
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif "--tokenizer-worker-num" in sys.argv:  # servers beside one another are spawned all the same, and read prompts themselves
    sglang_changes.read_media(sys.argv[sys.argv.index("--model-path") + 1])
