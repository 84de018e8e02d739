"""``python -m services.trainer.trainer_layers DIRECTORY``: what the trainer's layers compute for a sequence, for ``myxo bisect``.

``DIRECTORY`` holds its ``request.json`` and what the engine has written. The trainer's ranks compute the sequence several times, each
into a directory of its own, one file a rank:

* ``plain``: as they compute the log-probs of a batch.
* ``substituted``: every layer gets what the engine's layer got. A difference in one layer does not reach the next.
* ``rounded-N``: the same, each operation's output changed at random by as much as rounding may change it. How far these are from
  ``substituted`` is what the precision explains.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.backend import TrainerSettings
from services.trainer.packing import PackedBatch
from services.trainer.parallel import runtime
from services.trainer.parallel.trained_model import TrainedModel
from shared.config.run_config import RunConfig
from shared.model.architecture import ROUNDINGS
from shared.process.child_process import die_with_parent
from shared.service.service_base import exit_code


class TrainerCapture:
    """Hooks on the operations of this rank's layers, for one pass.

    Args:
        given: what the engine's layers got, [T, hidden size], by `substitutes`; nothing where layers get what the ones before computed.
        scale: relative size of the changes at random. seed: of these.
    """

    def __init__(self, model: TrainedModel, given: dict[str, Tensor] | None = None, scale: float = 0.0, seed: int = 0) -> None:
        self._model, self._given, self._scale, self._seed = model, given or {}, scale, seed
        self._split = model.layout.sequence_parallel and model.layout.tensor > 1
        self._removers: list[Callable[[], None]] = []
        self.found: dict[str, Tensor] = {}

    def __enter__(self) -> "TrainerCapture":
        modules = self._model.layer_modules
        if modules.observe_attention is not None:
            self._removers.append(modules.observe_attention(self._heads))
        for index, layer in modules.layers.items():
            self._observe(index, layer)
        if (norm := modules.norm) is not None:
            count = self._model.architecture.num_layers
            self._before(norm, lambda tensors: [self._entering(count, tensors[0]), *tensors[1:]])
            self._after(norm, "final_norm", "rows")
        return self

    def __exit__(self, *_: object) -> None:
        for remove in self._removers:
            remove()

    def _observe(self, index: int, layer: Any) -> None:
        name = f"layers.{index}"
        self._before(layer, lambda tensors: [self._entering(index, tensors[0]), *tensors[1:]])
        attention = getattr(layer, "self_attention", None) or getattr(layer, "self_attn", None)
        norms = [getattr(layer, one, None) for one in ("pre_mlp_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm")]
        operations = {"attention_norm": getattr(layer, "input_layernorm", None), "attention_output": attention, "mlp_output": layer.mlp}
        for operation, module in {**operations, "mlp_norm": next(filter(None, norms), None)}.items():
            if module is not None:
                self._after(module, f"{name}.{operation}", "rows")
        if (core := getattr(attention, "core_attention", None)) is not None:
            self._before(core, lambda tensors: self._heads(index, "before", tensors))
            self._after(core, f"{name}.attention", "columns")
        if (router := getattr(layer.mlp, "router", None)) is not None:
            gating = router.gating
            router.gating = lambda hidden: self._noted(f"{name}.router_logits", gating(hidden), "rows")
            self._removers.append(lambda: delattr(router, "gating"))
            self._removers.append(router.register_forward_hook(lambda _module, _inputs, output: self._chosen(name, output[1])).remove)
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            self._removers.append(gate.register_forward_hook(lambda *call: self._gate(name, *call)).remove)

    def _before(self, module: Any, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Has ``change`` replace a module's tensors, in whichever way it is called: by place, or the hidden states by name."""

        def hook(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if not inputs:
                return inputs, {**named, "hidden_states": change([named["hidden_states"]])[0]}
            count = next((place for place, one in enumerate(inputs) if not isinstance(one, Tensor)), len(inputs))
            return (*change(list(inputs[:count])), *inputs[count:]), named

        self._removers.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _after(self, module: Any, name: str, way: str) -> None:
        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            noted = self._noted(name, output[0] if isinstance(output, tuple) else output, way)
            return (noted, *output[1:]) if isinstance(output, tuple) else noted

        self._removers.append(module.register_forward_hook(hook).remove)

    def _entering(self, index: int, hidden: Tensor) -> Tensor:
        """Returns what a layer gets. ``index``: its number; that of all layers for what the last norm gets."""
        name = f"layers.{index - 1}.output" if index else "embedding"
        self._keep(name, hidden, "rows")
        if (given := self._given.get(name)) is None:
            return hidden
        rows = hidden.numel() // hidden.shape[-1]
        first = rows * self._model.layer_modules.rank if self._split else 0
        own = given[first : first + rows].to(hidden)
        return F.pad(own, (0, 0, 0, rows - len(own))).view(hidden.shape)

    def _heads(self, index: int, place: str, tensors: list[Tensor]) -> list[Tensor]:
        """Takes note of attention's queries, keys and values [T, heads, width], or of its output; returns what takes their place."""
        names = ["q", "k", "v"] if place == "before" else ["attention"]
        noted = [self._noted(f"layers.{index}.{name}", tensor, "columns") for name, tensor in zip(names, tensors, strict=False)]
        return noted + tensors[len(noted) :]

    def _gate(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):
            self._keep(f"{name}.router_logits", F.linear(inputs[0], module.weight), "rows")
            self._keep(f"{name}.experts", output[-1], "rows")
        else:
            self._keep(f"{name}.router_logits", output, "rows")

    def _chosen(self, name: str, routing_map: Tensor) -> None:
        counts = routing_map.sum(-1)
        if len(counts) and bool((counts == counts[0]).all()):
            self._keep(f"{name}.experts", routing_map.nonzero()[:, 1].view(len(counts), -1), "rows")

    def _noted(self, name: str, tensor: Tensor, way: str) -> Tensor:
        if self._scale and tensor.is_floating_point():
            generator = torch.Generator().manual_seed(self._seed * 100_003 + len(self.found))
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            tensor = (tensor * (1 + self._scale * noise)).to(tensor.dtype)
        self._keep(name, tensor, way)
        return tensor

    def _keep(self, name: str, tensor: Tensor, way: str) -> None:
        rows = tensor.reshape(-1, tensor.shape[-1]) if way == "rows" else tensor.reshape(len(tensor), -1)
        parted = f"{name}:{way}" if way == "columns" or self._split else name
        self.found[parted] = rows.detach().to("cpu", torch.int32 if name.endswith(".experts") else torch.float32, copy=True).contiguous()


def capture(actor: Actor, request: dict[str, Any], directory: Path) -> None:
    """Computes all passes of a request and writes this rank's files. A collective of all ranks."""
    model, ids = actor.model, torch.tensor(request["tokens"])
    batch = PackedBatch(ids, ids.roll(-1), torch.zeros(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), {})
    of_engine = load_file(min((directory / "engine").glob("rank-*.safetensors")))  # the residual stream is the same on each rank
    given = {name: of_engine[name] for name in of_engine if name == "embedding" or name.endswith(".output")}
    passes: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("substituted", {"given": given})]
    passes += [(f"rounded-{seed}", {"given": given, "scale": request["rounding"], "seed": seed}) for seed in range(1, ROUNDINGS + 1)]
    for name, options in passes:
        with TrainerCapture(model, **options) as captured, runtime.deadline("the computation of layers"):
            log_probs = actor.backend.passes.log_probs(model, [batch], 1.0)[0][:-1].cpu()
        if actor.data_parallel_rank == 0:
            (directory / name).mkdir(exist_ok=True)
            tensors = {**captured.found, "log_probs": log_probs[:, None].contiguous()}
            save_file(tensors, directory / name / f"rank-{runtime.rank()}.safetensors")
    tempered = actor.backend.passes.log_probs(model, [batch], request["temperature"])[0][:-1]
    if runtime.rank() == 0:
        save_file({"log_probs": tempered.cpu()[:, None].contiguous()}, directory / "tempered.safetensors")


def rank(directory: Path) -> None:
    """Computes on one rank."""
    request = json.loads((directory / "request.json").read_text())
    config = RunConfig.model_validate(request["config"])
    torch.set_num_threads(config.trainer.torch_threads or 1)
    settings = replace(TrainerSettings.from_run(config), updates=max(config.rollout.num_rollout, 1))
    actor = Actor.create(settings, request["trainer_model"])
    try:
        capture(actor, request, directory)
    finally:
        actor.close()


def launch(directory: Path) -> None:
    """Becomes the only rank, or starts all of them."""
    from services.trainer.__main__ import become_ranks, prepare_environment

    config = RunConfig.model_validate(json.loads((directory / "request.json").read_text())["config"])
    prepare_environment(config)
    become_ranks(config.trainer.ranks("actor"), "services.trainer.trainer_layers", str(directory), "rank")


if __name__ == "__main__":
    die_with_parent()
    where, ranked = Path(sys.argv[1]), sys.argv[2:] == ["rank"]
    sys.exit(exit_code("bisect", lambda: rank(where) if ranked else launch(where)))
