"""How far engine and trainer agree under each alignment, and what it costs. ``python -m benchmarks.alignment [--device cuda --model DIR]``.

Both start anew for each alignment: an engine samples responses to random prompts, the trainer computes their log-probs and takes optimizer
steps. One JSON object is written as the figures come; a table is printed at the end. On GPUs ``--model DIR`` names a checkpoint.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "alignment.json"
ALIGNMENTS = ("off", "close", "bitwise")
PROMPTS = (3, 17, 33, 70)  # tokens


def measured(alignment: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns the figures of one alignment; runs in a process of its own, whose environment says which it is."""
    import numpy as np
    import torch

    from services.rollout.engine.engine_process import EngineProcess
    from services.rollout.replica_command import replica_command
    from services.trainer.actor import Actor
    from services.trainer.packing import PackedBatch
    from services.trainer.trainer_settings import TrainerSettings
    from tests.support.run_config import run_config, write_jsonl

    torch.manual_seed(0)
    torch.set_num_threads(1)
    write_jsonl(directory / "prompts.jsonl")
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    trainer = {"train_device": arguments.device, "train_dtype": dtype, "trainer_backend": arguments.backend, "lr": 1e-5}
    rollout = {"rollout_device": arguments.device, "alignment": alignment, "rollout_temperature": 0.8}
    config = run_config(directory, trainer=trainer, rollout=rollout, model={"hf_checkpoint": str(arguments.model)})
    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    prompts = [torch.randint(4, vocabulary, (PROMPTS[index % 4],)).tolist() for index in range(arguments.samples)]
    service: Any = argparse.Namespace(config=config, name="rollout", instance="rollout-0")
    engine = EngineProcess(replica_command(service, "benchmark"), directory / "engine.log")

    async def generate() -> tuple[list[tuple[list[int], list[float]]], float]:
        await engine.ready(900)
        async with await engine.client() as client:

            async def one(prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
                sampling = {"temperature": 0.8, "max_new_tokens": arguments.tokens, "ignore_eos": True}
                sampling |= {} if alignment == "off" else {"sampling_seed": seed}
                body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
                answer = await client.transport.post("/generate", body, 900, "the benchmark ends")
                found = answer["meta_info"]["output_token_logprobs"]
                return [entry[1] for entry in found], [entry[0] for entry in found]

            await one(prompts[0], 0)
            begun = time.monotonic()
            answers = await asyncio.gather(*(one(prompt, seed) for seed, prompt in enumerate(prompts)))
            return list(answers), time.monotonic() - begun

    try:
        answers, generating = asyncio.run(generate())
    finally:
        engine.stop(0)
    actor = Actor.create(TrainerSettings.from_run(config), arguments.model)
    sequences = [torch.tensor(prompt + tokens) for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    whole, lengths = torch.cat(sequences), [len(one) for one in sequences]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = torch.cat([torch.cat([one[1:], one.new_zeros(1)]) for one in sequences])
    batch = PackedBatch(whole, labels, torch.ones(len(whole)), bounds, max(lengths), {})
    rows = actor.log_probs([batch])[0].cpu().split(lengths)
    own = [row[len(prompt) - 1 : -1].numpy() for row, prompt in zip(rows, prompts, strict=True)]
    ratio = np.concatenate([mine - np.array(theirs, np.float32) for mine, (_, theirs) in zip(own, answers, strict=True)]).astype(np.float64)
    actor.train_step([batch], lambda log_probs, _entropy, _batch: (-log_probs.mean(), {}))
    begun = time.monotonic()
    for _ in range(arguments.steps):
        actor.train_step([batch], lambda log_probs, _entropy, _batch: (-log_probs.mean(), {}))
    training = time.monotonic() - begun
    return {
        "alignment": alignment,
        "tokens": len(ratio),
        "differing": int((ratio != 0).sum()),
        "mean": float(np.abs(ratio).mean()),
        "max": float(np.abs(ratio).max()),
        "k3": float((np.expm1(ratio) - ratio).mean()),
        "generated_tokens_per_s": len(ratio) / generating,
        "trained_tokens_per_s": arguments.steps * len(whole) / training,
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alignment", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's directory (default: a model of 5 million weights)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="of a response")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alignments", nargs="+", choices=ALIGNMENTS, help="default: all that the device has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parsed(words)
    if arguments.one:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measured(arguments.one, arguments, Path(scratch))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            from tests.support.tiny_model import TinyModelShape, write_tiny_model

            arguments.model = Path(scratch) / "model"
            shape = TinyModelShape(hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32)
            write_tiny_model(arguments.model, shape=shape)
        found: list[dict[str, Any]] = []
        for alignment in arguments.alignments or (ALIGNMENTS if arguments.device == "cpu" else ALIGNMENTS[:2]):
            command = [sys.executable, "-m", "benchmarks.alignment", *(sys.argv[1:] if words is None else words)]
            command += ["--model", str(arguments.model), "--one", alignment]
            environment = os.environ | ({"MYXO_BATCH_INVARIANT": "1"} if alignment == "bitwise" else {})
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({"device": arguments.device, "backend": arguments.backend, "rows": found}, indent=2) + "\n")
    table = Table(*found[0])
    for row in found:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
