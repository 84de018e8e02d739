"""The states of the training endpoint's clients: adapters (or all weights), Adam's moments and count, gradients that wait for a step.

One client's state is in the model, the others' are in host memory. A state is a list of tensors, this rank's shards, in the order in which
model and optimizer name them: it fits the layout that it was made in, and no other. Every method is a collective of all ranks.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.megatron.gpt_model import flat_buffers
from services.trainer.parallel import runtime
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import fsync_tree, parse_json, publish, scratch, settle

MARKER = "state.json"
MOST_HASHED = 1 << 28  # bytes of weights of which a digest is made after each step


class ClientRefused(MyxoError):
    """A command that cannot be carried out for what it asks; it has changed nothing."""


@dataclass
class ClientState:
    """One client's state. ``updates``: optimizer steps taken. ``seed``, ``rank``, ``parts``: of its adapters.

    ``tensors``: where it is not in the model. ``gradients``: summed since the last step, by the model's flat buffers; None: none.
    """

    seed: int
    rank: int
    parts: list[str]
    updates: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] | None = None
    saved: int = 0  # updates of its newest checkpoint
    number: int = 0  # of the newest command that its weights and moments hold


class ClientStates:
    """All clients' states of one trainer.

    Attributes:
        held: by client.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        # Megatron's: adapters by seeds, flat buffers of gradients, Adam's parameters for each step
        self._model: Any = actor.model
        self._optimizer: Any = actor.optimizer
        self.held: dict[str, ClientState] = {}
        self._inside: str | None = None

    # --- one client in the model

    def enter(self, client: str) -> ClientState:
        """Brings a client's state into the model, and returns it."""
        if client != self._inside:
            self._leave()
            state = self.held[client]
            self._lay(state.tensors, state.updates)
            self._inside, state.tensors = client, []
        return self.held[client]

    def create(self, client: str, seed: int, rank: int, parts: list[str]) -> None:
        """Makes a new client's state, in the model."""
        self._leave()
        if self._model.lora is None:
            with runtime.together("loading the base model"):
                self._model.load_hf(self._actor.hf_dir)
        else:
            self._model.renew_adapters(seed, rank, parts)
        self._optimizer.weights_loaded()
        self._begin_optimizer()
        self.held[client], self._inside = ClientState(seed, rank, parts), client

    def _begin_optimizer(self) -> None:
        self._optimizer.reset_moments()
        self._optimizer.updates = 0

    def forget(self, client: str) -> None:
        """Removes a client's state."""
        self.held.pop(client, None)
        self._inside = None if self._inside == client else self._inside

    def _leave(self) -> None:
        if self._inside is not None:
            self.held[self._inside].tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._live()]
        self._inside = None

    def _live(self) -> list[Tensor]:
        return [*self._weights(), *(tensor for tensor, kept in self._optimizer.live_tensors(self._model) if kept)]

    def _weights(self) -> list[Tensor]:
        found: list[Tensor] = self._model.weight_tensors(adapters=self._model.lora is not None)
        return found

    @torch.no_grad()
    def _lay(self, tensors: list[Tensor], updates: int) -> None:
        for live, kept in zip(self._live(), tensors, strict=True):
            live.copy_(kept)
        self._optimizer.count(updates)

    # --- gradients and steps

    @torch.no_grad()
    def add_gradients(self, client: str) -> None:
        """Adds what a backward pass has left in the model's buffers to the client's gradients."""
        state, buffers = self.held[client], self._gradients()
        if state.gradients is None:
            state.gradients = [buffer.clone() for buffer in buffers]
        else:
            for total, buffer in zip(state.gradients, buffers, strict=True):
                total.add_(buffer)

    @torch.no_grad()
    def step(self, client: str, adam: dict[str, float]) -> tuple[float, str | None]:
        """Takes an optimizer step on the client's gradients, which are gone then. Returns their norm, and why nothing was changed, or None.

        Raises ClientRefused where there are none.
        """
        state = self.enter(client)
        if state.gradients is None:
            raise ClientRefused("optim_step: no forward_backward has succeeded since the last step, so that there is no gradient")
        self._model.zero_gradients()
        self._optimizer.zero_gradients()
        for buffer, total in zip(self._gradients(), state.gradients, strict=True):
            buffer.copy_(total)
        state.gradients = None
        self._optimizer.set_adam(**adam)
        with runtime.deadline("the optimizer step"):
            norm, skipped = self._optimizer.update()
        state.updates += skipped is None
        return norm, skipped

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for chunk in self._model.chunks for buffer in flat_buffers(chunk)]

    def digest(self, client: str) -> str:
        """Returns a digest of this rank's part of the client's weights; empty where they are many."""
        self.enter(client)
        weights, found = self._weights(), xxhash.xxh3_128()
        if sum(tensor.nbytes for tensor in weights) > MOST_HASHED:
            return ""
        for tensor in weights:
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    # --- on disk

    def write(self, client: str, directory: Path, number: int) -> int:
        """Writes a client's state as a directory, which appears complete or not at all. Returns the bytes of this rank's part."""
        state, rank = self.enter(client), runtime.rank()
        marker = {"number": number, **{name: getattr(state, name) for name in ("seed", "rank", "parts", "updates")}, **self._layout()}
        with runtime.together(f"the preparation of {directory}"):
            if rank == 0:
                scratch(directory)
        tensors = {f"{index:06d}": tensor.detach().to("cpu", copy=True).contiguous() for index, tensor in enumerate(self._live())}
        with runtime.together(f"writing {directory}"):
            save_file(tensors, directory.with_name(f".{directory.name}.partial") / f"rank-{rank}.safetensors")
        with runtime.together(f"publishing {directory}"):
            if rank == 0:
                publish_marked(directory, marker)
        return sum(tensor.nbytes for tensor in tensors.values())

    def read(self, client: str, directory: Path, optimizer: bool = True) -> None:
        """Makes a client's state of one on disk. ``optimizer``: else Adam begins anew.

        Raises ClientRefused where it cannot be read, or is of another model or layout.
        """
        with runtime.together(f"finding {directory}"):
            if runtime.rank() == 0:
                settle(directory)
        if (marker := read_marker(directory)) is None:
            raise ClientRefused(f"{directory.name}: no complete state is saved under that name")
        if (found := {name: marker.get(name) for name in self._layout()}) != self._layout():
            raise ClientRefused(f"{directory.name}: was saved with {found}, and this server has {self._layout()}")
        held = self.held.get(client)
        if held is not None and (saved := [marker["rank"], marker["parts"]]) != (own := [held.rank, held.parts]):
            raise ClientRefused(f"{directory.name}: has rank and parts {saved}, and {client} {own}; begin a client from that state")
        with runtime.together(f"reading {directory}"):
            tensors = load_file(directory / f"rank-{runtime.rank()}.safetensors")
        if runtime.anywhere(len(tensors) != len(self._live())):
            raise ClientRefused(f"{directory.name}: lacks tensors; an earlier release saved no scales of moments in 8 and 16 bits")
        self._leave()
        state = ClientState(marker["seed"], marker["rank"], marker["parts"], marker["updates"], number=marker["number"])
        self._lay([tensors[name] for name in sorted(tensors)], state.updates)
        if not optimizer:
            self._begin_optimizer()
            state.updates = 0
        state.saved = state.updates
        self.held[client], self._inside = state, client

    def _layout(self) -> dict[str, Any]:
        lora, layout = self._model.lora, asdict(self._model.layout)
        adapters = None if lora is None else [lora.rank, lora.alpha, *lora.targets]
        return {"layout": layout, "lora": adapters, "dtype": str(self._model.dtype), "ranks": dist.get_world_size()}


def publish_marked(directory: Path, marker: dict[str, Any]) -> None:
    """Publishes the scratch directory of a state, with what it records."""
    partial = directory.with_name(f".{directory.name}.partial")
    (partial / MARKER).write_text(json.dumps(marker))
    fsync_tree(partial)
    publish(partial, directory)


def read_marker(directory: Path) -> dict[str, Any] | None:
    """Returns what a directory of a state records; None where there is none."""
    try:
        marker: dict[str, Any] = parse_json((directory / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return marker


def newest_checkpoint(root: Path) -> int:
    """Returns the number of the newest complete state below a client's directory, -1 where there is none."""
    names = [path for path in root.iterdir() if path.name.isdecimal()] if root.is_dir() else []
    return max((int(path.name) for path in names if read_marker(path) is not None), default=-1)
