"""Many replicas with the scripted engine that come and go: ``python -m tests.support.site_crowd DIRECTORY COUNT AT_ONCE``.

Each is a fork of this process, `AT_ONCE` begin together and serve before the ones before them get SIGTERM, as spot machines do. Figures go
to DIRECTORY/crowd.json once the last ones alone are left, and these go when the input ends.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

from services.rollout.engine.engine_process import CPU_LAUNCHER
from shared.process.child_process import ChildProcess
from tests.chaos.fast import preload  # noqa: F401
from tests.support import forking

NOTICE_S, JOIN_S = 30.0, 600.0  # a spot machine's; the longest that a wave may take to serve, on a machine with few cores


def serves(log: Path) -> bool:
    """Returns whether a replica has had weights."""
    return log.exists() and '"caught_up"' in log.read_text(errors="replace")


def begun(directory: Path, number: int) -> ChildProcess:
    """Starts a replica."""
    instance = f"rollout-{number}"
    return ChildProcess(
        instance,
        [sys.executable, "-m", "services.rollout"],
        directory / f"{instance}.log",
        {**os.environ, "MYXO_INSTANCE": instance, "MYXO_SITE_CACHE": str(directory / "cache")},
    )


def ended(replica: ChildProcess) -> float:
    """Waits for a replica that has had notice, and returns the seconds that it took. Raises AssertionError: it took longer than notice."""
    began = time.monotonic()
    code = replica.wait(NOTICE_S)
    assert code == 0, (replica.name, code)
    return time.monotonic() - began


def main(directory: Path, count: int, at_once: int) -> None:
    joins, leaves, here = list[float](), list[float](), list[ChildProcess]()
    try:
        for first in range(0, count, at_once):
            began = time.monotonic()
            joined = [begun(directory, number) for number in range(first, first + at_once)]
            before, here = here, [*here, *joined]
            while not all(serves(directory / f"{one.name}.log") for one in joined):
                assert time.monotonic() - began < JOIN_S, f"replicas {first} to {first + at_once} do not serve"
                assert all(one.running for one in here), [one.name for one in here if not one.running]
                time.sleep(0.2)
            joins.append(round(time.monotonic() - began, 1))
            for one in before:
                one.terminate()
            leaves += [round(ended(one), 1) for one in before]
            here = joined
        figures = {"replicas": count, "at_once": at_once, "seconds_until_a_wave_serves": joins, "seconds_after_notice": max(leaves)}
        (directory / "crowd.tmp").write_text(json.dumps(figures))
        (directory / "crowd.tmp").rename(directory / "crowd.json")
        sys.stdin.read()
        for one in here:
            one.terminate()
        for one in here:
            ended(one)
    finally:
        for one in here:
            one.kill()


if __name__ == "__main__":
    importlib.import_module("tests.chaos.fast.scripted_scheduler")
    forking.install(places={str(CPU_LAUNCHER): "tests.chaos.fast.scripted_engine"})
    forking.settle()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
