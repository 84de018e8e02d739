"""How far the log-probs of engine and trainer lie apart by precision and alignment, and what each costs.

``python -m benchmarks.alignment [--device cuda] [--cases off close fp8 moe …] [--out FILE] [--log-dir DIR]``. A case has an engine, which
samples responses to random prompts, and a trainer, which computes their log-probs and takes optimizer steps; both have the same random
weights, made here, or those of ``--model``. On GPUs all engines start at once on one GPU and are measured one after the other; on CPUs the
cases run one after the other. The rows are written as they come; after ``--seconds`` what still runs is ended, and its row says so.

Cases: ``off``, ``close``, ``bitwise`` (CPUs alone) are a run's alignment for a dense model of Qwen3-0.6B's sizes (a tiny one on CPUs) in
bfloat16 (float32 on CPUs). ``fp8``: both load what ``myxo convert --to fp8-block`` makes of it. ``moe``: a model with experts, one row
with the trainer's own choice of experts and one with the engine's replayed; ``moe-close``: the same in alignment ``close``.
"""

import argparse
import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.routing_replay import SHAPES, versions, write_model

RESULTS = Path(__file__).parent / "results" / "alignment.json"
CASES = ("off", "close", "bitwise", "fp8", "moe", "moe-close")
DEFAULTS = {"cpu": ("off", "close", "bitwise", "moe"), "cuda": ("off", "close", "fp8", "moe", "moe-close")}
PROMPTS = (3, 17, 33, 70)  # tokens
DENSE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
# Several engines share the GPU: what each takes is bounded by its tokens, not by a share of what is free
GPU_FLAGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.7,
    "max-total-tokens": 32768, "max-running-requests": 64, "cuda-graph-max-bs-decode": 64,
}  # fmt: skip
MICRO_BATCH_TOKENS = {"cpu": 1 << 20, "cuda": 4096}


def make_model(directory: Path, case: str, device: str) -> Path:
    """Writes the random checkpoint of a case; returns its directory."""
    if case.startswith("moe"):
        write_model(directory, SHAPES["tiny" if device == "cpu" else "cut"])
        return directory
    write_dense(directory, TINY if device == "cpu" else DENSE, device)
    if case != "fp8":
        return directory
    command = [sys.executable, "-m", "services.trainer.convert_command", str(directory), f"{directory}-fp8", "--to", "fp8-block"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return Path(f"{directory}-fp8")


def write_dense(directory: Path, sizes: dict[str, Any], device: str) -> None:
    """Writes a random checkpoint of Qwen3's, made on the device: in bfloat16, on a CPU in float32."""
    import torch
    import transformers

    from tests.support.tiny_model import character_tokenizer

    torch.manual_seed(1)
    config = transformers.Qwen3Config(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32 if device == "cpu" else torch.bfloat16)
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def differences(ratio: Any) -> dict[str, Any]:
    """Returns how far the log-probs of two differ. ``ratio``: the one's minus the other's of each token, float64."""
    import numpy as np

    mean, largest = float(np.abs(ratio).mean()), float(np.abs(ratio).max())
    return {"tokens": len(ratio), "mean": mean, "max": largest, "k3": float((np.expm1(ratio) - ratio).mean())}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value := row.get(name, ""), float) else str(value) for name in columns))
    Console(width=180).print(table)


