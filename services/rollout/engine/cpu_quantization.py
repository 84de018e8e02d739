"""Blocks of 8-bit floats on a CPU, for which SGLang has kernels on GPUs and with AMX only (`cpu_launcher`).

Weights and factors stay in the engine as they were loaded, so that pushes reach them as they do on a GPU; each product is that of plain
numbers. A GPU rounds activations to 8 bits as well; this does not.
"""

import json
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared.model.quantization import ENTRY, BlockFormat, block_format
from shared.transfer.quantizer import plain


def install(model_path: str) -> None:
    """Puts the stand-ins in where a checkpoint is quantized so. Must come before the first import of a model."""
    path = Path(model_path, "config.json")
    entry = json.loads(path.read_text()).get(ENTRY) if path.is_file() else None
    if entry is None:
        return
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization import fp8

    form = block_format(path, entry)

    def multiply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, plain(layer.weight, layer.weight_scale_inv, form, x.dtype), bias)

    def mix(method: Any, layer: Any, dispatch_output: Any) -> Any:
        x = dispatch_output.hidden_states
        own = {name: _experts(layer, name, form, x.dtype) for name in ("w13", "w2")}
        plain_layer = types.SimpleNamespace(num_experts=len(layer.w13_weight), w13_weight=own["w13"], w2_weight=own["w2"])
        mixed = fused_moe_native.moe_forward_native(plain_layer, x, dispatch_output.topk_output, method.moe_runner_config)
        return StandardCombineInput(hidden_states=mixed)

    def keep_configuration(method: Any, _layer: Any, configuration: Any) -> None:
        method.moe_runner_config = configuration

    for kind, apply in ((fp8.Fp8LinearMethod, multiply), (fp8.Fp8MoEMethod, mix)):
        kind.process_weights_after_loading, kind.apply = lambda *_: None, apply
    fp8.Fp8MoEMethod.create_moe_runner = keep_configuration
    fp8.Fp8Config.get_supported_act_dtypes = lambda *_: [torch.bfloat16, torch.float16, torch.float32]


def _experts(layer: Any, name: str, form: BlockFormat, dtype: torch.dtype) -> torch.Tensor:
    pairs = zip(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv"), strict=True)
    return torch.stack([plain(*pair, form, dtype) for pair in pairs])
