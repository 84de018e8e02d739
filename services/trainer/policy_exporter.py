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
from shared.model.final_exports import export_target, exported_steps, mark_of, occupant


class PolicyExporter:
    """Exports the actor's policy. All ranks construct it and call its methods together.

    Args:
        control: rank 0's client; None on the other ranks.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None, actor: Actor) -> None:
        self._config, self._control, self._actor = config, control, actor
        self._writing: JointWrite | None = None
        self._started = 0.0
        self._log: Any = structlog.get_logger()

    def begin(self, steps: int, anew: bool = False) -> None:
        """Exports the policy after ``steps`` steps where that is due and, unless it is made ``anew`` after a checkpoint, lacking. Waits for
        the export before it, and for the last one, since the run ends behind it.

        A collective. Raises DeadlineExceeded.
        """
        path = export_target(self._config, steps)
        if path is None or (not anew and runtime.gather_json(exported_steps(self._config, path))[0] == steps):
            return
        self.finish()
        self._started = time.monotonic()
        try:
            with runtime.together(f"the look at {path}"):
                if runtime.rank() == 0 and (what := occupant(self._config, path)):
                    raise FileExistsError(f"it would replace {what}")
            self._writing = self._actor.save_hf(path, mark_of(self._config, steps), wait=False)
        except (OSError, runtime.PeerFailed) as error:  # on all ranks: they prepare the directory together
            self._tell(path, error)
        if not self._config.trainer.async_save or steps == self._config.rollout.num_rollout:
            self.finish()

    def finish(self) -> None:
        """Waits until what was begun is on disk, or has failed. A collective. Raises DeadlineExceeded."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.finish()
            self._log.info("policy_exported", path=str(writing.target), seconds=round(time.monotonic() - self._started, 2))
        except SaveFailed as error:
            self._tell(writing.target, error)

    def _tell(self, path: Path, error: Exception) -> None:
        self._log.error("policy_not_exported", path=str(path), error=f"{type(error).__name__}: {error}")
        if self._control is not None:
            self._control.publish_event("policy_not_exported", f"{path}: {error}")
