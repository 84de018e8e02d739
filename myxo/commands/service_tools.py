"""Commands whose work belongs to a service: it is started like the service itself, for none is imported here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

TOOLS = {
    "simulate": ("services.buffer.simulation", "throughput and staleness of every policy, simulated"),
    "convert": ("services.trainer.convert_command", "a model from Hugging Face's format to torch_dist, or back"),
    "replay": ("services.trainer.batch_replay", "train the batches again that a run has dumped, without the run"),
}
"""Command → the module that does it, and what it is."""


def run_tool(command: str, options: Sequence[str]) -> int:
    """Runs it to its end with these options; returns its exit code."""
    module, _ = TOOLS[command]
    process = subprocess.Popen([sys.executable, "-m", module, *options])
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # a terminal sends it to both: let the work end by itself
            continue
