"""Quantized layers that compute with copies of their weights, which stay in the engine as they were loaded: so pushes reach them.

SGLang's kernels for 4-bit integers on GPUs rearrange the weights. On a CPU without AMX it has no kernels for quantized weights: there
copies are of plain numbers. A GPU rounds activations to 8 bits as well where weights are 8-bit floats; a CPU does not here.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared.model.quantization import QuantizedFormat, entry_format
from shared.transfer.quantizer import plain

COPY = "_working_copy"  # the attribute of a layer that holds its copy, beside its parameters and modules
_held: list[tuple[Any, Any, Callable[[Any, Any], None]]] = []  # SGLang's method, its layer, and what rearranges the copy


def install(model_path: str, on_cpu: bool) -> None:
    """Has the layers of a quantized checkpoint compute with copies, where they need some. Must come before the first import of a model."""
    form = entry_format(Path(model_path))
    if on_cpu and form is not None:
        _compute_plainly(form)
    if on_cpu or form is None or form.bits == 8:
        return
    if form.endings[0] == "weight_packed":
        from sglang.srt.layers.quantization.compressed_tensors import schemes

        kinds = [schemes.CompressedTensorsWNA16, schemes.CompressedTensorsWNA16MoE]
        kinds += filter(None, [vars(schemes).get("CompressedTensorsWNA16TritonMoE")])  # not in all releases
    else:
        from sglang.srt.layers.quantization.awq import schemes

        kinds = [schemes.AWQMarlinLinearScheme, schemes.AWQLinearScheme]
    for kind in kinds:
        _compute_with_copies(kind, "apply_weights")


def refresh() -> None:
    """Makes the copies anew from what the layers have been given. They stay where they are: CUDA graphs know their addresses."""
    for method, layer, rearrange in _held:
        _refresh(method, layer, rearrange)


def keep_beside_weights(model: torch.nn.Module) -> None:
    """Makes buffers of what lies beside quantized weights and comes with no push: the scales of 8-bit keys and values, and what CUTLASS
    reads of experts. SGLang keeps a model's buffers alone while the weights' memory is released."""
    for module in model.modules():
        beside: dict[str, Any] = {name: module._parameters.pop(name) for name in ("k_scale", "v_scale") if name in module._parameters}
        if getattr(method := getattr(module, "quant_method", None), "_cutlass_buffers_ready", False):
            beside |= {f"cutlass_{name}": one for name, one in vars(method).items() if isinstance(one, torch.Tensor)}
        for name, tensor in beside.items():
            module.register_buffer(name, tensor, persistent=False)


def _compute_with_copies(kind: Any, apply: str, rearrange: Any = None, compute: Any = None) -> None:
    rearrange, compute = rearrange or kind.process_weights_after_loading, compute or getattr(kind, apply)

    def process(method: Any, layer: Any) -> None:
        if COPY in vars(layer):
            _refresh(method, layer, rearrange)
        else:
            vars(layer)[COPY] = _rearranged(method, layer, rearrange)
            _held.append((method, layer, rearrange))

    def applied(method: Any, layer: Any, *given: Any, **options: Any) -> Any:
        return compute(method, vars(layer)[COPY], *given, **options)

    kind.process_weights_after_loading = process
    setattr(kind, apply, applied)


@torch.no_grad()
def _refresh(method: Any, layer: Any, rearrange: Callable[[Any, Any], None]) -> None:
    own, held = dict(vars(method)), vars(layer)[COPY]  # workspaces among them, which CUDA graphs know as well, and must be zeros
    made = _rearranged(method, layer, rearrange)
    for old, new in ((own, vars(method)), (vars(held), vars(made)), (held._parameters, made._parameters)):
        for name in (name for name, tensor in old.items() if isinstance(tensor, torch.Tensor)):
            old[name].data.copy_(new[name])
    vars(method).update(own)


def _rearranged(method: Any, layer: Any, rearrange: Callable[[Any, Any], None]) -> Any:
    made = copy.copy(layer)
    made._parameters = {name: None if one is None else _cloned(one) for name, one in layer._parameters.items()}
    rearrange(method, made)
    return made


def _cloned(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns a copy of a parameter of SGLang's, whose classes cannot be constructed from data alone."""
    made = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), False)
    vars(made).update(vars(parameter))
    return made


def _compute_plainly(form: QuantizedFormat) -> None:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    def lay_out(endings: Sequence[str], names: Sequence[str], _method: Any, layer: Any) -> None:
        """Puts plain matrices in the place of a layer's parameters."""
        transposed = bool(names[0]) and form.endings[0] == "weight_packed"  # SGLang keeps experts so
        made = {}
        for name in names:
            parts = [layer._parameters[name + ending] for ending in endings]
            each = zip(*(part.transpose(-1, -2) if transposed else part for part in parts), strict=True) if name else [parts]
            matrices = [plain(one, form, torch.get_default_dtype()) for one in each]
            made[f"{name}weight"] = torch.nn.Parameter(torch.stack(matrices) if name else matrices[0], requires_grad=False)
        layer._parameters = made | {name: one for name, one in layer._parameters.items() if name == "bias"}

    def multiply(_method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)

    def mix(method: Any, layer: Any, dispatch_output: Any) -> Any:
        layer.num_experts = len(layer.w13_weight)
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        mixed = fused_moe_native.moe_forward_native(layer, x, chosen, method.moe_runner_config)
        return StandardCombineInput(hidden_states=mixed)

    def keep_configuration(method: Any, _layer: Any, configuration: Any) -> None:
        method.moe_runner_config = configuration

    linear, experts, configuration, apply = _methods(form)
    _compute_with_copies(linear, apply, partial(lay_out, form.endings, [""]), multiply)
    if experts is not None:
        _compute_with_copies(experts, apply, partial(lay_out, form.endings, ["w13_", "w2_"]), mix)
        experts.create_moe_runner = keep_configuration
    configuration.get_supported_act_dtypes = lambda *_: [torch.bfloat16, torch.float16, torch.float32]


def _methods(form: QuantizedFormat) -> tuple[Any, Any, Any, str]:
    """Returns SGLang's classes for linear layers, for experts and of configurations, and the name of the methods that multiply."""
    if form.bits == 8:
        from sglang.srt.layers.quantization import fp8

        return fp8.Fp8LinearMethod, fp8.Fp8MoEMethod, fp8.Fp8Config, "apply"
    if form.layout == "awq":
        from sglang.srt.layers.quantization.awq import awq, schemes

        schemes.AWQLinearScheme._init_kernel = lambda *_: None
        awq.AWQConfig.get_linear_scheme = lambda configuration, _: schemes.AWQLinearScheme(configuration)
        return schemes.AWQLinearScheme, None, awq.AWQConfig, "apply_weights"
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes

    compressed_tensors.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    return schemes.CompressedTensorsWNA16, schemes.CompressedTensorsWNA16MoE, compressed_tensors.CompressedTensorsConfig, "apply_weights"
