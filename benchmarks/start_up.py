"""Time from ``myxo up`` to the first generated tokens, by phases.

``python -m benchmarks.start_up [--device cuda|cpu] [--runs 2] [--json FILE] [--write] [--flags ...]`` makes a model with random weights
(0.6 billion parameters on GPUs), and starts runs, one after the other, with one directory for what is cached
(``MYXO_CACHE``): it is new and empty for the first, and the later ones find what the earlier ones have compiled. Each run is ended once
its engine has drawn tokens. Trainer and engine start side by side, so that phases of theirs do not add up. The engine's own log
tells whole seconds. ``--write`` puts the table into docs/deployment.md.

``--commands`` measures the command line alone instead: seconds of wall and CPU time, children included, of ``myxo --help``, ``myxo up
--help``, and of dry runs of the quick start and of one with 17,000 prompts and a vocabulary of 152,000.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
    parser.add_argument("--commands", action="store_true", help="measure --help and dry runs instead, each --runs times")
    given = parser.parse_args()
    if given.commands:
        prepare(given.directory, "cpu")
        measured = list(commands(given.directory, given.runs))
        write(given.json, {"runs": given.runs, "commands": measured})
        return int(any(row["exit"] for row in measured))
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


def commands(directory: Path, runs: int) -> Iterator[dict[str, Any]]:
    """Yields the best of some runs of each command, in seconds, as the process and its children took them, and the worst exit code."""
    small, large = directory / "cpu", directory / "vocabulary"
    shutil.rmtree(large, ignore_errors=True)
    shutil.copytree(small, large)
    widen(large)
    measured = {"myxo --help": ["--help"], "myxo up --help": ["up", "--help"]}
    for name, data in (("quick start", small), ("17,000 prompts, vocabulary of 152,000", large)):
        words = ["up", str(EXAMPLE / "quickstart.toml"), "--dry-run", "--dir", str(directory), "--hf-checkpoint", str(data / "model")]
        words += ["--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", str(data / "heldout.jsonl")]
        measured[f"dry run, {name}"] = [*words, "--sft-data", str(data / "sft.jsonl")]
    for name, words in measured.items():
        walls, used, codes = [], [], []
        for _ in range(runs):
            before, began = os.times(), time.monotonic()
            codes.append(subprocess.run([sys.executable, "-m", "myxo", *words], stdout=subprocess.DEVNULL).returncode)
            after = os.times()
            walls.append(time.monotonic() - began)
            used.append(after.children_user + after.children_system - before.children_user - before.children_system)
        row = {"command": name, "seconds": round(min(walls), 2), "cpu_seconds": round(min(used), 2), "exit": max(codes)}
        print(json.dumps(row), flush=True)
        yield row


def widen(data: Path) -> None:
    """Gives the model a vocabulary of 152,000 tokens, and the run 17,000 prompts of some 200 characters."""
    import torch
    from safetensors.torch import load_file, save_file

    model, chosen = data / "model", random.Random(0)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = [token for token in vocabulary if len(token) == 1]
    tokens, merges = list(letters), tokenizer["model"]["merges"]
    taken = max(*vocabulary.values(), *(added["id"] for added in tokenizer["added_tokens"])) + 1
    while len(vocabulary) < 151_000:
        left, right = chosen.choice(tokens), chosen.choice(letters)
        if (token := left + right) not in vocabulary and len(token) < 9:
            vocabulary[token] = taken = taken + 1
            merges.append([left, right])
            tokens.append(token)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": 152_064, "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    ends = [name for name in weights if "embed_tokens" in name or "lm_head" in name]
    weights |= {name: torch.zeros(152_064, config["hidden_size"]) for name in ends}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    many = ({**rows[index % len(rows)], "prompt": 20 * (rows[index % len(rows)]["prompt"] + " ")} for index in range(17_000))
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))


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
