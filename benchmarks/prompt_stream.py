"""Reading a very long prompt file in shuffled order: memory, speed, and the right line after kill −9.

``python -m benchmarks.prompt_stream [--lines N] [--reads N] [--json FILE]`` writes a file of N lines into a temporary directory and has a
process read prompts of it the way the buffer does (found, parsed, tokenised), group number by group number. Half way the process kills
itself with SIGKILL; a second one continues behind the last number that was written down. Then every number must have had its line, and no
line may have come twice in an epoch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from shared.data.prompts import TrainingPrompts
from shared.data.rows import MixedOrder
from shared.data.tokenizer import Tokenizer

LINES, READS = 10_000_000, 1_000_000
WRITTEN = 1000
"""Prompts between two times that the reader writes down how far it is, as the buffer's ledger does."""

LIMIT_BYTES = 300 * 2**20
"""What a reader may have resident at most."""

READER_SECONDS = 7200
SEED = 42


def main() -> int:
    """The command line. Returns the exit code: 1 where a line was wrong or memory over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=LINES, metavar="N", help=f"lines of the file (default {LINES})")
    parser.add_argument("--reads", type=int, default=READS, metavar="N", help=f"prompts to read (default {READS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--reader", nargs=3, metavar=("DIR", "LINES", "LAST"), help=argparse.SUPPRESS)
    parser.add_argument("--die-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        directory, lines, last = options.reader
        read(Path(directory), int(lines), int(last), options.die_at)
        return 0
    figures = measure(options.lines, options.reads)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["right"] and figures["resident_bytes"] <= LIMIT_BYTES else 1


def measure(lines: int, reads: int) -> dict[str, Any]:
    """Writes the file, reads it with a death in the middle, checks what was read."""
    with tempfile.TemporaryDirectory(prefix="myxo-prompt-stream-") as name:
        directory = Path(name)
        size = write(directory, lines)
        killed = _reader(directory, lines, reads, die_at=reads // 2)
        resumed_at = _done(directory)
        resumed = _reader(directory, lines, reads)
        rows = np.fromfile(directory / "rows.bin", dtype=np.int64)
    order = MixedOrder([lines], [1.0], True, SEED)
    numbers = sorted({*range(0, reads, max(1, reads // 1000)), *range(max(0, resumed_at - 5), min(reads, resumed_at + 5))})
    expected = [order.row(number) for number in numbers]
    once = all(len(np.unique(rows[first : first + lines])) == len(rows[first : first + lines]) for first in range(0, len(rows), lines))
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other jobs, no GPU",
        "lines": lines,
        "file_bytes": size,
        "reads": reads,
        "killed_with": signal.Signals(-killed["code"]).name,
        "resumed_at": resumed_at,
        "right": bool(len(rows) == reads and once and rows[numbers].tolist() == expected),
        "resident_bytes": max(killed["resident_bytes"], resumed["resident_bytes"]),
        "resident_before_bytes": resumed["resident_before_bytes"],
        "index_seconds": round(resumed["index_seconds"], 2),
        "prompts_per_second": round(resumed["prompts_per_second"]),
    }


def write(directory: Path, lines: int) -> int:
    """The file, and a model directory with a tokenizer of characters. Returns the file's bytes."""
    characters = {character: number for number, character in enumerate("0123456789+=?")}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    (directory / "model").mkdir()
    tokenizer.save(str(directory / "model" / "tokenizer.json"))
    with (directory / "prompts.jsonl").open("w") as file:
        for row in range(lines):
            file.write(f'{{"prompt": "{row}+1=", "label": "{row + 1}", "metadata": {{"level": 1}}}}\n')
    return (directory / "prompts.jsonl").stat().st_size


def read(directory: Path, lines: int, last: int, die_at: int | None) -> None:
    """A reader: continues behind what is written down in ``rows.bin``, to group ``last`` or to its death; figures to ``reader.json``."""
    before = _resident()
    began = time.monotonic()
    prompts = TrainingPrompts(_config(directory), Tokenizer(directory / "model"))
    assert len(prompts) == lines
    indexed = time.monotonic()
    first = _done(directory)
    with (directory / "rows.bin").open("ab") as file:
        rows: list[int] = []
        for number in range(first, last):
            prompt = prompts.at(number)
            rows.append(int(str(prompt.label)) - 1)
            assert prompt.content == f"{rows[-1]}+1="
            if len(rows) == WRITTEN or number == last - 1:
                file.write(np.asarray(rows, np.int64).tobytes())
                file.flush()
                rows.clear()
            if number == die_at or number == last - 1:
                seconds = time.monotonic() - indexed
                figures = {
                    "resident_bytes": _resident(peak=True),
                    "resident_before_bytes": before,
                    "index_seconds": indexed - began,
                    "prompts_per_second": (number + 1 - first) / seconds,
                }
                (directory / "reader.json").write_text(json.dumps(figures))
            if number == die_at:
                os.kill(os.getpid(), signal.SIGKILL)


def _reader(directory: Path, lines: int, last: int, die_at: int | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.prompt_stream", "--reader", str(directory), str(lines), str(last)]
    death = [] if die_at is None else ["--die-at", str(die_at)]
    code = subprocess.run([*command, *death], timeout=READER_SECONDS, check=False).returncode
    assert code == (0 if die_at is None else -signal.SIGKILL), f"the reader ended with {code}"
    return {**json.loads((directory / "reader.json").read_text()), "code": code}


def _done(directory: Path) -> int:
    """How many prompts are written down."""
    path = directory / "rows.bin"
    return path.stat().st_size // 8 if path.exists() else 0


def _config(directory: Path) -> RunConfig:
    return parse(
        {
            "run": {"name": "prompt-stream", "dir": str(directory / "runs")},
            "model": {"hf_checkpoint": str(directory / "model")},
            "data": {"prompt_data": str(directory / "prompts.jsonl"), "rollout_shuffle": True, "rollout_seed": SEED},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2},
        }
    )


def _resident(peak: bool = False) -> int:
    """Bytes of this process in memory now, or at most so far."""
    key = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


if __name__ == "__main__":
    sys.exit(main())
