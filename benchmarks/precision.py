"""How far engine and trainer agree by the engines' precision, and what it costs. ``python -m benchmarks.precision [PRECISION ...]``.

The trainer takes steps on an engine's samples, pushes, twice, and computes the log-probs of what the engine samples then. On two GPUs the
engine has the second, on one both share it. Alignments in one precision: `benchmarks.alignment`.

One JSON object is written as the figures come; a table is printed at the end. On GPUs ``--model DIR`` names a checkpoint; without one a
model of random weights is made, with ``--shape 0.6b`` of Qwen3-0.6B's layers. ``k3``: an estimate of the KL. ``uncorrected``: mean of
|w - 1| over tokens, of the importance weight w; ``with_tis``: the mean of what --use-tis cuts off from w at 2. ``push_seconds_…``: of
the second push, until generation pauses; from then until the first bucket is issued, all are, all are sent, all are loaded; from then until
the engine is ready (4-bit weights are rearranged), and until it goes on.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.alignment import DENSE, PROMPTS, differences, show, write_dense

if TYPE_CHECKING:
    import numpy as np

    from services.rollout.engine.engine_client import EngineClient
    from services.trainer.actor import Actor
    from services.trainer.packing import PackedBatch

RESULTS = Path(__file__).parent / "results"
PRECISIONS = {
    "plain": (),
    "fp8": ("--to", "fp8-block"),
    "fp8-cache": (),
    "int4": ("--to", "int4"),
    "int4-aware": ("--to", "int4"),
    "int4-awq": ("--to", "int4", "--group-size", "128", "--layout", "awq"),
}
"""The options of `myxo convert` that make the engines' checkpoint."""

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
}
LARGE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "vocab_size": 512}
"""Of Qwen3-4B's layers; the embedding is small."""
EXPERTS = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128}
EXPERTS |= {"num_experts_per_tok": 8}
"""Of Qwen3-30B-A3B's layers, of which there are four."""
TIS_BOUND = 2.0
Answer = tuple[list[int], list[float]]  # tokens and the engine's log-probs of a response


def run_of(arguments: argparse.Namespace, directory: Path, model: Path, *, trainer: dict[str, Any], rollout: dict[str, Any]) -> Any:
    """Returns the config of a benchmark's run, and its prompts."""
    import torch

    from tests.support.run_config import run_config, write_jsonl

    torch.manual_seed(0)
    torch.set_num_threads(1)
    write_jsonl(directory / "prompts.jsonl")
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    trainer = {"train_device": arguments.device, "train_dtype": dtype, "trainer_backend": arguments.backend, "lr": arguments.lr} | trainer
    flags = dict(flag.split("=", 1) for flag in arguments.flags)
    rollout = {"rollout_device": arguments.device, "rollout_temperature": 0.8, **rollout, "sglang": {**rollout.get("sglang", {}), **flags}}
    return run_config(directory, trainer=trainer, rollout=rollout, model={"hf_checkpoint": str(model)})


