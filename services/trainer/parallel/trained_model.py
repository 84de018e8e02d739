"""A model as the trainer knows it, whichever backend has it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from services.trainer.parallel.staged_shards import StagedShards
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import DeadlineExceeded


class WeightReadLock:
    """The lock on one model's parameters, with at most one read at a time.

    Attributes:
        stall: seconds that a caller has waited for the newest read. waiting_since: when it began to; None: none did.
    """

    def __init__(self) -> None:
        self.stall = 0.0
        self.waiting_since: float | None = None
        self._what, self._seconds = "", 0.0
        self._over = threading.Event()
        self._over.set()
        self._read: torch.cuda.Event | None = None

    def begin(self, what: str, seconds: float) -> None:
        """Begins a read. ``what``: names it in errors. ``seconds``: how long a caller that changes parameters waits for its end."""
        self.stall, self.waiting_since, self._what, self._seconds = 0.0, None, what, seconds
        self._over.clear()

    def over(self) -> None:
        """Ends the read; on a GPU it ends in the order of the current stream. A second call does nothing."""
        if self._over.is_set():
            return
        if torch.cuda.is_available():
            self._read = torch.cuda.Event()
            self._read.record()
        if (since := self.waiting_since) is not None:
            self.stall += time.monotonic() - since
        self._over.set()

    def wait(self, next_action: str) -> None:
        """Returns once no read is under way; the current stream's further work then comes after the last one.

        ``next_action``: what the caller is about to do. Raises DeadlineExceeded."""
        if not self._over.is_set():
            self.waiting_since = time.monotonic()
            if not self._over.wait(self._seconds):
                raise DeadlineExceeded(f"the end of {self._what}", "the thread that reads the weights", self._seconds, f"no {next_action}")
        if self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
            self._read = None


# Gets a layer's number, ``before`` or ``after``, and its attention's tensors [T, heads, width]: queries, keys, values, or the output.
# Returns those that take their place.
AttentionChange = Callable[[int, str, list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class LayerModules:
    """The modules of this rank's layers, for hooks.

    Args:
        layers: by their number in the whole model. norm: the last one, on ranks that have it. rank: this one's number among those that
            split each token's work. observe_attention: calls its argument around each layer's attention until what it returns is called;
            None: the attention is a module of its own, ``core_attention``.
    """

    layers: Mapping[int, Any]
    norm: torch.nn.Module | None
    rank: int = 0
    observe_attention: Callable[[AttentionChange], Callable[[], None]] | None = None


@dataclass(kw_only=True)
class TrainedModel(Protocol):
    """The parts of a model that this rank holds.

    Args:
        architecture: the whole model's. layout: the split of it among the ranks. chunks: the rank's modules, as hooks get them.
        dtype: in which layers compute, and weights are sent to engines. value_head: whether a critic's head stands in the place of the
            output layer. lora: its adapters' settings, or None. freezing: the choice of frozen parameters.
        least_saved: the least share of a micro-batch's tokens that sharing beginnings must save; None: sequences are computed whole.
        chunk_size: tokens whose logits exist at a time; -1 for all of a micro-batch. readers: the lock of those that read the weights now.

    Attributes:
        backend: the name in checkpoints of the backend that wrote them; Megatron has none.
    """

    backend: ClassVar[str | None] = None
    architecture: Architecture = field()
    layout: ParallelLayout = field()
    chunks: list[Any] = field()
    dtype: torch.dtype = field()
    value_head: bool = False
    lora: Lora | None = None
    freezing: Freezing = field(default_factory=Freezing)
    least_saved: float | None = None
    chunk_size: int = -1
    readers: WeightReadLock = field(default_factory=WeightReadLock)

    @property
    def modules(self) -> Sequence[Any]:
        """Returns the rank's modules without wrappers."""

    @property
    def layer_modules(self) -> LayerModules: ...

    def train(self, mode: bool) -> None: ...

    def zero_gradients(self) -> None: ...

    def weight_tensors(self, adapters: bool = False) -> list[Tensor]:
        """Returns what this rank holds of the weights, in the order of the model; or of LoRA's adapters alone."""

    def live_tensors(self) -> Iterator[Tensor]:
        """Yields tensors whose storages are all that the weights lie in."""

    def load_hf(self, directory: Path) -> None:
        """Fills this rank's parameters from a Hugging Face checkpoint of the same architecture, but for draft layers."""

    def load_adapters(self, directory: Path) -> None:
        """Takes the adapters from a directory in PEFT's format, whatever layout wrote it. Raises ConfigError."""

    def silence_adapters(self) -> None:
        """Has the adapters add nothing."""

    def sharded_state(self) -> dict[str, Any]:
        """Returns the weights as the backend's checkpoints hold them."""

    def stage_state(self, state: dict[str, Any], random: Any, shards: StagedShards, directory: Path) -> None:
        """Has this rank's part of a state staged. A collective of all ranks.

        Args:
            state: what `sharded_state` returns, and that of the optimizer. random: plain data of this rank, or None.
        """

    def read_state(self, state: dict[str, Any], directory: Path, *, with_random: bool, exact: bool) -> dict[str, Any]:
        """Returns what a checkpoint has in the places of a state; tensors may be read in place. A collective of all ranks.

        Args:
            with_random: whether this rank's plain data is read, which comes as ``random``. exact: whether to refuse a checkpoint that
                has more.
        """

    def load_state(self, loaded: Mapping[str, Any]) -> None:
        """Takes the weights that `read_state` returned."""
