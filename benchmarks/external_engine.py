"""A run whose engine somebody else runs: a stock SGLang server gets each version over SGLang's own weight group, dies once and comes back.

``python -m benchmarks.external_engine [--device cuda] [--json FILE]`` makes random weights of a shape, starts ``sglang.launch_server`` on
the second GPU of ``CUDA_VISIBLE_DEVICES`` and a run on the first, whose ``external_engines`` names it. After ``--pushes`` versions the
server gets SIGKILL, at once or while a version is being loaded, and is started again. FILE is written again and again meanwhile, so that a
command that is cut off leaves what it has. Exit code 1 with ``problems`` where something is wrong. ``--device cpu`` does the same with a
tiny model over gloo.

Figures. ``pushes``: each version with its bytes, seconds from disk to verified (``pull``), from the group's forming to serving (``load``).
``asked_back``: the names of weights that the server gave when it was asked, in order, those of this run in the form VERSION@MARK.
``groups``: how often the server joined a group, by backend. ``logprob_diff``: engine − trainer, mean of absolute values, of equal versions.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.colocate import ColocatedCase, of_shape
from benchmarks.command_line import conditions
from benchmarks.example_run import KERNEL_FLAGS, ROOT, at, launch, lines, stopped
from shared.config.devices import VISIBLE, visible_gpus
from shared.process.child_process import die_with_parent
from tests.support.stock_engine import StockEngine

POLL_INTERVAL_S = 0.1
TOLD_SECONDS = 5.0
LARGEST_DIFFERENCE = {"gloo": 5e-3, "nccl": 0.03}  # of the means; kernels differ, and on GPUs both compute in bfloat16
COMMON = (
    *("--lr", "1e-5", "--update-weight-transport", "nccl", "--in-flight-on-push", "abort"),
    *("--no-console", "--max-staleness", "1"),
)
CASES = {
    "cuda": ColocatedCase(
        flags=(
            *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "256"),
            *("--max-tokens-per-gpu", "4096", "--update-weight-buffer-size", str(1 << 29), "--train-dtype", "bfloat16"),
            *COMMON,
        ),
        engine=(
            *(word.replace("--sglang-", "--") for word in KERNEL_FLAGS),
            "--mem-fraction-static",
            "0.4",
            "--dtype",
            "bfloat16",
            "--cuda-graph-max-bs-decode",
            "128",
        ),
        shape="0.6b",
        lengths="geometric:96",
    ),
    "cpu": ColocatedCase(
        flags=(
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "48"),
            *("--update-weight-buffer-size", "65536", "--train-device", "cpu", "--train-dtype", "float32", *COMMON),
        ),
        engine=(),
        shape="tiny",
        lengths="geometric:16",
    ),
}


class WatchedEngine:
    """Asks the server for the name of its weights, kills it once after ``pushes`` versions, and starts it again, on a thread."""

    def __init__(self, engine: StockEngine, pushes: int) -> None:
        self._engine, self._pushes, self._over = engine, pushes, threading.Event()
        self.asked_back: list[str] = []
        self.death: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, then the server."""
        self._over.set()
        self._thread.join()
        self._engine.kill()

    def _watch(self) -> None:
        while not self._over.wait(POLL_INTERVAL_S):
            with contextlib.suppress(OSError, ValueError):
                name = str(self._engine.get("/model_info")["weight_version"])
                if self.asked_back[-1:] != [name]:
                    self.asked_back.append(name)
                if self.death and "@" in name and "back_after" not in self.death:
                    self.death |= {"back_with": name, "back_after": round(time.time() - self.death["at"], 1)}
                if not self.death and len([name for name in self.asked_back if "@" in name]) >= self._pushes:
                    self.death = {"at": time.time(), "version": name}
                    self._engine.kill()
                    self._engine.start()


