"""Exports of the policy in Hugging Face's format at the run's checkpoints (`save_hf`).

Each rank copies its share of the weights to host memory as for a checkpoint, and writes it while the next steps train, unless `async_save`
is off. An error of the disk never stops the training: it is logged, and the next export is tried.
"""

import time
from pathlib import Path
from typing import Any

import structlog

from services.trainer.actor import Actor
from services.trainer.control_client import ControlClient
from services.trainer.parallel import runtime
from services.trainer.parallel.joint_write import JointWrite, SaveFailed
from shared.config.run_config import RunConfig
from shared.model.final_exports import export_directory, exported_steps
from shared.schema.versions import crossed, is_periodic, newest_due


class PolicyExporter:
    """Exports the actor's policy. All ranks construct it and call its methods together.

    Args:
        control: rank 0's client; None on the other ranks.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None, actor: Actor) -> None:
        self._config, self._control, self._actor = config, control, actor
        self._writing: JointWrite | None = None
        self._path, self._started = Path(), 0.0
        self._log: Any = structlog.get_logger()

    def begin(self, steps: int) -> None:
        """Exports the policy after ``steps`` steps; waits for the export before it, and for the last one, since the run ends behind it.

        A collective. Raises DeadlineExceeded.
        """
        if (path := self._target(steps)) is None:
            return
        self.finish()
        self._path, self._started = path, time.monotonic()
        try:
            self._writing = self._actor.start_export(path, steps)
        except (OSError, runtime.PeerFailed) as error:  # on all ranks: they prepare the directory together
            self._tell(error)
        if not self._config.trainer.async_save or steps == self._config.rollout.num_rollout:
            self.finish()

    def write_missing(self, steps: int) -> None:
        """Exports the policy that a checkpoint holds where a predecessor died before its export was complete. A collective."""
        path, rollout = self._target(steps), self._config.rollout
        due = is_periodic(steps, self._config.trainer.save_interval, rollout.num_rollout_per_epoch) or steps == rollout.num_rollout
        if path is not None and due and runtime.gather_json(exported_steps(path, steps))[0] != steps:
            self.begin(steps)

    def finish(self) -> None:
        """Waits until what was begun is on disk, or has failed. A collective. Raises DeadlineExceeded."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.finish()
            self._log.info("policy_exported", path=str(self._path), seconds=round(time.monotonic() - self._started, 2))
        except SaveFailed as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        self._log.error("policy_not_exported", path=str(self._path), error=f"{type(error).__name__}: {error}")
        if self._control is not None:
            self._control.publish_event("policy_not_exported", f"{self._path}: {error}")

    def _target(self, steps: int) -> Path | None:
        trainer, rollout = self._config.trainer, self._config.rollout
        template, interval = trainer.save_hf, trainer.save_hf_interval
        before = newest_due(steps - 1, trainer.save_interval, rollout.num_rollout_per_epoch)  # the checkpoint before this one
        if interval is not None and not crossed(before, steps, interval) and steps != rollout.num_rollout:
            return None
        return None if template is None or steps == 0 else export_directory(template, steps)
