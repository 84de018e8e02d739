"""``myxo simulate``: the buffer's simulation, which is started like a service, for no service is imported here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

COMMAND = ("-m", "services.buffer.simulation")


def simulate(options: Sequence[str]) -> int:
    """Runs it to its end with these options; returns its exit code."""
    process = subprocess.Popen([sys.executable, *COMMAND, *options])
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # a terminal sends it to both: let the simulation end by itself
            continue