def run(device: str, arguments: argparse.Namespace) -> int:
    """Runs it and writes the figures. Returns 1 where something is wrong."""
    case, directory = CASES[device], arguments.directory.absolute()
    data, root = directory / "external-engine-data", directory / "external-engine"
    shutil.rmtree(root, ignore_errors=True)
    gpus = visible_gpus()[:2] if device == "cuda" else []
    if device == "cuda" and len(gpus) < 2:
        raise SystemExit("it takes two GPUs: one trains, on the other is the server")
    config = of_shape(case, data)
    log = root.with_name("external-engine.server.log")
    log.unlink(missing_ok=True)
    engine = StockEngine(data / "model", log, *case.engine, gpu=gpus[-1] if gpus else None)
    engine.start()
    words = [
        *(*config, "--fresh", "--name", root.name, "--dir", str(directory), "--num-rollout", str(arguments.steps)),
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl")),
        *("--rollout-external-engine-addrs", engine.url, *case.flags),
    ]
    environment = {**os.environ, **({VISIBLE: gpus[0]} if gpus else {"OMP_NUM_THREADS": "1"})}
    began, code, watched = time.monotonic(), None, WatchedEngine(engine, arguments.pushes)
    found: dict[str, Any] = {}
    with root.with_suffix(".out").open("wb") as output:
        process = subprocess.Popen(
            launch(words), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, preexec_fn=die_with_parent
        )
        try:
            while code is None:
                left = began + arguments.seconds - time.monotonic()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, min(TOLD_SECONDS, left))) if left > 0 else stopped(process)
                found = {**conditions(), "device": device, "shape": case.shape, "exit": code, **figures(root, log, watched)}
                found["problems"] = [] if code is None else problems(found, arguments.steps, "nccl" if device == "cuda" else "gloo")
                if arguments.json is not None:
                    arguments.json.parent.mkdir(parents=True, exist_ok=True)
                    arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        finally:
            watched.end()
    print(json.dumps(found, indent=2))
    return int(bool(found["problems"]))


def figures(root: Path, server: Path, watched: WatchedEngine) -> dict[str, Any]:
    """Returns what the logs of the run and of the server say so far."""
    rollout, summary = lines(root / "logs" / "rollout-0.log"), root / "summary.json"
    told: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    joined = re.findall(r"init custom process group: .* backend=(\w+)", server.read_text(errors="replace") if server.exists() else "")
    names = ("version", "bytes", "pull_seconds", "load_seconds", "digest")
    failures = [line for line in rollout if line["event"] in ("fenced", "not_caught_up", "external_engine_awaited")]
    away = watched.death.get("at", time.time())
    return {
        **{name: told.get(name) for name in ("steps", "audit", "max_staleness_seen", "trained_tokens", "wall_seconds")},
        "logprob_diff": told.get("mean_abs_logprob_diff"),
        "pushes": [
            {name: line.get(name) for name in names} | {"after_death": at(line) > away} for line in rollout if line["event"] == "caught_up"
        ],
        "asked_back": list(watched.asked_back),
        "groups": Counter(joined),
        "death": dict(watched.death),
        "failures": [{"event": line["event"], "why": str(line.get("reason") or line.get("error"))[:300]} for line in failures],
    }


def problems(found: dict[str, Any], steps: int, backend: str) -> list[str]:
    """Returns what is wrong with a run that has ended, in words."""
    pushes, difference, death = found["pushes"], found["logprob_diff"], found["death"]
    told = [*(str(push["version"]) for push in pushes), str(death.get("version")).partition("@")[0]]  # it may have died as it was named
    named = [name.partition("@")[0] for name in found["asked_back"] if "@" in name]
    wrong = {
        f"it ended with {found['exit']}": found["exit"] != 0,
        f"{found['steps']} of {steps} steps": found["steps"] != steps,
        f"audit: {found['audit']}": found["audit"] != "ok",
        f"engine and trainer differ by {difference}": difference is None or difference > LARGEST_DIFFERENCE[backend],
        f"groups: {dict(found['groups'])}": set(found["groups"]) != {backend},
        "versions have the same weights": len({push["digest"] for push in pushes}) < 2,
        f"the server named versions {sorted(set(named) - set(told))} that were not loaded": not set(named) <= set(told),
        "the server did not come back with weights": "back_after" not in death,
        "no version after its return": not any(push["after_death"] for push in pushes),
    }
    return [words for words, holds in wrong.items() if holds]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pushes", type=int, default=3, help="versions before the server is killed")
    parser.add_argument("--seconds", type=float, default=200, help="for the run")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="where model and run lie")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    return run(arguments.device, arguments)


if __name__ == "__main__":
    sys.exit(main())
