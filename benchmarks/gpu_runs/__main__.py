"""Whole runs of the arithmetic example in layouts of several GPUs, watched from outside, each with figures that show that it is right.

``python -m benchmarks.gpu_runs [--case ppo lora tp2 pp2-tp2 engine-pp2 colocated-pp2 eight-bits offload death] [--device cuda]
[--at-once] [--json FILE] [--write]`` makes the example's model and data for each case and runs it under ``myxo up``, one after another, or
with ``--at-once`` as many beside each other as the GPUs of ``CUDA_VISIBLE_DEVICES`` suffice for. FILE is rewritten while runs continue, so
that a command that is cut off leaves what it has.

- *ppo*: actor, critic and engine on a GPU each. *lora*: pushes carry adapters alone. *tp2*: a trainer over two GPUs, two engines.
  *pp2-tp2*: a trainer in two stages, an engine over two GPUs. *engine-pp2*: an engine in two stages. *colocated-pp2*: one that
  takes turns with the trainer on its GPUs. *eight-bits*: an engine whose weights are blocks of 8-bit floats.
  *offload*: the PyTorch backend's weights in the CPU's memory, copied anew for each push.
- *death*: a trainer and two engines, of which one is killed, up to ``--kills`` times, 0 to 6 ms after it has been asked to receive a push.
  Its replica starts another, which has its weights from the other replica or by the trainer's next push, whichever comes first. The run
  trains on until then, and is told to end (its exit code is 130); its model is larger (0.1 GB), so that a push takes longer than the kill.

Exit code 1 where a run has not ended well, its audit found something, engine and trainer differ in their log-probs, or what the case is for
did not happen: pushes of adapters alone, a death inside a push, a replica that serves again (weights from a peer: over NCCL on GPUs).
``problems`` says what. ``--device cpu`` runs every case with few prompts and steps on a CPU, ranks over gloo. ``--write`` puts the table of
the repository's figures into the docs, and measures nothing.
"""

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs.case_run import CaseOptions, run_case
from benchmarks.gpu_runs.layout_case import LAYOUT_CASES, shares, waves
from benchmarks.gpu_runs.layout_figures import table
from benchmarks.page_table import put_table
from shared.config.devices import visible_gpus

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_runs.json"
PAGE = ROOT / "docs" / "layouts.md"
CPU_CASES_GPUS = 8
"""On a CPU cases are run as if there were so many GPUs."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=tuple(LAYOUT_CASES), default=list(LAYOUT_CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--at-once", action="store_true", help="run cases beside each other where GPUs suffice")
    parser.add_argument("--steps", type=int, default=20, help="of each run but the one with deaths (default 20)")
    parser.add_argument("--kills", type=int, default=3, help="at most, as far as --seconds suffice (default 3)")
    parser.add_argument("--seconds", type=float, default=240, help="for one run (default 240)")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="where the runs lie")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there; the repository's are benchmarks/results/gpu_runs.json"
    )
    parser.add_argument("--write", action="store_true", help="put the repository's figures into the docs; measures nothing")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of each run")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "gpu_runs", table(json.loads(RESULTS.read_text())))
        return 0
    visible = visible_gpus() if arguments.device == "cuda" else [str(index) for index in range(CPU_CASES_GPUS)]
    try:
        planned = waves(arguments.case, len(visible), arguments.at_once)
    except ValueError as error:
        parser.error(str(error))
    options = CaseOptions(
        arguments.device, arguments.directory, arguments.steps, arguments.kills, arguments.seconds, tuple(arguments.flags)
    )
    found = measure(planned, visible, options, arguments.json)
    print(table(found))
    return int(any(row["problems"] for row in found["cases"]))


def measure(planned: Sequence[Sequence[str]], visible: Sequence[str], options: CaseOptions, file: Path | None) -> dict[str, Any]:
    """Runs the cases of each wave beside each other, and returns the figures; they are written to ``file`` as they come."""
    rows = dict[str, dict[str, Any]]()
    head = {"measured": datetime.now(UTC).date().isoformat(), "machine": machine(options.device, len(visible))}
    for wave in planned:
        told: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue()
        for name, gpus in shares(wave, visible).items():
            threading.Thread(target=_run, args=(name, gpus, options, told), daemon=True).start()
        under_way = len(wave)
        while under_way:
            row = told.get()
            if isinstance(row, BaseException):
                raise row
            if row is None:
                under_way -= 1
                continue
            rows[row["case"]] = row
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({**head, "cases": list(rows.values())}, indent=2) + "\n")
            if row["exit"] is not None:
                print(json.dumps(row), file=sys.stderr, flush=True)
    return {**head, "cases": list(rows.values())}


def _run(name: str, gpus: str, options: CaseOptions, told: "queue.Queue[dict[str, Any] | BaseException | None]") -> None:
    try:
        for row in run_case(name, gpus, options):
            told.put(row)
        told.put(None)
    except BaseException as error:
        told.put(error)


def machine(device: str, gpus: int) -> str:
    """Returns in words what the figures are measured on."""
    if device == "cpu":
        return f"{os.cpu_count()} cores, no GPU"
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    return f"{gpus} x {name}"


if __name__ == "__main__":
    sys.exit(main())
