"""Frozen weights beside the policy's, and the reference policy of a run with a KL term: version 0 or a checkpoint of its own, later the
policy after the last multiple of ``ref_update_interval`` steps."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from services.trainer.actor import Actor
from services.trainer.parallel import DEVICE_TYPE
from services.trainer.parallel.checkpoint import checkpoints
from services.trainer.parallel.export import ADAPTER_DIRECTORY
from services.trainer.parallel.joint_write import find_places
from services.trainer.parallel.runtime import host_copy
from services.trainer.parallel.trained_model import TrainedModel
from shared.runtime.errors import ConfigError
from shared.schema.versions import newest_due


class FrozenWeights:
    """A copy of a model's parameters. It records no version.

    Args:
        tensors: this rank's parameters, in the order of ``parameters()``, in host memory. adapters: whether they are only those
            of LoRA's adapters: the weights under them are the same in every policy of a run.
    """

    def __init__(self, tensors: list[torch.Tensor], adapters: bool = False) -> None:
        self._tensors, self._adapters = tensors, adapters

    @classmethod
    def of(cls, model: TrainedModel, adapters: bool = False) -> "FrozenWeights":
        """Returns the model's weights as they are now."""
        copies = [host_copy(tensor) for tensor in model.weight_tensors(adapters)]
        if DEVICE_TYPE == "cuda":
            torch.cuda.current_stream().synchronize()
        return cls(copies, adapters)

    @classmethod
    def of_saved_policy(cls, model: TrainedModel, directory: Path) -> "FrozenWeights":
        """Returns an earlier policy of this model, from the directory that `Actor.save_hf` wrote then."""
        if model.lora is None:
            return cls.from_hf(model, directory)
        return cls._loaded(model, lambda: model.load_adapters(directory / ADAPTER_DIRECTORY), adapters=True)

    @classmethod
    def from_hf(cls, model: TrainedModel, directory: Path) -> "FrozenWeights":
        """Returns the weights of a Hugging Face checkpoint of the same architecture, with adapters that add nothing to them; the model's
        own stay as they are."""

        def load() -> None:
            model.load_hf(directory)
            if model.lora is not None:
                model.silence_adapters()

        return cls._loaded(model, load)

    @classmethod
    def _loaded(cls, model: TrainedModel, load: Callable[[], None], adapters: bool = False) -> "FrozenWeights":
        own = cls.of(model, adapters)
        try:
            load()
            return cls.of(model, adapters)
        finally:
            own._copy_into(model)

    @contextlib.contextmanager
    def in_place_of(self, model: TrainedModel) -> Iterator[None]:
        """Gives the model these weights in the body, and its own ones after it."""
        own = FrozenWeights.of(model, self._adapters)
        self._copy_into(model)
        try:
            yield
        finally:
            own._copy_into(model)

    @torch.no_grad()
    def _copy_into(self, model: TrainedModel) -> None:
        model.readers.wait("change of weights")
        # Pinned memory is not handed out again before the copies of this stream are through, so none is waited for.
        for parameter, tensor in zip(model.weight_tensors(self._adapters), self._tensors, strict=True):
            parameter.copy_(tensor, non_blocking=True)


class ReferencePolicy:
    """The reference policy on one rank. References that a resume may need are on disk: repeated steps are trained against the same one.

    Args:
        first: where HF weights of version 0 lie, for all ranks to see, else ConfigError is raised; later ones are stored beside it.
        interval: steps between references; None: there is one. root: of the run's checkpoints, the oldest of which a resume may need.
        own: a HF checkpoint that the reference starts from, in the place of version 0.
    """

    def __init__(self, actor: Actor, first: Path, interval: int | None, root: Path, own: Path | None = None) -> None:
        self._actor, self._first, self._interval, self._root, self._own = actor, first, interval, root, own
        if (own is None or interval is not None) and len(find_places(first.parent).directories) > 1:
            raise ConfigError("trainer.save", str(first.parent), "a directory that all nodes see, since the KL's reference lies there")
        self._weights: FrozenWeights | None = None
        self._made = 0  # the multiple of the interval that the one in use is of

    def save_first(self) -> None:
        """Stores the present policy, version 0, where the reference starts from it. A collective of all ranks."""
        if self._own is None:
            self._actor.save_hf(self._first)

    def load(self, steps: int) -> None:
        """Loads the reference that is in use after so many training steps from disk. A collective of all ranks."""
        self._made, model = made_at(steps, self._interval), self._actor.model
        own = self._own if self._made == 0 else None
        self._weights = FrozenWeights.from_hf(model, own) if own else FrozenWeights.of_saved_policy(model, self._directory(self._made))

    def renew(self, steps: int) -> None:
        """Makes the present policy the reference, if a new one is due after so many steps. A collective of all ranks."""
        if self._weights is None or (made := made_at(steps, self._interval)) <= self._made:
            return
        self._made = made
        self._actor.save_hf(self._directory(made))
        self._weights = FrozenWeights.of(self._actor.model, adapters=self._actor.model.lora is not None)
        needed = made_at(min(checkpoints(self._root), default=0), self._interval)
        for directory in self._first.parent.glob(f"{self._first.name}-*"):
            if directory.name.rpartition("-")[2].isdigit() and int(directory.name.rpartition("-")[2]) < needed:
                shutil.rmtree(directory, ignore_errors=True)  # every rank may try

    def in_place_of_the_policy(self) -> AbstractContextManager[None]:
        """Gives the model the reference's weights in the body."""
        assert self._weights is not None
        return self._weights.in_place_of(self._actor.model)

    def _directory(self, steps: int) -> Path:
        return self._first if steps == 0 else self._first.with_name(f"{self._first.name}-{steps:08d}")


def made_at(steps: int, interval: int | None) -> int:
    """Returns the training steps after which the reference in use after ``steps`` was made."""
    return 0 if interval is None else newest_due(steps, interval)
