"""Prefill and decode apart, one engine each, beside two engines that do both: long prompts, and new weights while requests run.

``python -m benchmarks.disaggregated [--device cuda] [--backend nixl] [--json FILE]`` starts two rollout services with an engine on a GPU
each, first as prefill and decode, then as two regular ones, with random weights of Qwen3-0.6B's shape. ``--concurrency`` clients ask the
replicas' proxies for ``--response`` tokens after prompts of ``--prompt`` random ones, each again as soon as it is answered; two further
ones stream. Every ``--interval`` seconds a version lies on disk, whole, and both replicas load it. Each of the two is measured for
``--seconds``. FILE is written every second, so that a run that is cut off leaves what it has. Without ``--backend`` mooncake_tcp is tried
where nothing comes by nixl. ``--device cpu`` does the same with a tiny model over TCP, and says nothing about speed.

Figures. ``tokens_per_s``: response tokens of the answers that ended, by the time measured. ``first_token_s``, ``between_tokens_s``: of the
streams, medians and 95th percentiles; ``longest_gap_s``: the longest time without a token, a push's pause among them. ``pushes``: of each
version and replica the seconds from the gate's closing until it serves again (``load``), and before that from disk (``pull``).
``errors``: answers that were none, by what they said. ``versions``: of the weights, as the answers name them.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.command_line import conditions
from benchmarks.end_to_end.model_shapes import write_checkpoint
from benchmarks.example_run import lines
from shared.config.devices import visible_gpus

START_SECONDS, WARM_SECONDS, REQUEST_SECONDS, STREAMS = 180.0, 45.0, 120.0, 2
SHAPES = {"cuda": ("0.6b", "bfloat16"), "cpu": ("tiny", "float32")}
KERNELS = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.8}
ROUTER = {"MYXO_ROUTER_URL": "http://127.0.0.1:9", "MYXO_ROUTER_KEY": "none"}
"""A router that is not there: the replicas open their proxies for it."""


class Clients:
    """The requests of one part. ``urls``: of the replicas' proxies, which they take in turn."""

    def __init__(self, urls: list[str], vocabulary: int, prompt: int, response: int) -> None:
        self._urls, self._vocabulary, self._prompt, self._response = urls, vocabulary, prompt, response
        self.tokens = self.answers = 0
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.errors: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self._sent = 0

    async def ask(self, session: aiohttp.ClientSession, streams: bool) -> None:
        """Asks again and again until cancelled."""
        while True:
            self._sent += 1
            ids = [random.randrange(8, self._vocabulary) for _ in range(self._prompt)]
            sampling = {"max_new_tokens": self._response, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "stream": streams, "return_logprob": not streams}
            began = time.monotonic()
            try:
                async with session.post(f"{self._urls[self._sent % len(self._urls)]}/generate", json=body) as answer:
                    if not answer.ok:
                        raise OSError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
                    await (self._streamed(answer, began) if streams else self._whole(answer))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
                self.errors[str(error)[:300] or type(error).__name__] += 1
                await asyncio.sleep(0.2)

    async def _whole(self, answer: aiohttp.ClientResponse) -> None:
        meta = (await answer.json())["meta_info"]
        if len(meta["output_token_logprobs"]) != self._response:
            raise ValueError(f"{len(meta['output_token_logprobs'])} tokens: {meta['finish_reason']}")
        self.versions.update(str(span["version"]) for span in meta.get("weight_versions") or [{"version": meta["weight_version"]}])
        self.tokens, self.answers = self.tokens + self._response, self.answers + 1

    async def _streamed(self, answer: aiohttp.ClientResponse, began: float) -> None:
        last, pieces = began, 0
        async for chunk in answer.content.iter_any():
            if b"data: {" not in chunk:
                continue
            now = time.monotonic()
            (self.gaps if pieces else self.first).append(now - last)
            last, pieces = now, pieces + 1
        self.tokens, self.answers = self.tokens + self._response, self.answers + 1

    def figures(self, seconds: float) -> dict[str, Any]:
        """Returns what was seen so far, of a part of so many seconds."""
        return {
            "seconds": round(seconds, 1),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "answers": self.answers,
            "first_token_s": middle(self.first),
            "between_tokens_s": middle(self.gaps),
            "longest_gap_s": round(max(self.gaps, default=0.0), 3),
            "errors": dict(self.errors),
            "versions": dict(self.versions),
        }


