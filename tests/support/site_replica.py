"""``services.rollout`` with the scripted engine, as a machine of another site runs it: ``python -m tests.support.site_replica``.

``MYXO_TEST_CLOCK_SKEW``: seconds that the machine's clock is ahead.
"""

import importlib
import os
import runpy
import time

SKEW = float(os.environ.get("MYXO_TEST_CLOCK_SKEW", "0"))
_time = time.time
time.time = lambda: _time() + SKEW

import torch  # noqa: E402

from services.rollout.engine.engine_process import CPU_LAUNCHER  # noqa: E402
from tests.support import forking  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in (
        "services.rollout.engine.receiver.command_session",
        "services.rollout.rollout_service",
        "tests.chaos.fast.scripted_scheduler",
    ):
        importlib.import_module(module)  # before the forks
    forking.install(places={str(CPU_LAUNCHER): "tests.chaos.fast.scripted_engine"})
    runpy.run_module("services.rollout", run_name="__main__")
