"""Where the time of a small model's training goes: a step of 163,000 tokens in 256 samples, Qwen3-0.6B's shape, random weights, one GPU.

``python -m benchmarks.small_model [--json FILE] [--case TOKENS:CHUNK[:RECOMPUTE] …] [--steps N] [--profile FILE]``. Samples are those of
``benchmarks.end_to_end``: 64 tokens of prompt, a geometric response of 656 tokens in the mean, at most 2,048, packed into micro-batches of
at most TOKENS. CHUNK tokens have logits at a time. Every case is a process of its own.

Seconds, medians: ``pack``: micro-batches from samples; ``log_probs``: a pass without gradients; ``gradient``: forward and backward passes;
``optimizer``: the step; ``training``: the last two. ``host``: until the process had asked for all that ``gradient`` took, with no wait for
the GPU but those of the passes themselves. ``kernels``: what the GPU's kernels of one step took, added up, and how many they were; the
dearest are in the file of ``--profile``. ``peak_gb`` and ``reserved_gb`` are of torch, ``plan_gb`` of `shared.model.memory_plan`.
``limit_tflops``: a plain product of matrices beside it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command_line import conditions
from benchmarks.end_to_end.model_shapes import COMMON, SIZES
from benchmarks.trainer_mfu import finished, matrix_product_tflops, recomputation

CASES = ("8192:2048", "32768:8192", "16384:8192")
SAMPLES, PROMPT, MEAN, CAP = 256, 64, 656, 2048
WARM_UP = 2
DEAREST = 45


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, as they come")
    parser.add_argument("--case", action="append", metavar="TOKENS:CHUNK[:RECOMPUTE]", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each case")
    parser.add_argument("--shape", choices=tuple(SIZES), default="0.6b", help="of the model")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a step")
    parser.add_argument("--profile", type=Path, help="write the dearest kernels of each case there")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        print(json.dumps(measure(given.only, given)))
        return 0
    rows: list[dict[str, Any]] = []
    for case in given.case or CASES:
        own = ["--only", case, "--steps", str(given.steps), "--shape", given.shape, "--samples", str(given.samples)]
        own += ["--profile", str(given.profile)] if given.profile else []
        done = subprocess.run([sys.executable, "-m", "benchmarks.small_model", *own], stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"case": case, "exit": done.returncode}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")
    return int(any("exit" in row for row in rows))


def measure(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    from services.trainer import flops
    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.objective.loss import PolicyLoss
    from shared.config.algorithm import AlgorithmSection
    from shared.config.trainer_section import TrainerSection
    from shared.model.memory_plan import plan_trainer

    tokens, chunk, recomputed = [*case.split(":"), "none"][:3]
    section = TrainerSection(lr=1e-6, max_tokens_per_gpu=int(tokens), log_probs_chunk_size=int(chunk), seed=1, **recomputation(recomputed))
    shape, cuda = COMMON | SIZES[given.shape], torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape))
        actor = Actor.create(TrainerSettings(section), directory, random=True)
    loss, lengths = PolicyLoss(AlgorithmSection()), response_lengths(given.samples)
    began = finished()
    batches = packed(lengths, int(tokens), shape["vocab_size"])
    spent: dict[str, list[float]] = {"pack": [finished() - began], "log_probs": [], "gradient": [], "optimizer": [], "host": []}
    passes = actor.backend.passes
    whole = passes.forward_backward

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = finished()
        found = whole(*arguments, **options)
        spent["host"].append(time.perf_counter() - begun)
        spent["gradient"].append(finished() - begun)
        return found

    vars(passes)["forward_backward"] = timed  # it is a module
    for _ in range(WARM_UP):
        actor.train_step(batches, loss)
    for times in (spent["gradient"], spent["host"]):
        times.clear()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(given.steps):
        begun = finished()
        actor.log_probs(batches)
        spent["log_probs"].append(finished() - begun)
        result = actor.train_step(batches, loss)
        spent["optimizer"].append(actor.clock.ended()["optimizer"])
        assert result.skipped is None, result.skipped
    row: dict[str, Any] = {"case": case, "shape": given.shape, "tokens": sum(lengths) + PROMPT * len(lengths), "samples": len(lengths)}
    row |= {"micro_batches": len(batches)} | {name: round(statistics.median(times), 4) for name, times in spent.items() if times}
    row["training"] = round(row["gradient"] + row["optimizer"], 4)
    row["tflops"] = round(flops.training(actor.architecture, [PROMPT + length for length in lengths]) / row["training"] / 1e12, 1)
    if cuda:
        row |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}
        row |= profiled(actor, batches, loss, given.profile, case)
    (plan,) = plan_trainer(actor.architecture, section, 1)
    actor.close()
    return row | {"plan_gb": plan.peak / 1e9, "limit_tflops": round(matrix_product_tflops(), 1) if cuda else 0.0}


def response_lengths(samples: int) -> list[int]:
    """Geometric lengths, the same each time."""
    import numpy as np

    return [int(length) for length in np.minimum(np.random.default_rng(1).geometric(1 / MEAN, samples), CAP)]


def packed(lengths: list[int], tokens: int, vocabulary: int) -> list[Any]:
    """Micro-batches of at most ``tokens`` each, of equal size as far as samples allow."""
    import numpy as np
    import torch

    from services.trainer.packing import pack, spread
    from shared.schema.sample import Sample

    generator = np.random.default_rng(2)
    total = sum(lengths) + PROMPT * len(lengths)
    micro: list[list[int]] = [[] for _ in range(-(-total // tokens))]
    for length in sorted(lengths, reverse=True):
        least = min(micro, key=lambda one: sum(one) + PROMPT * len(one))
        if sum(least) + length + PROMPT * (len(least) + 1) > tokens:
            micro.append(least := [])
        least.append(length)
    batches, trained = [], sum(lengths)
    for number, of_micro in enumerate(micro):
        samples = [
            Sample(
                group=f"g{number}",
                index=index,
                prompt=generator.integers(0, vocabulary, PROMPT).astype(np.int32),
                response=generator.integers(0, vocabulary, length).astype(np.int32),
                log_probs=np.full(length, -12.0, np.float32),
                mask=np.ones(length, np.uint8),
                segments=[(0, length, 0)],
                finish="length",
                text="",
            )
            for index, length in enumerate(of_micro)
        ]
        advantages = [torch.full((length,), float(generator.normal())) for length in of_micro]
        batches.append(pack(samples, [1.0 / trained] * len(samples)).with_fields(advantages=spread(samples, advantages, "advantages")))
    return batches


def profiled(actor: Any, batches: list[Any], loss: Any, path: Path | None, case: str) -> dict[str, Any]:
    """The kernels of one step: their seconds, their number, and how many requests the host made."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        actor.train_step(batches, loss)
        finished()
    kernels = [event for event in found.events() if str(event.device_type).endswith("CUDA")]
    if path is not None:
        with path.open("a") as file:
            file.write(f"{case}\n{found.key_averages().table(sort_by='cuda_time_total', row_limit=DEAREST, max_name_column_width=90)}\n\n")
            file.write(f"{found.key_averages().table(sort_by='self_cpu_time_total', row_limit=25, max_name_column_width=60)}\n\n")
    return {"kernels": round(sum(event.time_range.elapsed_us() for event in kernels) / 1e6, 4), "launches": len(kernels)}


if __name__ == "__main__":
    sys.exit(main())
