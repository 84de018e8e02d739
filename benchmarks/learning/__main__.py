"""GRPO under several bounds on staleness, seeds and objectives: held-out reward over steps and over wall time.

``python -m benchmarks.learning --bounds 0 1 2 4 8 --seeds 3 --objectives decoupled naive --device cpu --json FILE`` makes the example's
model and prompts, if they are not there, and runs ``myxo up`` for each bound, seed and objective, ``--jobs`` at a time. The file has the
curves of every run as they grow, so that what is cut off (``--seconds``) leaves curves, and the same command continues the runs that the
file does not have as finished. ``--take`` puts runs of other files into it. ``--write`` draws docs/pictures/learning.png and writes the
tables of docs/learning.md from the file.

``arithmetic`` is the quick start's model behind its warm start, which two cores train. ``smollm2`` is SmolLM2-135M-Instruct on sums of
reasoning-gym, on two GPUs that all runs share, each run's trainer on one and its engine on the other. Without a way to PyPI
give its package or GGUF file by ``--gguf``; ``--prepare`` makes model and prompts, and runs nothing.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.learning import learning_data
from benchmarks.learning.learning_run import GPUS_OF_A_RUN, OBJECTIVES, LearningRun, planned
from benchmarks.learning.run_fleet import FAILED, FINISHED, RunFleet
from shared.runtime.safe_files import replace_file

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "learning.json"
STEPS = {"arithmetic": 20, "smollm2": 80}


def main() -> int:
    """The command line. Exits 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=tuple(learning_data.EXAMPLES), default="arithmetic")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8], metavar="N", help="values of max_staleness")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--objectives", nargs="+", choices=tuple(OBJECTIVES), default=["decoupled", "naive"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of a run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="that the runs share")
    parser.add_argument("--seconds", type=float, default=6 * 3600, help="for all runs; those that still run then are cut off")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="SmolLM2's file, or the wheel of the package that holds it")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "learning", help="where data and runs lie")
    parser.add_argument("--prepare", action="store_true", help="make model and prompts, run nothing")
    parser.add_argument("--take", type=Path, nargs="+", default=[], metavar="FILE", help="add the runs of these files, begin none")
    parser.add_argument("--json", type=Path, default=RESULT, help="the file of the curves")
    parser.add_argument("--write", action="store_true", help="draw the picture and write the tables of docs/learning.md; begin no run")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of the runs")
    given = parser.parse_args()
    if given.device == "cuda" and given.gpus < GPUS_OF_A_RUN:
        parser.error(f"--gpus {given.gpus}: expected {GPUS_OF_A_RUN} at least, one for the trainers and one for the engines")
    figures = LearningFigures(given.json, given.device)
    for path in given.take:
        figures.take(path)
    if not given.take and not given.write:
        _run(given, figures)
    if given.write:
        from benchmarks.learning import learning_page

        learning_page.write(figures.runs, figures.conditions)
    return 1 if any(run["state"] == FAILED for run in figures.runs) else 0


def _run(given: argparse.Namespace, figures: "LearningFigures") -> None:
    steps = given.steps or STEPS[given.example]
    runs = list(planned(given.example, given.device, given.bounds, given.seeds, given.objectives, steps))
    missing = [run for run in runs if not figures.has(run)]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them there already", file=sys.stderr, flush=True)
    data, directory = given.directory / given.example, given.directory / "runs"
    if missing or given.prepare:
        learning_data.prepare(given.example, data, given.gguf)
    if missing and not given.prepare:
        shape: dict[str, Any] = {"jobs": given.jobs, "gpus": given.gpus, "data": data, "directory": directory, "flags": given.flags}
        RunFleet(missing, figures.put, **shape).run(given.seconds)


class LearningFigures:
    """The file of the curves: of each run what it is and its figures.

    Args:
        path: the file; what it has is read. device: that runs from now on compute on.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._told = path, dict[str, int]()
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.runs: list[dict[str, Any]] = known.get("runs", [])
        self.conditions: dict[str, Any] = known.get("conditions", {})
        self._device = device

    def has(self, run: LearningRun) -> bool:
        """Returns whether the file has the run from its first step to its last."""
        return any(_is(known, run.identity) and known["state"] == FINISHED for known in self.runs)

    def put(self, run: LearningRun, figures: dict[str, Any]) -> None:
        """Takes a run's figures in the place of its earlier ones, and writes the file."""
        self._place({**run.identity, **figures})
        self.conditions.setdefault(f"{run.example} {run.device}", _conditions(run.device))
        self._write()
        told = len(figures["evaluations"]), figures["state"]
        if self._told.get(run.name) != hash(told):
            self._told[run.name] = hash(told)
            reached = figures["evaluations"][-1]["reward"] if figures["evaluations"] else None
            print(f"{run.name}: {figures['state']}, {len(figures['steps'])} steps, held-out {reached}", file=sys.stderr, flush=True)

    def take(self, path: Path) -> None:
        """Adds the runs of another file, over those of the same kind."""
        other = json.loads(path.read_text())
        for run in other["runs"]:
            self._place(run)
        self.conditions |= other["conditions"]
        self._write()

    def _place(self, run: dict[str, Any]) -> None:
        identity = {key: run[key] for key in LearningRun.__dataclass_fields__}
        self.runs = [known for known in self.runs if not _is(known, identity)] + [run]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        replace_file(self._path, f'{{"conditions": {json.dumps(self.conditions)},\n"runs": [\n{lines}\n]}}\n'.encode())


def _is(known: dict[str, Any], identity: dict[str, Any]) -> bool:
    return all(known[key] == value for key, value in identity.items())


def _conditions(device: str) -> dict[str, Any]:
    """Returns when and on what figures are measured."""
    where = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if device == "cuda":
        import torch

        return {**where, "gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name()}
    return where


if __name__ == "__main__":
    sys.exit(main())