async def generated(client: "EngineClient", prompts: list[list[int]], tokens: int) -> tuple[list[Answer], float]:
    """Returns a response to each prompt, and the seconds that all took together."""

    async def one(prompt: list[int]) -> Answer:
        sampling = {"temperature": 0.8, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = await client.transport.post("/generate", body, 900, "the benchmark ends")
        found = answer["meta_info"]["output_token_logprobs"]
        return [entry[1] for entry in found], [entry[0] for entry in found]

    await one(prompts[0])
    begun = time.monotonic()
    return list(await asyncio.gather(*map(one, prompts))), time.monotonic() - begun


def batch_of(prompts: list[list[int]], answers: list[Answer]) -> "PackedBatch":
    """Returns the sequences as one micro-batch."""
    import torch

    from services.trainer.packing import PackedBatch

    sequences = [torch.tensor(prompt + tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    whole, lengths = torch.cat(sequences), [len(one) for one in sequences]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = torch.cat([torch.cat([one[1:], one.new_zeros(1)]) for one in sequences])
    return PackedBatch(whole, labels, torch.ones(len(whole)), bounds, max(lengths), {})


def log_ratio(actor: "Actor", prompts: list[list[int]], answers: list[Answer]) -> "np.ndarray[Any, Any]":
    """Returns trainer's minus engine's log-probs, of all tokens of the responses."""
    import numpy as np

    batch = batch_of(prompts, answers)
    rows = actor.log_probs([batch])[0].cpu().split(batch.cu_seqlens.diff().tolist())
    own = [row[len(prompt) - 1 : -1].numpy() for row, prompt in zip(rows, prompts, strict=True)]
    found = np.concatenate([mine - np.array(theirs, np.float32) for mine, (_, theirs) in zip(own, answers, strict=True)])
    return found.astype(np.float64)


def write_random(directory: Path, shape: str, device: str) -> None:
    """Writes a checkpoint of random weights. ``30b-a3b``: some layers of its experts."""
    if shape == "30b-a3b":
        from benchmarks import routing_replay

        routing_replay.write_model(directory, routing_replay.SIZES | EXPERTS if device == "cuda" else routing_replay.SHAPES["tiny"])
    elif shape == "4b":
        write_dense(directory, DENSE | LARGE, device)
    else:
        from tests.support.tiny_model import TinyModelShape, write_tiny_model

        write_tiny_model(directory, shape=TinyModelShape(**SHAPES[shape], weight_std=0.1 if shape == "tiny" else 0.05))


def by_precision(precision: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns the figures of one precision of the engines; runs in a process of its own."""
    import numpy as np
    import torch

    from services.rollout.engine.engine_process import EngineProcess
    from services.rollout.replica_command import replica_command
    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.weights.stage_sender import StageSender

    model, options = arguments.model, PRECISIONS[precision]
    if options:
        model = (arguments.quantized or directory) / "-".join(word.strip("-") for word in options)
        command = [sys.executable, "-m", "services.trainer.convert_command", str(arguments.model), str(model), *options]
        if not model.is_dir():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    apart = arguments.device == "cuda" and torch.cuda.device_count() > 1
    flags: dict[str, Any] = {"kv-cache-dtype": "fp8_e4m3"} if precision == "fp8-cache" else {}
    flags |= {"mem-fraction-static": 0.3} if arguments.device == "cuda" and not apart else {}
    aware = {"quantization_aware": precision == "int4-aware"}
    config = run_of(arguments, directory, model, trainer=aware, rollout={"sglang": flags})
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = [torch.randint(4, vocabulary, (PROMPTS[index % 4],)).tolist() for index in range(arguments.samples)]
    service: Any = argparse.Namespace(config=config, name="rollout", instance="rollout-0")
    started = replica_command(service, "benchmark")
    started = replace(started, env=started.env | {"CUDA_VISIBLE_DEVICES": "1"}) if apart else started
    engine = EngineProcess(started, directory / "engine.log")
    actor = Actor.create(TrainerSettings.from_run(config), model)
    sender = StageSender(actor.model, "group" if apart or arguments.device == "cpu" else "memory", 300, 1 << 28, None, actor.quantization)
    pushes: list[tuple[dict[str, float], int]] = []

    async def push(client: "EngineClient", version: int, names: list[str]) -> None:
        begun = time.monotonic()
        await client.pause("in_place")
        await client.begin_weight_update()
        open_at = time.monotonic()
        sending = asyncio.to_thread(sender.send, version, partial=False, seconds=300)
        received, sent = await asyncio.gather(client.receive(version, version, names, check=False, deadline=300), sending)
        loaded_at = time.monotonic()
        await client.end_weight_update()
        ended_at = time.monotonic()
        await client.set_weight_version(version)
        await client.resume()
        if sent.error is not None:
            raise RuntimeError(f"push {version} failed: {sent.error}")
        parts = {name: sender.marks[name] - open_at for name in ("first_sent", "issued", "sent") if name in sender.marks}
        now = time.monotonic()
        whole = {
            "": now - begun,
            "_pause": open_at - begun,
            "_load": loaded_at - open_at,
            "_end": ended_at - loaded_at,
            "_resume": now - ended_at,
        }
        pushes.append((whole | {f"_{name}": value for name, value in parts.items()}, received.bytes))

    async def run() -> tuple[list[Answer], float]:
        await engine.ready(900)
        async with await engine.client() as client:
            await client.open_receivers()
            channels = await asyncio.to_thread(sender.open, 1, {"": 1})
            await client.join_channels(channels, 1, timeout=120)
            await asyncio.to_thread(sender.join, 120)
            batch = batch_of(prompts, (await generated(client, prompts, arguments.tokens))[0])
            for version in (1, 2):
                for _ in range(arguments.steps):
                    actor.train_step([batch], lambda log_probs, _entropy, _batch: (-log_probs.mean(), {}))
                await push(client, version, [channel.name for channel in channels])
            return await generated(client, prompts, arguments.tokens)

    try:
        answers, generating = asyncio.run(run())
        ratio = log_ratio(actor, prompts, answers)
    finally:
        engine.stop(0)
        sender.close()
    weights, held = np.exp(ratio), re.findall(r"Load weight end.*mem usage=([\d.]+) GB", (directory / "engine.log").read_text())
    return {
        "precision": precision,
        **differences(ratio),
        "uncorrected": float(np.abs(weights - 1).mean()),
        "with_tis": float(np.maximum(weights - TIS_BOUND, 0).mean()),
        "engine_weights_gb": float(held[0]) if held else None,
        "generated_tokens_per_s": len(ratio) / generating,
        "push_bytes": pushes[-1][1],
        **{f"push_seconds{part}": seconds for part, seconds in pushes[-1][0].items()},
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's directory (default: a model of random weights)")
    parser.add_argument("--shape", choices=(*SHAPES, "4b", "30b-a3b"), default="tiny", help="of random weights (default tiny: 5 million)")
    parser.add_argument(
        "--quantized", type=Path, metavar="DIR", help="where quantized checkpoints stay, for other calls (default: none do)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="of a response")
    parser.add_argument("--steps", type=int, default=3, help="before each of two pushes")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("precisions", nargs="*", metavar="PRECISION", help=f"of {', '.join(PRECISIONS)} (default: all that the device has)")
    parser.add_argument("--flags", nargs="*", default=[], metavar="NAME=VALUE", help="SGLang's flags for the engine")
    parser.add_argument("--out", type=Path, default=RESULTS / "precision.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.precisions if name not in PRECISIONS]:
        parser.error(f"PRECISION: expected of {', '.join(PRECISIONS)}, got {unknown[0]}")
    return arguments


def main(words: list[str] | None = None) -> None:
    arguments = parsed(words)
    if arguments.one:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(by_precision(arguments.one, arguments, Path(scratch))))
        return
    every = [name for name in PRECISIONS if not (arguments.device == "cpu" and name == "fp8-cache")]
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            arguments.model = Path(scratch) / "model"
            write_random(arguments.model, arguments.shape, arguments.device)
        found: list[dict[str, Any]] = []
        for name in arguments.precisions or every:
            command = [sys.executable, "-m", "benchmarks.precision", *(sys.argv[1:] if words is None else words)]
            command += ["--model", str(arguments.model), "--one", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            rows = done.stdout.strip().splitlines()
            found.append(json.loads(rows[-1]) if done.returncode == 0 else {"precision": name, "error": f"exit code {done.returncode}"})
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            row = {"device": arguments.device, "backend": arguments.backend, "shape": arguments.shape, "rows": found}
            arguments.out.write_text(json.dumps(row, indent=2) + "\n")
    show(found)


if __name__ == "__main__":
    main()
