"""A run whose trainer and engine share one GPU, watched from outside: whose memory lies there in whose turn, and what a turn costs.

``python -m benchmarks.colocate [--case quickstart large 4b] [--device cuda] [--json FILE]`` makes a model and data, runs them under
``myxo up --colocate``, and reads the GPU's memory fifty times a second meanwhile. *quickstart*: the arithmetic example as it is. *large*:
some 600 million random parameters in bfloat16, which learn nothing in a few steps, so that there is something to move. *4b*: the shape of
Qwen3-4B, 16 groups of 8 with responses of 256 tokens in the mean; Adam's state lies in host memory, where it is updated.

The GPU is the first of ``CUDA_VISIBLE_DEVICES``. FILE is written again and again while a run continues, so that one that is cut off leaves
what it has. ``--write`` puts the table of `RESULTS` into docs/deployment.md.

Columns. ``memory_bytes``: of the GPU in use, median at the ends of the engine's turns (``generating``), least at those of the trainer's
(``training``). ``free_bytes``: as the trainer itself sees it once the engine has woken, and once it sleeps. ``sleep``, ``wake``: until the
engine has given its memory back, has all of it again. ``push``: weights by the memory channel; ``out``, ``back``: of what the trainer
keeps in host memory. Seconds are medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import conditions
from benchmarks.end_to_end.length_distribution import LengthDistribution, rows
from benchmarks.end_to_end.model_shapes import config_of, write_checkpoint
from benchmarks.end_to_end.whole_run import CONFIG
from benchmarks.example_run import KERNEL_FLAGS, ROOT, SMALL_ENGINE_FLAGS, at, launch, lines, middle, prepare_example, stopped
from benchmarks.page_table import markdown_table, put_table

RESULTS = Path(__file__).parent / "results" / "colocate.json"
PAGE = Path(__file__).parents[1] / "docs" / "deployment.md"
POLL_INTERVAL_S = 0.02
TOLD_SECONDS = 15.0
PROMPTS, PROMPT_TOKENS = 1024, 64
"""Of the cases with a shape: how many, and the tokens of each."""

SETTLED_SECONDS = 0.1
"""Of each turn's end that are looked at: by then everything has moved."""


@dataclass(frozen=True)
class ColocatedCase:
    """A run. ``prepared``: options of the example's ``prepare.py``; ``flags``: of the run; ``engine``: of it on a GPU.

    ``shape``: of `benchmarks.end_to_end.model_shapes`; the model and the prompts are then that benchmark's.
    """

    prepared: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    engine: tuple[str, ...] = tuple(SMALL_ENGINE_FLAGS)
    shape: str = ""
    lengths: str = ""


CASES = {
    "quickstart": ColocatedCase(flags=("--num-rollout", "20", "--eval-interval", "20")),
    "large": ColocatedCase(
        prepared=("--layers", "16", "--hidden-size", "2048", "--demonstrations", "256", "--train", "1024", "--heldout", "32"),
        flags=(
            *("--num-rollout", "5", "--train-dtype", "bfloat16", "--lr", "1e-6", "--save-interval", "100"),
            *("--sft-steps", "2", "--sft-lr", "1e-6", "--no-save-final-hf", "--sglang-dtype", "bfloat16"),
        ),
    ),
    "4b": ColocatedCase(
        flags=(
            *("--num-rollout", "5", "--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--max-staleness", "0"),
            *("--train-dtype", "bfloat16", "--lr", "1e-9", "--max-tokens-per-gpu", "4096", "--rollout-max-response-len", "1024"),
            *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--sglang-dtype", "bfloat16"),
            *("--no-save-at-start", "--snapshot-interval", "0"),  # a checkpoint takes 56 GB: the last step's is the only one
        ),
        engine=(*KERNEL_FLAGS, "--sglang-mem-fraction-static", "0.4", "--sglang-cuda-graph-max-bs-decode", "128"),
        shape="4b",
        lengths="geometric:256",
    ),
    "tiny": ColocatedCase(
        flags=(
            *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--max-staleness", "0"),
            *("--train-dtype", "float32", "--lr", "1e-9", "--rollout-max-response-len", "48", "--sglang-dtype", "float32"),
            *("--no-save-at-start", "--snapshot-interval", "0"),
        ),
        shape="tiny",
        lengths="geometric:16",
    ),
}
"""By name; ``tiny`` is 4b for trying it out on a CPU."""


