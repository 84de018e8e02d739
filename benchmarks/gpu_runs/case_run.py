"""One case's run under ``myxo up``, from its model and data to its figures."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.example_run import ROOT, SMALL_ENGINE_FLAGS, launch, lines, prepare_example, stopped
from benchmarks.gpu_runs.engine_deaths import EngineDeaths
from benchmarks.gpu_runs.layout_case import LAYOUT_CASES, SMALL_DATA, SMALL_RUN, LayoutCase
from benchmarks.gpu_runs.layout_figures import death_figures, problems, run_figures
from shared.process.child_process import with_parent

TOLD_SECONDS = 10.0
POLL_INTERVAL_S = 0.2
EIGHT_BITS, CPU_BLOCK = "model-8-bit", 32
SUMMARY_SECONDS = 120.0
WARM_START_ALONE = ("--num-rollout", "0", "--debug-train-only")

LEAVE_SECONDS = 20.0
"""Of the time of a run with deaths, kept for its end."""


@dataclass(frozen=True)
class CaseOptions:
    """What holds for all cases. ``steps``: of those that end by themselves; ``kills``: of those with deaths; ``seconds``: of a run;
    ``flags``: further ones of each run; ``directory``: where the runs lie."""

    device: str
    directory: Path
    steps: int
    kills: int
    seconds: float
    flags: tuple[str, ...] = ()


def run_case(name: str, gpus: str, options: CaseOptions) -> Iterator[dict[str, Any]]:
    """Yields the case's figures so far every `TOLD_SECONDS`, and once more with what is wrong when the run has ended.

    Args:
        gpus: its ``CUDA_VISIBLE_DEVICES``.
    """
    case, root, began = LAYOUT_CASES[name], options.directory.absolute() / f"gpu-runs-{name}", time.monotonic()
    code: int | None = None
    deaths: EngineDeaths | None = None

    def row() -> dict[str, Any]:
        head = {"case": name, "device": options.device, "gpus": case.gpus, "steps_asked": options.steps, "exit": code}
        return {
            **head,
            "seconds": round(time.monotonic() - began, 1),
            **run_figures(root),
            **({"deaths": [], "deaths_problem": ""} if deaths is None else _deaths_so_far(deaths, root, case)),
            "problems": [],
        }

    try:
        process = _started(case, root, gpus, options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        code = 1
        yield {**row(), "problems": [f"it was not started: {error}"]}
        return
    end = time.monotonic() + options.seconds
    deaths = _killing(case, root, options.kills, process, end)
    told, asked_to_end = time.monotonic(), False
    while code is None:
        try:
            code = process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                code = stopped(process)
            elif deaths is not None and deaths.ended and not asked_to_end:
                asked_to_end = True
                process.send_signal(signal.SIGINT)
        if code is None and time.monotonic() - told >= TOLD_SECONDS:
            told = time.monotonic()
            yield row()
    if asked_to_end:  # only a run that has trained all of its steps writes its summary by itself
        command = [sys.executable, "-m", "myxo.main", "summary", str(root)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=SUMMARY_SECONDS, check=False)
    last = row()
    yield {**last, "problems": problems(case, last)}


def run_words(case: LayoutCase, root: Path, config: list[str], options: CaseOptions) -> list[str]:
    """Returns the words of the run after ``myxo up``. Args: root: its directory. config: its file, and the flags that name its data."""
    on_gpus = options.device == "cuda"
    model = root.with_name(f"{root.name}-warm") / "hf" if case.adapters else _data(root) / (EIGHT_BITS if case.block else "model")
    return [
        *_common(root, model, config, options),
        *("--num-rollout", str(options.steps), "--eval-interval", "1000000"),  # the first and the last evaluation remain
        *(SMALL_ENGINE_FLAGS if on_gpus else ()),
        *case.flags,
        *(case.on_gpus if on_gpus else ()),
        *options.flags,
    ]


def warm_words(root: Path, config: list[str], options: CaseOptions) -> list[str]:
    """Returns the words of a run that trains the whole model on the demonstrations, and nothing else: as `run_words`."""
    return [*_common(root.with_name(f"{root.name}-warm"), _data(root) / "model", config, options, data=_data(root)), *WARM_START_ALONE]


def _common(root: Path, model: Path, config: list[str], options: CaseOptions, data: Path | None = None) -> list[str]:
    return [
        *(*config, "--fresh", "--no-console", "--name", root.name, "--dir", str(root.parent)),
        *("--hf-checkpoint", str(model), "--prompt-data", str((data or _data(root)) / "train.jsonl")),
        *("--rollout-device", options.device, "--train-device", options.device),
        *(SMALL_RUN if options.device == "cpu" else ()),
    ]


def _data(root: Path) -> Path:
    return root.with_name(f"{root.name}-data")


def _started(case: LayoutCase, root: Path, gpus: str, options: CaseOptions) -> subprocess.Popen[bytes]:
    """Makes model and data, and starts the run; what it prints goes to a file beside its directory. Raises what subprocess raises."""
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    on_gpus = options.device == "cuda"
    config = prepare_example(_data(root), case.prepared if on_gpus else SMALL_DATA)
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus} if on_gpus else {"OMP_NUM_THREADS": "1"})}
    with root.with_suffix(".out").open("wb") as file:

        def process(words: list[str]) -> subprocess.Popen[bytes]:
            command, none = launch(words), subprocess.DEVNULL
            return subprocess.Popen(with_parent(command), cwd=ROOT, stdin=none, stdout=file, stderr=file, env=environment)

        if case.adapters:
            warming = process(words := warm_words(root, config, options))
            try:
                if code := warming.wait(options.seconds):
                    raise subprocess.CalledProcessError(code, launch(words))
            except subprocess.TimeoutExpired:
                stopped(warming)
                raise
        if case.block:
            block = str(case.block if on_gpus else CPU_BLOCK)  # a CPU's model is smaller
            words = ["convert", str(_data(root) / "model"), str(_data(root) / EIGHT_BITS), "--to", "fp8-block", "--block", block, block]
            subprocess.run([sys.executable, "-m", "myxo.main", *words], cwd=ROOT, stdout=file, stderr=file, env=environment, check=True)
        return process(run_words(case, root, config, options))


def _killing(case: LayoutCase, root: Path, kills: int, process: subprocess.Popen[bytes], end: float) -> EngineDeaths | None:
    """Begins, on a thread, what kills the case's engine; returns it. None where none is killed."""
    if not case.killed:
        return None
    deaths = EngineDeaths(
        root,
        case.killed,
        kills,
        running=lambda: process.poll() is None,
        seconds_left=lambda: end - LEAVE_SECONDS - time.monotonic(),
    )
    threading.Thread(target=lambda: asyncio.run(deaths.run()), daemon=True).start()
    return deaths


def _deaths_so_far(deaths: EngineDeaths, root: Path, case: LayoutCase) -> dict[str, Any]:
    trainer, replica = lines(root / "logs" / "trainer-0.log"), lines(root / "logs" / f"{case.killed}.log")
    found = [death_figures(death, case.killed, trainer, replica) for death in list(deaths.deaths)]
    return {"deaths": found, "deaths_problem": deaths.problem}