def middle(values: list[float]) -> dict[str, float]:
    """Returns the median and the 95th percentile."""
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 4), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4)} if ordered else {}


class Part:
    """One way of routing: two replicas, the versions on disk, and the clients."""

    def __init__(self, name: str, arguments: argparse.Namespace, model: Path, report: Any) -> None:
        from tests.support.pushing import Replicated

        self.name, self._arguments, self._model, self._report = name, arguments, model, report
        self._device, gpus = arguments.device, visible_gpus() if arguments.device == "cuda" else []
        flags, kinds = dict[str, Any](KERNELS if gpus else {}), dict[str, Any](rollout_replicas=2)
        if name == "apart":
            flags["disaggregation-transfer-backend"] = arguments.backend
            kinds = {"engine_groups": [{"worker_type": kind, "replicas": 1} for kind in ("prefill", "decode")]}
        self._directory = arguments.directory / name
        shutil.rmtree(self._directory, ignore_errors=True)
        self.stage = Replicated(
            self._directory,
            model,
            replicas=2,
            environment=lambda number: {**ROUTER, **({"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {})},
            rollout={"rollout_device": self._device, "sglang": flags, "max_staleness": 1, **kinds},
            trainer={"train_device": self._device},
            weights={"update_weight_transport": "disk"},
        )

    def run(self) -> None:
        """Measures, and reports again and again."""
        with self.stage as stage:
            self._write(1)
            both = lambda cards: [one.version for one in cards.values()] == [1, 1]  # noqa: E731
            stage.until("the first version on both replicas", both, START_SECONDS)
            asyncio.run(self._measured())

    def _write(self, version: int) -> None:
        """Writes a version as a trainer does, and announces it."""
        from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
        from shared.schema.weight_messages import WeightsSnapshot
        from shared.transfer.tensor_file import TensorFiles
        from shared.transfer.weight_checkpoint import WeightCheckpoints

        began, service = time.monotonic(), self.stage.link.service
        writer = WeightCheckpointWriter(WeightCheckpoints.of_run(self.stage.config), version)
        held = TensorFiles(sorted(self._model.glob("*.safetensors")))
        for name, (dtype, shape) in held.tensors.items():
            writer.add({name: (dtype, shape, held[name])})
        beside = [file for file in self._model.glob("*.json") if "index" not in file.name]
        saved = writer.publish(lambda path: [shutil.copy(file, path) for file in beside] and None)
        seconds = time.monotonic() - began
        about = {"path": str(saved.path), "bytes": saved.bytes, "seconds": seconds, "at": time.time()}
        snapshot = WeightsSnapshot(version=version, digest=saved.digest, form="full", **about)
        bus, bucket = service.bus, service.subjects.weights_bucket
        self.stage.link.call(bus.put(bucket, "snapshot", snapshot.encode(), deadline=30), 30)

    async def _measured(self) -> None:
        arguments, urls = self._arguments, sorted({one.engine for one in self.stage.cards().values() if one.engine})
        vocabulary = json.loads((self._model / "config.json").read_text())["vocab_size"]
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**22) as session:
            warm = Clients(urls, vocabulary, arguments.prompt, 8)
            warming = [asyncio.create_task(warm.ask(session, False)) for _ in range(2 * len(urls))]
            end = time.monotonic() + WARM_SECONDS
            while warm.answers < 4 * len(urls) and time.monotonic() < end:
                await asyncio.sleep(0.1)
            for task in warming:
                task.cancel()
            if not warm.answers:
                raise RuntimeError(f"no request was answered within {WARM_SECONDS:g} s: {dict(warm.errors)}")
            clients, began, version = Clients(urls, vocabulary, arguments.prompt, arguments.response), time.monotonic(), 1
            asking = [asyncio.create_task(clients.ask(session, number < STREAMS)) for number in range(arguments.concurrency + STREAMS)]
            try:
                while (passed := time.monotonic() - began) < arguments.seconds:
                    if passed > version * arguments.interval:
                        version += 1
                        await asyncio.to_thread(self._write, version)
                    await asyncio.sleep(1.0)
                    self._report(
                        self.name, {**clients.figures(time.monotonic() - began), **self._pushes(), "warm_errors": dict(warm.errors)}
                    )
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    def _pushes(self) -> dict[str, Any]:
        pushes, failures = [], []
        for number in range(2):
            for line in lines(self._directory / f"rollout-{number}.log"):
                if line["event"] == "caught_up":
                    told = {"version": line["version"], "load": line.get("load_seconds"), "pull": line.get("pull_seconds")}
                    pushes.append({"replica": number, **told})
                elif line["event"] in ("fenced", "not_caught_up", "engine_killed"):
                    failures.append({"replica": number, "event": line["event"], "why": str(line.get("reason") or line.get("error"))[:300]})
        return {"pushes": pushes, "failures": failures}


def problems(found: dict[str, Any]) -> list[str]:
    """Returns what is wrong with the parts that were measured, in words."""
    told = []
    for name in ("apart", "plain"):
        part = found.get(name) or {}
        if not part.get("answers"):
            told.append(f"{name} was not measured: see not_measured")
            continue
        told += [f"{name}: {failure}" for failure in part["failures"][:1]]
        if part["errors"]:
            told.append(f"{name}: {sum(part['errors'].values())} answers were none: {next(iter(part['errors']))}")
        if len({push["version"] for push in part["pushes"]}) < 2:
            told.append(f"{name}: no version came after the first")
    return told


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cuda")
    parser.add_argument("--backend", help="by what keys and values are sent; default: nixl, on a CPU mooncake_tcp")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once, beside the streams")
    parser.add_argument("--seconds", type=float, default=60, help="of each part")
    parser.add_argument("--interval", type=float, default=15, help="seconds between two versions")
    parser.add_argument("--only", choices=("apart", "plain"), help="this part alone")
    parser.add_argument("--directory", type=Path, help="for models, versions and logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures there, as they come")
    arguments = parser.parse_args()
    backends = [arguments.backend] if arguments.backend else [*["nixl"] * (arguments.device == "cuda"), "mooncake_tcp"]
    if arguments.device == "cuda" and len(visible_gpus()) < 2:
        raise SystemExit("it takes two GPUs: each has an engine")
    arguments.directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="disaggregated-"))).absolute()
    shape, dtype = SHAPES[arguments.device]
    model = arguments.directory / "model"
    shutil.rmtree(model, ignore_errors=True)
    write_checkpoint(model, shape, dtype)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * (arguments.prompt + arguments.response)}))
    given = ("device", "prompt", "response", "concurrency", "interval")
    found: dict[str, Any] = {**conditions(), "shape": shape, **{name: getattr(arguments, name) for name in given}}

    def report(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        found["problems"] = problems(found)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")

    def measure(name: str, backend: str) -> bool:
        arguments.backend = backend
        try:
            Part(name, arguments, model, report).run()
            return True
        except Exception as error:  # the other part is measured all the same
            found.setdefault("not_measured", {})[f"{name} by {backend}"] = f"{type(error).__name__}: {str(error)[-3000:]}"
            report(name, found.get(name, {}))
            return False

    if arguments.only != "plain":
        found["backend"] = next((backend for backend in backends if measure("apart", backend)), None)
    if arguments.only != "apart":
        measure("plain", "none")
    print(json.dumps(found, indent=2))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
