"""The destinations of a trainer's metrics: each writer takes numbers by name and the step that they belong to."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from services.trainer.control_client import ControlClient
from shared.config.run_config import RunConfig
from shared.runtime import extras
from shared.schema.service_messages import MetricsWritten

STEP = "step"
"""W&B's axis: its own step must only grow, and a resumed run makes steps again."""

SENT = ("model", "rollout", "trainer", "sft", "algorithm", "weights")
"""Sections of the config that W&B gets."""


class Writer(Protocol):
    """One destination."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of one step; names are those of docs/metrics.md."""

    def flush(self) -> None:
        """Shows readers what was written."""

    def close(self) -> None:
        """Writes out buffered numbers and closes the destination."""


class TensorBoard:
    """Event files of TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """Gauges on the trainer's ``/metrics``: ``train/loss`` is ``myxo_train_loss``. They hold the newest step's numbers."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._control.gauges(values, in_status=False)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class EventStream:
    """Events on the bus, one for all that was written of a step until the next flush: for whoever watches the run from elsewhere."""

    def __init__(self, control: ControlClient, role: str) -> None:
        self._control, self._role = control, role
        self._values: dict[int, dict[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values.setdefault(step, {}).update(values)

    def flush(self) -> None:
        written, self._values = self._values, {}
        for step, values in written.items():
            self._control.report("metrics", MetricsWritten(role=self._role, step=step, values=values, at=time.time()))

    def close(self) -> None:
        self.flush()


class WeightsAndBiases:
    """A W&B run that goes on where the trainer does; offline its files are written for ``wandb sync``.

    Args:
        role: actor or critic.

    Raises ConfigError where the package is not installed.
    """

    def __init__(self, config: RunConfig, role: str) -> None:
        extras.check(config)
        import wandb

        asked = config.monitoring
        directory = asked.wandb_dir or config.trained
        directory.mkdir(parents=True, exist_ok=True)
        name = config.run.name if role == "actor" else f"{config.run.name}-{role}"
        sections = {section: value for section, value in config.shown().model_dump(mode="json").items() if section in SENT}
        sections["rollout"].pop("sglang")  # an engine's flags may hold a key
        self._run: Any = wandb.init(
            project=asked.wandb_project,
            entity=asked.wandb_team,
            group=asked.wandb_group or config.run.name,
            name=name,
            id=name,
            job_type=role,
            mode=asked.wandb_mode,
            dir=str(directory),
            resume="allow",
            config=sections,
            settings=wandb.Settings(console="off", silent=True, **({"base_url": asked.wandb_host} if asked.wandb_host else {})),
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
