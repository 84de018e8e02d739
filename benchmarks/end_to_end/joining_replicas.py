"""Rollout services that join a run while it continues, started as a person would add them, and ended with this process at the latest."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.config.devices import VISIBLE
from shared.process.child_process import ChildProcess, cause

ROOT = Path(__file__).resolve().parents[2]

STOP_SECONDS = 20.0
"""The time that they have to hand back their tasks and to leave."""


class JoiningReplicas:
    """The replicas ``rollout-<first>`` and those after it; as a context manager it ends them.

    Args:
        run: its id. logs: where their output goes. first, last: numbers of the replicas, the last excluded. devices: the GPU of each, as
            CUDA_VISIBLE_DEVICES names it; empty: they compute on the CPU.
    """

    def __init__(self, run: str, logs: Path, first: int, last: int, devices: Sequence[str]) -> None:
        self._run, self._logs = run, logs
        places = [{VISIBLE: device} for device in devices] or [{} for _ in range(first, last)]
        self._environments = {f"rollout-{first + index}": places[index] for index in range(last - first)}
        self._processes: dict[str, ChildProcess] = {}

    @property
    def started(self) -> dict[str, float]:
        """Returns when each process was started, seconds since the epoch; none before `start`."""
        return {instance: process.started_at for instance, process in self._processes.items()}

    def start(self, nats_url: str) -> None:
        """Starts them, from the main thread: they die with it."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        for instance, place in self._environments.items():
            own = {"NATS_URL": nats_url, "MYXO_RUN": self._run, "MYXO_INSTANCE": instance, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
            command = (sys.executable, "-m", "services.rollout")
            self._processes[instance] = ChildProcess(instance, command, self._logs / f"{instance}.log", {**os.environ, **own, **place})

    def problem(self) -> str:
        """Returns which of them has ended, with its last words; nothing while all run."""
        for instance, process in self._processes.items():
            if (code := process.exit_code()) is not None:
                return f"{instance} ended with {cause(code)}; {process.quoted_log()}"
        return ""

    def __enter__(self) -> "JoiningReplicas":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as ends:  # each is ended, whatever happens to the others
            for process in self._processes.values():
                process.terminate()
                ends.callback(process.stop, STOP_SECONDS)
