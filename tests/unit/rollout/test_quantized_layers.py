"""What quantized layers of an engine hold beside their weights, while SGLang has released these and after the next push."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from services.rollout.engine import quantized_layers


def released(model: nn.Module) -> None:
    """As SGLang releases the weights' memory and takes it again: it has copies of buffers alone."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    for name, buffer in model.named_buffers():
        buffer[...] = kept[name]


def test_what_no_push_brings_outlasts_a_release_of_the_weights() -> None:
    attention, experts = nn.Module(), nn.Module()
    for name in ("k_scale", "v_scale"):
        setattr(attention, name, nn.Parameter(torch.tensor(1.0), requires_grad=False))
    experts.weight = nn.Parameter(torch.ones(2), requires_grad=False)
    experts.quant_method = SimpleNamespace(_cutlass_buffers_ready=True, c_strides1=torch.tensor([3, 3]), block_quant=True)
    model, places = nn.ModuleList([attention, experts, nn.Linear(1, 1)]), [attention.k_scale.data_ptr(), attention.v_scale.data_ptr()]
    quantized_layers.keep_beside_weights(model)
    released(model)
    assert attention.k_scale == attention.v_scale == 1 and experts.quant_method.c_strides1.tolist() == [3, 3]
    assert [attention.k_scale.data_ptr(), attention.v_scale.data_ptr()] == places, "CUDA graphs read them there"
    assert experts.weight.tolist() == [77, 77], "a push brings it"


def test_workspaces_are_zeros_after_each_push() -> None:
    """They are locks of Marlin's kernels, where CUDA graphs know them."""

    class Scheme:
        workspace: torch.Tensor

        def process_weights_after_loading(self, layer: Any) -> None:
            self.workspace, layer.workspace = torch.zeros(2), torch.zeros(3)
            layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)

        def apply_weights(self, layer: Any) -> list[Any]:
            return [self.workspace, layer.workspace, layer.weight]

    quantized_layers._compute_with_copies(Scheme, "apply_weights")
    method, layer = Scheme(), nn.Module()
    layer.weight = nn.Parameter(torch.ones(2), requires_grad=False)
    method.process_weights_after_loading(layer)
    held = method.apply_weights(layer)
    for tensor in (*held, layer.weight):
        tensor.data.fill_(5)
    quantized_layers._refresh(*quantized_layers._held.pop())
    assert [tensor.tolist() for tensor in held] == [[0, 0], [0, 0, 0], [10, 10]]
    assert all(new is old for new, old in zip(method.apply_weights(layer), held, strict=True))
