"""Exports of the policy in Hugging Face's format at the run's checkpoints (`save_hf`).

The weights are copied to host memory as for a checkpoint, and written while the next steps train, unless `async_save` is off. An error of
the disk never stops the training: it is told, and the next export is tried.
"""

import concurrent.futures
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

from services.trainer.actor import Actor
from services.trainer.control_client import ControlClient
from shared.config.debug_section import STEP
from shared.config.run_config import RunConfig
from shared.runtime.daemon_thread import run_in_thread
from shared.runtime.errors import DeadlineExceeded
from shared.schema.versions import is_periodic

WRITE_SECONDS = 3600.0
"""The longest time that one export may take to write: beyond it the disk is taken for dead."""


class PolicyExporter:
    """Exports the actor's policy. All ranks construct it and call `begin` together.

    Args:
        control: rank 0's client; None on the other ranks.
    """

    def __init__(self, config: RunConfig, control: ControlClient | None, actor: Actor) -> None:
        self._config, self._control, self._actor = config, control, actor
        self._writing: Future[None] | None = None
        self._path, self._started = Path(), 0.0
        self._log: Any = structlog.get_logger()

    def begin(self, steps: int) -> None:
        """Exports the policy after ``steps`` steps; waits for the export before it. A collective. Raises DeadlineExceeded."""
        if (path := self._target(steps)) is None:
            return
        self.finish()
        self._path, self._started = path, time.monotonic()
        if (write := self._actor.copy_hf(path)) is not None:
            self._writing = run_in_thread(write, "policy-export")
        if not self._config.trainer.async_save:
            self.finish()

    def make_up(self, steps: int) -> None:
        """Exports the policy that a checkpoint holds where a predecessor died before its export was complete. A collective."""
        path, rollout = self._target(steps), self._config.rollout
        due = is_periodic(steps, self._config.trainer.save_interval, rollout.num_rollout_per_epoch) or steps == rollout.num_rollout
        if path is not None and due and not path.is_dir():
            self.begin(steps)

    def finish(self) -> None:
        """Waits until what was begun is on disk, or has failed. Raises DeadlineExceeded."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(WRITE_SECONDS)
            self._log.info("policy_exported", path=str(self._path), seconds=round(time.monotonic() - self._started, 2))
        except OSError as error:
            self._log.error("policy_not_exported", path=str(self._path), error=f"{type(error).__name__}: {error}")
            if self._control is not None:
                self._control.tell("policy_not_exported", f"{self._path}: {error}")
        except concurrent.futures.TimeoutError:
            next_action = "the trainer stops; the run goes on from its newest checkpoint"
            raise DeadlineExceeded(f"the export {self._path}", "its disk", WRITE_SECONDS, next_action) from None

    def _target(self, steps: int) -> Path | None:
        """Returns where the policy after ``steps`` steps goes: its rollout id, as slime counts, is that of the last one."""
        template = self._config.trainer.save_hf
        return None if template is None or steps == 0 else Path(str(template).replace(STEP, str(steps - 1)))