@contextmanager
def alone(scratch: Path) -> Iterator[None]:
    """Waits for the GPU for what is timed."""
    with (scratch / "timed").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class CaseMeasurement:
    """One case's engine and trainer, in a process of its own. ``rows`` are written to ``scratch/CASE.json`` as they come."""

    def __init__(self, case: str, arguments: argparse.Namespace, scratch: Path) -> None:
        from tests.support.run_config import run_config, write_jsonl

        self.case, self.arguments, self.scratch = case, arguments, scratch
        own = scratch / case
        own.mkdir()
        write_jsonl(own / "prompts.jsonl")
        self.model = arguments.model or make_model(own / "model", case, arguments.device)
        self.alignment = case.removeprefix("moe-") if case in ("close", "bitwise", "moe-close") else "off"
        on_gpu = arguments.device == "cuda"
        self.dtype = "bfloat16" if on_gpu else "float32"
        trainer = {"train_device": arguments.device, "train_dtype": self.dtype, "trainer_backend": arguments.backend, "lr": 1e-5}
        trainer["use_rollout_routing_replay"] = case.startswith("moe")
        rollout = {"rollout_device": arguments.device, "alignment": self.alignment, "rollout_temperature": 0.8}
        rollout |= {"sglang": GPU_FLAGS} if on_gpu else {}
        self.config = run_config(own, trainer=trainer, rollout=rollout, model={"hf_checkpoint": str(self.model)})

    def write(self, *rows: dict[str, Any]) -> None:
        """Replaces the file of this case's rows."""
        path = self.scratch / f"{self.case}.json"
        path.with_suffix(".part").write_text(json.dumps([{"case": self.case, "dtype": self.dtype, **row} for row in rows]))
        path.with_suffix(".part").rename(path)

    def measure(self) -> None:
        """Generates, and takes the log-probs anew: with experts once by the trainer's own choice, and once by the engine's."""
        from services.trainer.__main__ import prepare_environment

        prepare_environment(self.config)
        samples, cost = asyncio.run(self._generated())
        self.write(cost)
        rows: list[dict[str, Any]] = []
        for replay in (False, True) if self.case.startswith("moe") else (None,):
            rows.append(({} if replay is None else {"replay": replay}) | cost)
            rows[-1] |= self._trained(samples, bool(replay))
            self.write(*rows)

    async def _generated(self) -> tuple[list[Any], dict[str, Any]]:
        import numpy as np

        from services.rollout.engine.engine_process import EngineProcess
        from services.rollout.engine.generation import GenerationRequest
        from services.rollout.in_flight import Partial
        from services.rollout.replica_command import replica_command
        from shared.model.families import architecture_of
        from shared.schema.messages import Sampling
        from shared.schema.sample import ExpertChoices, Sample

        count, vocabulary = self.arguments.tokens, json.loads((self.model / "config.json").read_text())["vocab_size"]
        random = np.random.default_rng(5)
        prompts = [random.integers(4, vocabulary, PROMPTS[index % 4]).astype(np.int32) for index in range(self.arguments.samples)]
        self.choices = ExpertChoices.of(architecture_of(self.config)) if self.case.startswith("moe") else None
        service: Any = argparse.Namespace(config=self.config, name="rollout", instance="rollout-0")
        log = (self.arguments.log_dir or self.scratch) / f"alignment.{self.case}.engine.log"
        engine = EngineProcess(replica_command(service, "benchmark"), log)

        def requests(prompts: Sequence[Any]) -> list[GenerationRequest]:
            seeds = [None if self.alignment == "off" else seed for seed in range(len(prompts))]
            routed = None if self.choices is None else 0
            return [GenerationRequest(p, count, ignore_eos=True, seed=s, routed_from=routed) for p, s in zip(prompts, seeds, strict=True)]

        try:
            started = await engine.ready(self.arguments.start_seconds)
            async with await engine.client() as client:
                sampling = Sampling(temperature=0.8, max_new_tokens=count)
                await client.generate_group(requests(prompts[:1]), sampling)
                (self.scratch / f"{self.case}.ready").touch()
                while not (self.scratch / "go").exists():
                    await asyncio.sleep(0.2)
                with alone(self.scratch):
                    await client.generate_group(requests(prompts), sampling)  # what is compiled for this many at once is
                    begun = time.monotonic()
                    generations = await client.generate_group(requests(prompts), sampling)
                    seconds = time.monotonic() - begun
        finally:
            engine.stop(0)
        samples = []
        for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            partial = Partial(choices=self.choices)
            partial.extend(generation, count)
            mask, segments = np.ones(count, np.uint8), [(0, count, 0)]
            samples.append(Sample("g", index, prompt, partial.tokens, partial.log_probs, mask, segments, "length", ""))
            samples[-1].routed_experts = partial.routed
        return samples, {"engine_start_s": round(started, 1), "generated_tokens_per_s": count * len(samples) / seconds}

    def _trained(self, samples: list[Any], replay: bool) -> dict[str, Any]:
        import numpy as np
        import torch

        from services.trainer.actor import Actor
        from services.trainer.backend import TrainerSettings
        from services.trainer.packing import pack
        from services.trainer.parallel import runtime

        torch.set_num_threads(1)
        actor = Actor.create(TrainerSettings.from_run(self.config), self.model)
        each = max(1, MICRO_BATCH_TOKENS[self.arguments.device] // max(one.length for one in samples))
        parts = [samples[start : start + each] for start in range(0, len(samples), each)]
        batches = [pack(part, [1.0] * len(part), self.choices if replay else None) for part in parts]
        with alone(self.scratch):
            found = actor.log_probs(batches)
            places = [batch.loss_mask > 0 for batch in batches]
            ours = torch.cat([one.cpu()[place] for one, place in zip(found, places, strict=True)])
            theirs = torch.cat([batch.fields["rollout_log_probs"][place] for batch, place in zip(batches, places, strict=True)])
            ratio = (ours - theirs).double().numpy()

            def loss(log_probs: Any, _entropy: Any, _batch: Any) -> Any:
                return -log_probs.mean(), {}

            actor.train_step(batches, loss)
            begun = time.monotonic()
            for _ in range(self.arguments.steps):
                actor.train_step(batches, loss)
            if self.arguments.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.monotonic() - begun
        actor.close()
        runtime.stop()
        if self.arguments.device == "cuda":
            del actor, found
            torch.cuda.empty_cache()
        return {
            **differences(ratio),
            "differing": int((ratio != 0).sum()),
            "p99": float(np.quantile(np.abs(ratio), 0.99)),
            "k1": float(-ratio.mean()),
            "trained_tokens_per_s": self.arguments.steps * sum(one.length for one in samples) / seconds,
        }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alignment", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's directory instead of random weights, for all cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron")
    parser.add_argument("--samples", type=int, help="default 8 on CPUs, 64 on GPUs")
    parser.add_argument("--tokens", type=int, help="of a response; default 60 on CPUs, 256 on GPUs")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all that the device has")
    parser.add_argument("--start-seconds", type=float, default=150, help="for the engines")
    parser.add_argument("--seconds", type=float, default=230, help="for all of a round: of all cases on GPUs, of each on CPUs")
    parser.add_argument("--log-dir", type=Path, help="keep what engines and trainers say there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.samples = arguments.samples or (8 if arguments.device == "cpu" else 64)
    arguments.tokens = arguments.tokens or (60 if arguments.device == "cpu" else 256)
    return arguments


class MeasuredRound:
    """The processes of cases that are measured beside each other."""

    def __init__(self, cases: Sequence[str], arguments: argparse.Namespace, words: list[str], scratch: Path) -> None:
        self._scratch, self._begun, self._arguments = scratch, time.monotonic(), arguments
        (scratch / "go").unlink(missing_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for case in cases:
            environment = os.environ | ({"MYXO_BATCH_INVARIANT": "1"} if case == "bitwise" else {})
            command = [sys.executable, "-m", "benchmarks.alignment", *words, "--one", case, str(scratch)]
            with self._log(case).open("wb") as log:
                self.processes[case] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _log(self, case: str) -> Path:
        return (self._arguments.log_dir or self._scratch) / f"alignment.{case}.log"

    def step(self) -> bool:
        """Begins what is timed once all engines are up; ends all at the deadline. Returns whether something still runs."""
        running = {case: process for case, process in self.processes.items() if process.poll() is None}
        waited = time.monotonic() - self._begun
        if all((self._scratch / f"{case}.ready").exists() for case in running) or waited > self._arguments.start_seconds:
            (self._scratch / "go").touch()
        if waited > self._arguments.seconds:
            for process in running.values():
                process.terminate()
                process.wait()
        return bool(running)

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows that there are; of a case that failed, why."""
        found: list[dict[str, Any]] = []
        for case, process in self.processes.items():
            path = self._scratch / f"{case}.json"
            found += json.loads(path.read_text()) if path.exists() else []
            if process.poll():
                last = (self._log(case).read_text(errors="replace").strip().splitlines() or [""])[-1]
                found.append({"case": case, "problem": f"exit {process.returncode}: {last[:300]}"})
        return found


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    arguments = parsed(words)
    if arguments.one:
        CaseMeasurement(arguments.one[0], arguments, Path(arguments.one[1])).measure()
        return 0
    cases = arguments.cases or DEFAULTS[arguments.device]
    rows: list[dict[str, Any]] = []
    for directory in (arguments.out.parent, *([arguments.log_dir] if arguments.log_dir else [])):
        directory.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(arguments, name) for name in ("backend", "samples", "tokens", "steps")}
    head = versions(arguments.device) | sizes | {"model": str(arguments.model or "random weights")}
    with tempfile.TemporaryDirectory() as scratch:
        for round_cases in [cases] if arguments.device == "cuda" else [[case] for case in cases]:
            measured, running = MeasuredRound(round_cases, arguments, words, Path(scratch)), True
            while running:
                running = measured.step()
                arguments.out.write_text(json.dumps({**head, "rows": rows + measured.rows()}, indent=2) + "\n")
                time.sleep(0.3)
            rows += measured.rows()
    show(rows)
    return int(any("problem" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
