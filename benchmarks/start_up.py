"""Time from ``myxo up`` to the first generated tokens, by phases.

``python -m benchmarks.start_up [--device cuda|cpu] [--runs 2] [--json FILE] [--write] [--flags ...]`` makes a model with random weights
(0.6 billion parameters on GPUs), and starts runs, one after the other, with one directory for what is cached
(``MYXO_CACHE``): it is new and empty for the first, and the later ones find what the earlier ones have compiled. Each run is ended once
its engine has drawn tokens. Trainer and engine start side by side, so that phases of theirs do not add up. The engine's own log
tells whole seconds. ``--write`` puts the table into docs/deployment.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import write
from benchmarks.page_table import put_table
from benchmarks.start_up_phases import WAYS, milestones, phases
from shared.process.child_process import ChildProcess
from shared.runtime.user_cache import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "start_up.json"
PAGE = ROOT / "docs" / "deployment.md"
EXAMPLE = ROOT / "examples" / "arithmetic"

POLL_INTERVAL_S = 0.5
STOP_GRACE_S = 20.0

SHAPES = {"cpu": ["--layers", "2", "--hidden-size", "128"], "cuda": ["--layers", "16", "--hidden-size", "2048"]}
"""Device → options of the example's ``prepare.py``; the larger one has some 600 million parameters."""

ON_GPUS = [
    *("--train-dtype", "bfloat16", "--lr", "1e-6", "--sglang-dtype", "bfloat16", "--sglang-attention-backend", "triton"),
    *("--sglang-sampling-backend", "pytorch", "--sglang-grammar-backend", "none"),
]

BOTH = [
    "--num-rollout",
    "100",
    "--skip-eval-before-train",
    "--sft-steps",
    "1",
    "--sft-batch-size",
    "8",
    "--no-console",
    "--no-save-final-hf",
]


def main() -> int:
    """The command line. Exits 1 where a run drew no tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="one after the other")
    parser.add_argument("--seconds", type=float, default=240, help="for one start")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "start-up", help="where model and runs lie")
    parser.add_argument("--inherit-caches", action="store_true", help="kernel caches of the user's own instead of new ones")
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULT}")
    parser.add_argument("--write", action="store_true", help="write the table of docs/deployment.md from the repository's figures")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of the runs")
    given = parser.parse_args()
    if given.write:
        put_table(PAGE, "start_up", table(json.loads(RESULT.read_text())))
        return 0
    prepare(given.directory, given.device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="myxo-start-up-") as caches:
        for index in range(given.runs):
            environment = dict(os.environ)
            if not given.inherit_caches:
                environment = {key: value for key, value in environment.items() if key not in VARIABLES} | {"MYXO_CACHE": caches}
            row = start(given.directory, given.device, index, environment, given.seconds, given.flags)
            rows.append({"caches": "the user's" if given.inherit_caches else "empty" if index == 0 else "kept", **row})
            rows[-1]["kernels"] = {} if given.inherit_caches else kernels(Path(caches), row["began"])
            print(json.dumps(rows[-1]), flush=True)
            write(given.json, {"device": given.device, "gpu": _gpu(given.device), "flags": given.flags, "runs": rows})
    return 0 if all(row["seconds"] is not None for row in rows) else 1


def prepare(directory: Path, device: str) -> None:
    """Makes model and problems."""
    command = [sys.executable, str(EXAMPLE / "prepare.py"), str(directory / device), "--if-missing", *SHAPES[device]]
    made = ChildProcess("prepare.py", [*command, "--demonstrations", "64", "--train", "512", "--heldout", "8"], directory / "prepare.log")
    if code := made.wait(600):
        sys.exit(f"prepare.py ended with {code}: {made.quoted_log()}")


def start(directory: Path, device: str, index: int, environment: dict[str, str], seconds: float, flags: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of one start: ``seconds`` from ``myxo up`` to the first tokens (None: none came), milestones and phases."""
    data, name = directory / device, f"start-{index}"
    command = [
        *(sys.executable, "-m", "myxo.main", "up", str(EXAMPLE / "quickstart.toml"), "--fresh", *BOTH, "--name", name),
        *("--dir", str(directory), "--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl")),
        *("--eval-prompt-data", str(data / "heldout.jsonl"), "--sft-data", str(data / "sft.jsonl")),
        *("--rollout-device", device, "--train-device", device, *(ON_GPUS if device == "cuda" else []), *flags),
    ]
    began, root = time.time(), directory / name
    process, reached = ChildProcess(name, command, directory / f"{name}.log", environment), dict[str, float]()
    offset = time.localtime().tm_gmtoff
    try:
        while process.running() and time.time() - began < seconds:
            time.sleep(POLL_INTERVAL_S)
            reached = milestones(root / "logs", began, offset)
            if "first tokens" in reached:
                break
    finally:
        said = process.quoted_log() if "first tokens" not in reached else ""
        process.stop(STOP_GRACE_S)
    told = {"began": began, "seconds": reached.get("first tokens"), "phases": phases(reached), "milestones": reached}
    return {**told, "log": said[-2000:]} if said else told


def kernels(caches: Path, began: float) -> dict[str, Any]:
    """Returns for each cache how many files the run has added, and in which of its seconds the first and the last were made."""
    found: dict[str, Any] = {}
    for folder in sorted((caches / "kernels").glob("*")):
        times = [path.stat().st_mtime - began for path in folder.rglob("*") if path.is_file()]
        if own := sorted(at for at in times if at > 0):
            found[folder.name] = {"files": len(own), "first": round(own[0], 1), "last": round(own[-1], 1)}
    return found


def table(figures: dict[str, Any]) -> str:
    """Returns the phases of each run as a table, and what they were measured on."""
    runs = figures["runs"]
    heads = [f"caches {row['caches']}" for row in runs]
    lines = [f"| seconds | {' | '.join(heads)} |", "|---|" + "---|" * len(runs)]
    for name in WAYS:
        cells = [row["phases"].get(name) for row in runs]
        if any(cell is not None for cell in cells):
            lines.append(f"| {name} | {' | '.join('' if cell is None else f'{cell:.1f}' for cell in cells)} |")
    total = " | ".join("—" if row["seconds"] is None else f"**{row['seconds']:.1f}**" for row in runs)
    where = figures["gpu"] or "no GPU"
    lines += [f"| **until the first tokens** | {total} |", "", f"{where}, {figures['cores']} cores, {figures['at'][:10]}."]
    return "\n".join(lines)


def _gpu(device: str) -> str:
    if device != "cuda":
        return ""
    import torch

    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    sys.exit(main())
