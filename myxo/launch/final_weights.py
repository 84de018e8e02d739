"""The final policy in Hugging Face's format that a finished run still owes: the trainer is kept alive until it is there.

The run is finished once its last checkpoint is on disk. A trainer that dies after that, before an export is complete, has a next life that
makes up for it, in this launch or, where this one ends as well, in the next.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from myxo.launch.service_plan import TRAINERS, ServiceSpec
from myxo.launch.supervisor import Supervisor
from myxo.repair.torn_run import checkpoints
from shared.config.run_config import RunConfig
from shared.model.final_exports import missing_exports
from shared.runtime import exit_codes
from shared.runtime.safe_text import say
from shared.view.stall import Owed

LOOK_SECONDS = 0.5
"""The interval at which the disk is looked at."""

MARGIN_SECONDS = 60.0
"""The time that a trainer has, beyond that of a collective, to load what it writes."""


class FinalWeights:
    """Watches for one run's final weights."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._seconds = config, config.trainer.collective_timeout + MARGIN_SECONDS
        self._missing: list[Path] = []
        self._look_at = 0.0
        self._since: float | None = None  # since when they are waited for, monotonic seconds
        self._since_epoch = 0.0

    def missing(self) -> list[Path]:
        """Returns what is not there and can be written: the last checkpoint lies on this machine."""
        missing = missing_exports(self._config)
        return missing if missing and max(checkpoints(self._config), default=-1) >= self._config.rollout.num_rollout else []

    def owed(self, supervisor: Supervisor, now: float) -> bool:
        """Returns whether the finished run has to wait for them.

        It does not where they are there, where the trainer has left in order without them (its log tells why), and where they took too
        long since its newest life began.

        Args:
            now: `time.monotonic` seconds.
        """
        if self._since is None:
            self._since, self._since_epoch = now, time.time()
        if now >= self._look_at:
            self._look_at, self._missing = now + LOOK_SECONDS, self.missing()
        if not self._missing or supervisor.trainers_left():
            return False
        lives = [now - item.lived for item in supervisor.statuses(now) if item.service in TRAINERS]
        return now - max(self._since, *lives) < self._seconds

    @property
    def wait(self) -> Owed | None:
        """Returns what is waited for; None: nothing."""
        if self._since is None or not self._missing:
            return None
        follows = f"given up {self._seconds:g} s after the trainer's start (trainer.collective_timeout and {MARGIN_SECONDS:g} s)"
        return Owed(f"the final weights in {self._named()}", self._since_epoch, follows)

    def announced(self) -> str:
        """Returns what to say of a finished run that lacks them; empty: it does not."""
        self._missing = self.missing()
        words = f"Run {self._config.run.name} is finished without its final weights in {self._named()}: its trainer writes them now."
        return words if self._missing else ""

    def makers(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """Returns the services that are needed to write them: no engine, unless the trainer waits for those that share its GPUs."""
        return [spec for spec in specs if self._config.trainer.colocate or spec.service in ("buffer", *TRAINERS)]

    def verdict(self, code: int) -> int:
        """Returns the exit code of a finished run, ``code`` where it has them, and says so where it has not."""
        self._missing = self.missing()
        if not self._missing:
            return code
        say(
            f"myxo: run {self._config.run.name} is finished, but its final weights in {self._named()} are not there; the trainer's log in "
            f"{self._config.run.root / 'logs'} tells why; `myxo up` with the same config writes them"
        )
        return exit_codes.RUN_FAILED

    def _named(self) -> str:
        return " and ".join(map(str, self._missing))
