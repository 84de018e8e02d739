"""A run whose engine somebody else runs: a stock SGLang server gets each version over SGLang's own weight group, dies once and comes back.

``python -m benchmarks.external_engine [--device cuda] [--json FILE]`` makes random weights of a shape, starts two ``sglang.launch_server``
on the second GPU of ``CUDA_VISIBLE_DEVICES`` and a run on the first, whose ``external_engines`` names an address that leads to one of them.
After ``--pushes`` versions that server gets SIGKILL, at once or while a version is being loaded. The address refuses for a few seconds, and
leads to the other server then, which has the checkpoint's weights: as if it were started again, without the minutes that this takes. Exit
code 1 with ``problems`` where something is wrong. ``--device cpu`` does the same with a tiny model over gloo.

FILE is written every few seconds. Its ``phases`` are ``loads`` (versions before the death) and ``returns`` (the rest), each with what was
seen in it, once it is over. A command that is cut off leaves what it has; with the same FILE the next one keeps ``loads`` and kills after
the first version.

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
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.colocate import ColocatedCase, of_shape
from benchmarks.command_line import conditions
from benchmarks.example_run import END_SECONDS, KERNEL_FLAGS, ROOT, at, launch, lines
from shared.config.devices import VISIBLE, visible_gpus
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port
from tests.support.stock_engine import StockEngine

POLL_INTERVAL_S = 0.1
TOLD_SECONDS = 5.0
AWAY_SECONDS = 3.0
AT_ONCE = 1 << 16  # bytes that the address passes on
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
            "--max-total-tokens",  # two servers have room on one GPU
            "131072",
            "--cuda-graph-max-bs-decode",
            "64",
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


class Address:
    """An address that leads to a server's port, until it is closed, or to another one."""

    def __init__(self) -> None:
        self._port, self.url = (port := free_port()), f"http://127.0.0.1:{port}"
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []

    def lead_to(self, port: int) -> None:
        """Passes connections on to a port of this machine."""
        listener = self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def close(self) -> None:
        """Refuses connections, and breaks those that there are."""
        for one in [self._listener, *self._open]:
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._listener, self._open = None, []

    def _accept(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                here, _ = listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    here.close()
                    continue
                self._open = [one for one in self._open if one.fileno() >= 0] + [here, there]
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(AT_ONCE):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class WatchedEngine:
    """Asks the server for the name of its weights, kills it once after ``pushes`` versions, and has ``spare`` in its place, on a thread."""

    def __init__(self, engine: StockEngine, spare: StockEngine, address: Address, pushes: int) -> None:
        self._engine, self._spare, self._address, self._pushes, self._over = engine, spare, address, pushes, threading.Event()
        self.asked_back: list[str] = []
        self.up: dict[str, float] = {}
        self.death: dict[str, Any] = {}
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, then the servers."""
        self._over.set()
        self._thread.join()
        self._address.close()
        self._engine.kill()
        self._spare.kill()

    def _watch(self) -> None:
        while not self._over.wait(POLL_INTERVAL_S):
            for name, server in (("server", self._engine), ("spare", self._spare)):
                if name not in self.up and listens(server.port):
                    self.up[name] = round(time.monotonic() - self._began, 1)
                    if name == "server":
                        self._address.lead_to(server.port)
            with contextlib.suppress(OSError, ValueError):
                name = self._name()
                if self.asked_back[-1:] != [name]:
                    self.asked_back.append(name)
                if self.death and "@" in name and "back_after" not in self.death:
                    self.death |= {"back_with": name, "back_after": round(time.time() - self.death["at"], 1)}
                if not self.death and "spare" in self.up and len([name for name in self.asked_back if "@" in name]) >= self._pushes:
                    self.death = {"at": time.time(), "version": name}
                    self._engine.kill()
                    self._address.close()
                    self._over.wait(AWAY_SECONDS)
                    self._address.lead_to(self._spare.port)

    def _name(self) -> str:
        with urllib.request.urlopen(self._address.url + "/model_info", timeout=30) as answer:
            return str(json.loads(answer.read())["weight_version"])


def listens(port: int) -> bool:
    """Returns whether something listens at a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    except OSError:
        return False


def run(device: str, arguments: argparse.Namespace) -> int:
    """Runs it and writes the figures. Returns 1 where something is wrong."""
    began, case, directory = time.monotonic(), CASES[device], arguments.directory.absolute()
    data, root = directory / "external-engine-data", directory / "external-engine"
    shutil.rmtree(root, ignore_errors=True)
    gpus = visible_gpus()[:2] if device == "cuda" else []
    if device == "cuda" and len(gpus) < 2:
        raise SystemExit("it takes two GPUs: one trains, on the other are the servers")
    earlier = loads_of(arguments.json, device)
    config = of_shape(case, data)
    logs = [root.with_name(f"external-engine.{name}.log") for name in ("server", "spare")]
    for log in logs:
        log.unlink(missing_ok=True)
    engines = [StockEngine(data / "model", log, *case.engine, gpu=gpus[-1] if gpus else None) for log in logs]
    for engine in engines:
        engine.start()
    address = Address()
    words = [
        *(*config, "--fresh", "--name", root.name, "--dir", str(directory), "--num-rollout", str(arguments.steps)),
        *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl")),
        *("--rollout-external-engine-addrs", address.url, *case.flags),
    ]
    environment = {**os.environ, **({VISIBLE: gpus[0]} if gpus else {"OMP_NUM_THREADS": "1"})}
    watched = WatchedEngine(engines[0], engines[1], address, 1 if earlier else arguments.pushes)
    found: dict[str, Any] = {}
    phases: dict[str, Any] = {"loads": earlier} if earlier else {}
    process = ChildProcess("run", launch(words), root.with_suffix(".out"), environment, watchdog=True)
    try:
        code: int | None = None
        while code is None:
            left = began + arguments.seconds - time.monotonic()
            time.sleep(max(0.0, min(TOLD_SECONDS, left)))
            code = process.exit_code() if left > 0 else stopped(process)
            found = {**conditions(), "device": device, "shape": case.shape, "exit": code, **figures(root, logs, watched)}
            found |= {"up_after": watched.up, "seconds": round(time.monotonic() - began, 1)}
            if watched.death and "loads" not in phases:
                phases["loads"] = {name: found[name] for name in ("pushes", "asked_back", "groups", "up_after", "seconds")}
            if code is not None and "back_after" in watched.death:
                phases["returns"] = {name: found[name] for name in ("death", "asked_back", "failures", "seconds")}
            found["phases"] = phases
            found["problems"] = [] if code is None else problems(found, arguments.steps, "nccl" if device == "cuda" else "gloo")
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    finally:
        process.stop(0)
        watched.end()
    print(json.dumps(found, indent=2))
    return int(bool(found["problems"]))


def stopped(process: ChildProcess) -> int:
    """Ends a run whose time is over. Returns its exit code, or that of a command that `timeout` has ended."""
    process.stop(END_SECONDS)
    code = process.exit_code()
    return 124 if code is None else code


def loads_of(written: Path | None, device: str) -> dict[str, Any] | None:
    """Returns the first phase of an earlier command on such a device, where that was over and the second not; None: both are to be done."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = json.loads(written.read_text()) if written is not None else {}
        phases: dict[str, Any] = known.get("phases") or {}
        if known.get("device") == device and "returns" not in phases:
            return phases.get("loads")
    return None


def figures(root: Path, servers: Sequence[Path], watched: WatchedEngine) -> dict[str, Any]:
    """Returns what the logs of the run and of the servers say so far."""
    rollout, summary = lines(root / "logs" / "rollout-0.log"), root / "summary.json"
    told: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    said = "".join(log.read_text(errors="replace") for log in servers if log.exists())
    joined = re.findall(r"init custom process group: .* backend=(\w+)", said)
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
    loaded = [*pushes, *(found["phases"].get("loads") or {"pushes": []})["pushes"]]
    told = [*(str(push["version"]) for push in pushes), str(death.get("version")).partition("@")[0]]  # it may have died as it was named
    named = [name.partition("@")[0] for name in found["asked_back"] if "@" in name]
    wrong = {
        f"it ended with {found['exit']}": found["exit"] != 0,
        f"{found['steps']} of {steps} steps": found["steps"] != steps,
        f"audit: {found['audit']}": found["audit"] != "ok",
        f"engine and trainer differ by {difference}": difference is None or difference > LARGEST_DIFFERENCE[backend],
        f"groups: {dict(found['groups'])}": set(found["groups"]) != {backend},
        "versions have the same weights": len({push["digest"] for push in loaded}) < 2,
        f"the server named versions {sorted(set(named) - set(told))} that were not loaded": not set(named) <= set(told),
        "the server did not come back with weights": "back_after" not in death,
        "no version after its return": not any(push["after_death"] for push in pushes),
    }
    return [words for words, holds in wrong.items() if holds]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=3, help="versions before the server is killed")
    parser.add_argument("--seconds", type=float, default=210, help="for all of it")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="where model and run lie")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    return run(arguments.device, arguments)


if __name__ == "__main__":
    sys.exit(main())
