"""What benchmarks of whole runs share: the arithmetic example's files, a run under ``myxo up``, and what its services' logs say."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic"
END_SECONDS = 60.0
"""The time that a run has to end once it is asked to."""

KERNEL_FLAGS = ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none"]
SMALL_ENGINE_FLAGS = [*KERNEL_FLAGS, "--sglang-mem-fraction-static", "0.3", "--sglang-cuda-graph-max-bs-decode", "32"]
"""Of the example's engine on a GPU."""


def prepare_example(data: Path, options: Iterable[str] = ()) -> list[str]:
    """Makes the arithmetic example's model and data. Returns the run's file and the flags that name the data.

    Args:
        options: of the example's ``prepare.py``.
    """
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py"), str(data), *options], check=True)
    return [str(EXAMPLE / "quickstart.toml"), "--eval-prompt-data", str(data / "heldout.jsonl"), "--sft-data", str(data / "sft.jsonl")]


def launch(words: list[str]) -> list[str]:
    """Returns the command of a run with these words."""
    return [sys.executable, "-m", "myxo.main", "up", *words]


def stopped(process: subprocess.Popen[bytes]) -> int:
    """Ends a run whose time is over. Returns its exit code."""
    process.terminate()
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def middle(values: Iterable[float]) -> float | None:
    """Returns the median, None of nothing."""
    held = list(values)
    return round(statistics.median(held), 4) if held else None


def lines(log: Path) -> list[dict[str, Any]]:
    """Returns the JSON lines of a service's log; none where ranks have written into each other's."""
    found = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def at(line: dict[str, Any]) -> float:
    """Returns when a line was written, seconds since the epoch."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()
