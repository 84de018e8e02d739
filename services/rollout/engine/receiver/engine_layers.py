"""Writes what a model's operations compute for one sequence, inside each of an engine's scheduler processes, for ``myxo bisect``.

SGLang enters by ``--forward-hooks``, whose hook `capture` makes. The names of the operations are `shared.model.architecture.OPERATIONS`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor


def capture(config: dict[str, Any]) -> Any:
    """Returns a hook for the module that has the layers. ``config``: the ``tokens`` to wait for, and the ``directory`` for the file."""
    return LayerCapture([int(token) for token in config["tokens"]], Path(config["directory"])).installed


class LayerCapture:
    """What the operations of this rank compute, from the forward passes whose tokens are the wanted ones: chunks of one prefill."""

    def __init__(self, tokens: list[int], directory: Path) -> None:
        self._tokens, self._directory = tokens, directory
        self._seen, self._reading, self._done, self._known = 0, False, False, False
        self._found: dict[str, list[Tensor]] = {}

    def installed(self, model: Any, _inputs: Any, _output: Any) -> None:
        """Follows the model's first forward pass with hooks on all of its operations; each later one may be the last of the sequence."""
        if self._known:
            return self._finish()
        if not hasattr(model, "layers"):
            return
        self._known = True
        modules = dict(model.named_modules())
        modules["embed_tokens"].register_forward_hook(self._begin)
        modules["norm"].register_forward_hook(self._norm(len(model.layers), "final_norm"))
        for index in range(len(model.layers)):
            own = {name.removeprefix(f"layers.{index}."): one for name, one in modules.items() if name.startswith(f"layers.{index}.")}
            before_mlp = "pre_feedforward_layernorm" if "pre_feedforward_layernorm" in own else "post_attention_layernorm"
            hooks = {
                "input_layernorm": self._norm(index, f"layers.{index}.attention_norm"),
                "self_attn.attn": self._attention(f"layers.{index}"),
                "self_attn": self._output(f"layers.{index}.attention_output"),
                before_mlp: self._output(f"layers.{index}.mlp_norm"),
                "mlp.gate": self._output(f"layers.{index}.router_logits"),
                "mlp.topk": self._experts(f"layers.{index}.experts"),
                "mlp": self._output(f"layers.{index}.mlp_output"),
            }
            for name, hook in hooks.items():
                if name in own:
                    own[name].register_forward_hook(hook)

    def _begin(self, _module: Any, inputs: Any, _output: Any) -> None:
        """Begins a forward pass: it is read where its tokens continue the sequence, or are its first ones."""
        given = inputs[0].tolist()
        for first in (self._seen, 0):
            if given == self._tokens[first : first + len(given)] and not self._done:
                self._seen, self._reading = first + len(given), True
                if not first:
                    self._found.clear()
                return
        self._reading = False

    def _finish(self) -> None:
        if self._reading and self._seen == len(self._tokens):
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._directory.mkdir(parents=True, exist_ok=True)
            heads = (".q", ".k", ".v", ".attention")
            whole = {f"{name}:columns" if name.endswith(heads) else name: torch.cat(parts) for name, parts in self._found.items()}
            path = self._directory / f"rank-{rank}.part"
            save_file(whole, path)
            path.rename(path.with_suffix(".safetensors"))
            self._done = True
        self._reading = False

    def _keep(self, name: str, tensor: Any) -> None:
        if self._reading and isinstance(tensor, Tensor):
            kept = tensor.detach().reshape(-1, tensor.shape[-1])
            self._found.setdefault(name, []).append(kept.to("cpu", torch.int32 if name.endswith(".experts") else torch.float32, copy=True))

    def _output(self, name: str) -> Any:
        return lambda _module, _inputs, output: self._keep(name, output[0] if isinstance(output, tuple) else output)

    def _norm(self, index: int, name: str) -> Any:
        """Returns a hook for the norm that begins a layer, with which SGLang adds up the residual stream."""

        def hook(_module: Any, inputs: Any, output: Any) -> None:
            alone = not isinstance(output, tuple)
            self._keep(name, output if alone else output[0])
            self._keep(f"layers.{index - 1}.output" if index else "embedding", inputs[0] if alone else output[1])

        return hook

    def _attention(self, name: str) -> Any:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            if all(isinstance(tensor, Tensor) for tensor in inputs[:3]):
                for letter, tensor in zip("qkv", inputs[:3], strict=False):
                    self._keep(f"{name}.{letter}", tensor.reshape(len(inputs[0]), -1))
                self._keep(f"{name}.attention", output)

        return hook

    def _experts(self, name: str) -> Any:
        return lambda _module, _inputs, output: self._keep(name, getattr(output, "topk_ids", None))
