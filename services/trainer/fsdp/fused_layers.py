"""Fewer kernels for transformers' layers: RMS norms, gated activations and rotations in one each, or whole layers by `torch.compile`.

What a module does is compared with its replacement on the CPU before it is replaced: families' norms differ (Gemma's multiply by one more
than their weight), and such are left as they are.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.parallel import DEVICE_TYPE
from shared.runtime.errors import ConfigError


def fuse(model: torch.nn.Module) -> list[str]:
    """Replaces norms and activations of layers before they are sharded. Returns the names of the modules that were."""
    known: dict[Any, bool] = {}
    fused = []
    for name, module in model.named_modules():
        for fits, forward in ((_is_norm, _rms_norm), (_is_gated, _gated_mlp)):
            if fits(module):
                kind = (type(module), getattr(module, "variance_epsilon", None), getattr(module, "eps", None))
                if kind not in known:
                    known[kind] = _same(module, forward)
                if known[kind]:
                    module.forward = MethodType(forward, module)
                    fused.append(name)
        functions = vars(sys.modules[type(module).__module__])
        if isinstance(rotation := functions.get("apply_rotary_pos_emb"), FunctionType):
            functions["apply_rotary_pos_emb"] = partial(_rotated, rotation)
    return fused


def compile_layers(layers: list[torch.nn.Module]) -> None:
    """Has each layer's computation compiled when it first runs; FSDP2's hooks around it, and attention in it, stay as they are."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def compute_in_float8(layers: list[torch.nn.Module], recipe: str) -> None:
    """Has the linear maps of layers, but for routers, compute in 8-bit floats, as torchao does; on a CPU by rounding to them. Their weights
    stay as they are.

    Raises ConfigError: torchao is not installed, or a layer has no linear map of whole groups of 16.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("trainer.fsdp_float8", recipe, f"none: torchao is not installed, which has it ({error})") from None
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=DEVICE_TYPE == "cpu", pad_inner_dim=True)

    def fits(module: torch.nn.Module, name: str) -> bool:
        router = name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate")
        return isinstance(module, torch.nn.Linear) and not router and not (module.in_features % 16 or module.out_features % 16)

    for layer in layers:
        if not any(fits(module, name) for name, module in layer.named_modules()):
            wanted = f"none: {type(layer).__name__} has no linear map whose rows and columns 16 divides"
            raise ConfigError("trainer.fsdp_float8", recipe, wanted)
        convert_to_float8_training(layer, module_filter_fn=fits, config=config)


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1 and len(list(module.parameters())) == 1


def _is_gated(module: Any) -> bool:
    layers = {name for name, child in module.named_children() if isinstance(child, torch.nn.Linear)}
    return layers == {"gate_proj", "up_proj", "down_proj"}


@torch.no_grad()
def _same(module: torch.nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> bool:
    """Returns whether a module of this kind computes what ``forward`` does, at random weights; its own hold nothing yet."""
    sample: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for parameter in sample.parameters():
        parameter.normal_(generator=generator)
    width = sample.weight.numel() if hasattr(sample, "weight") else sample.gate_proj.in_features
    given = torch.randn(3, width, generator=generator)
    try:
        return torch.allclose(sample(given), forward(sample, given), rtol=1e-4, atol=1e-4)
    except (RuntimeError, TypeError, AttributeError):  # it takes more than its input
        return False


def _rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    eps = getattr(module, "variance_epsilon", None)
    return F.rms_norm(hidden_states, module.weight.shape, module.weight, module.eps if eps is None else eps)


def _rotated(plain: Callable[..., Any], q: Tensor, *more: Any, **options: Any) -> Any:
    """Computes a family's rotation of queries and keys by their places; one kernel on a GPU."""
    return _kernel(plain, q)(q, *more, **options)


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    output: Tensor = module.down_proj(_kernel(_gated, x)(module.gate_proj(x), module.up_proj(x)))
    return output


def weighted_gate(wide: Tensor, weights: Tensor) -> Tensor:
    """Returns SiLU of the first half of each of [rows, 2 * width], times the second half and the row's weight, [rows, 1]."""
    return _kernel(_weighted, wide)(*wide.chunk(2, -1), weights)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _weighted(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    return (F.silu(gate) * up * weights).to(gate.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def _kernel(function: Callable[..., Tensor], given: Tensor) -> Callable[..., Tensor]:
    """Returns a function as one kernel on a GPU; itself elsewhere, and in a layer that is compiled as a whole."""
    return _compiled(function) if given.is_cuda and not torch.compiler.is_compiling() else function
