"""Where a trainer's measurements go: each writer takes numbers by name and the step that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch.utils.tensorboard import SummaryWriter

from services.trainer.control_client import ControlClient


class Writer(Protocol):
    """One place."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of one step; names are those of docs/metrics.md."""

    def close(self) -> None:
        """Writes out what is still held back."""


class TensorBoard:
    """Event files of TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """Gauges on the trainer's ``/metrics``: ``train/loss`` is ``myxo_train_loss``. They hold the newest step's numbers."""

    def __init__(self, link: ControlClient) -> None:
        self._link = link

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._link.metrics(values)

    def close(self) -> None:
        pass