def main() -> int:
    """The command line. Exits 1 where a run did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=["quickstart", "large", "4b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=600, help="for one run")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="where the runs lie")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of the run")
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULTS}")
    parser.add_argument("--write", action="store_true", help="put the table of RESULTS into the docs; nothing is measured")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "colocate", table(json.loads(RESULTS.read_text())))
        return 0
    found: list[dict[str, Any]] = []
    well = True
    for case in arguments.case:
        before = list(found)
        for row in run(case, arguments.device, arguments.directory, arguments.seconds, arguments.flags):
            found = [*before, row]
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        well = well and found[-1]["exit"] == 0
        print(json.dumps(found[-1]), flush=True)
    return 0 if well else 1


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the figures of runs on a GPU as a table of the documentation."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield row["case"]
        yield f"{row['steps']}, audit {row['audit']}"
        yield f"{row['mean_abs_logprob_diff']:.0e}"
        yield ", ".join(f"{row['memory_bytes'][turn] / 1e9:.0f} GB" for turn in ("generating", "training"))
        yield ", ".join(f"{row[f'{what}_seconds'] * 1e3:.0f} ms" for what in ("sleep", "wake"))
        yield f"{row['push_bytes'] / 1e6:,.0f} MB in {row['push_seconds'] * 1e3:.0f} ms"
        for part in ("optimizer", "weights"):
            yield f"{row['out_bytes'][part] / 1e6:,.0f} MB in {row['out_seconds'][part] * 1e3:.0f} ms"

    heads = ["case", "steps", "engine − trainer", "GPU memory: generating, training", "sleep, wake", "push"]
    heads += ["optimizer or gradients out", "weights out"]
    return markdown_table(heads, map(cells, rows))


def run(case: str, device: str, directory: Path, seconds: float, flags: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the case's figures so far every `TOLD_SECONDS`, and once more when the run has ended, with its exit code."""
    chosen, name = CASES[case], f"colocate-{case}"
    data, root = directory / f"{name}-data", directory / name
    config = of_shape(chosen, data) if chosen.shape else prepare_example(data, chosen.prepared)
    shutil.rmtree(root, ignore_errors=True)
    words = [
        *(*config, "--fresh", "--colocate", "--name", name, "--dir", str(directory)),
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl")),
        *("--rollout-device", device, "--train-device", device, *(chosen.engine if device == "cuda" else ()), *chosen.flags, *flags),
    ]
    memory = Memory() if device == "cuda" else None
    process, end, code = subprocess.Popen(launch(words), cwd=ROOT, stdin=subprocess.DEVNULL), time.monotonic() + seconds, None
    while code is None:
        try:
            code = process.wait(max(0.0, min(TOLD_SECONDS, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                code = stopped(process)
        samples = memory.samples() if memory is not None else []
        yield {**conditions(), "case": case, "device": device, "exit": code, **figures(root, samples)}
    if memory is not None:
        memory.stop()


def of_shape(case: ColocatedCase, data: Path) -> list[str]:
    """Makes random weights of a shape, and prompts. Returns the run's file and the flags that make its lengths."""
    data.mkdir(parents=True, exist_ok=True)
    dtype = case.flags[case.flags.index("--train-dtype") + 1]
    lengths = LengthDistribution.parse(case.lengths, int(case.flags[case.flags.index("--rollout-max-response-len") + 1]))
    vocabulary = config_of(case.shape, dtype)["vocab_size"]
    write_checkpoint(data / "model", case.shape, dtype)
    (data / "train.jsonl").write_text("".join(rows(lengths, PROMPTS, 1, PROMPT_TOKENS, vocabulary, seed=0)))
    return [str(CONFIG), "--rollout-stop-token-ids", *map(str, lengths.stop_tokens(vocabulary, 3))]


def figures(root: Path, samples: list[tuple[float, int]]) -> dict[str, Any]:
    """What logs, summary and the GPU's memory say.

    Args:
        samples: (seconds since the epoch, bytes in use), in order.
    """
    trainer, rollout = (lines(root / "logs" / name) for name in ("trainer-0.log", "rollout-0.log"))
    taken, given = ([at(line) for line in trainer if line["event"] == event] for event in ("engines_offloaded", "engines_onloaded"))
    pushes = [line for line in trainer if line["event"] == "weights_pushed"]
    moved = [line for line in trainer if line["event"] == "offloaded"]
    summary = root / "summary.json"
    told: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    kept = ("steps", "audit", "accuracy_before", "accuracy_after", "reward_first", "reward_last", "mean_abs_logprob_diff", "wall_seconds")
    return {
        **{key: told.get(key) for key in kept},
        "turns": len(given),
        "memory_bytes": {
            "generating": used(samples, [(begin, end) for begin in given for end in _next(taken, begin)], statistics.median),
            "training": used(samples, [(begin, end) for begin in taken for end in _next(given, begin)], min),
        },
        "free_bytes": {
            turn: middle(line["free_bytes"] for line in trainer if line["event"] == event and line.get("free_bytes") is not None)
            for turn, event in (("generating", "engines_onloaded"), ("training", "engines_offloaded"))
        },
        "sleep_seconds": middle(line["seconds"] for line in rollout if line["event"] == "asleep"),
        "wake_seconds": middle(line["seconds"] for line in trainer if line["event"] == "engines_onloaded"),
        "push_seconds": middle(line["seconds"] for line in pushes),
        "push_wire_seconds": middle(line["wire_seconds"] for line in pushes),
        "push_bytes": pushes[-1]["bytes"] if pushes else None,
        "out_seconds": {part: middle(line["seconds"] for line in moved if line["parts"] == [part]) for part in ("optimizer", "weights")},
        "out_bytes": {
            part: max((line["bytes"] for line in moved if line["parts"] == [part]), default=0) for part in ("optimizer", "weights")
        },
        "back_seconds": middle(line["seconds"] for line in trainer if line["event"] == "brought_back"),
    }


class Memory:
    """Reads how much of the run's GPU's memory is in use, on a thread, until `stop`."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        place = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        by_uuid = isinstance(place, str)
        device = pynvml.nvmlDeviceGetHandleByUUID(place) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(place)
        self._samples: list[tuple[float, int]] = []
        self._over = threading.Event()

        def look() -> None:
            while not self._over.wait(POLL_INTERVAL_S):
                self._samples.append((time.time(), int(pynvml.nvmlDeviceGetMemoryInfo(device).used)))

        self._thread = threading.Thread(target=look, daemon=True)
        self._thread.start()

    def samples(self) -> list[tuple[float, int]]:
        """Returns what was read by now: when, and the bytes in use."""
        return list(self._samples)

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()


def first_visible(told: str | None) -> int | str:
    """Returns number or UUID of the first GPU of a process with this ``CUDA_VISIBLE_DEVICES``. None: all are visible."""
    first = (told or "").split(",")[0].strip()
    return int(first) if first.isdecimal() else first or 0


def used(samples: list[tuple[float, int]], spans: list[tuple[float, float]], pick: Callable[[list[int]], float]) -> float | None:
    """Of the samples at the end of each span."""
    times = [when for when, _ in samples]
    found: list[int] = []
    for begin, end in spans:
        first = bisect_left(times, max(begin, end - SETTLED_SECONDS))
        found += [size for _, size in samples[first : bisect_left(times, end)]]
    return pick(found) if found else None


def _next(times: list[float], after: float) -> list[float]:
    return [found for found in times if found > after][:1]


if __name__ == "__main__":
    sys.exit(main())
