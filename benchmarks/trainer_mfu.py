"""How fast one GPU trains: tokens/s, TFLOP/s, MFU and peak memory of training steps of a model of Qwen3-4B's shape, random weights.

``python -m benchmarks.trainer_mfu [--json FILE] [--case TOKENS:RECOMPUTE] [--steps N] [--write]`` trains with the default objective
in bfloat16, distributed optimizer, one sequence a micro-batch, four micro-batches a step; every case in a process of its own. RECOMPUTE
says what is run again in the backward pass: ``none``, ``full``, ``layers-K`` (K whole layers) or modules such as ``layernorm+mlp``.

A step is timed whole, from micro-batches in host memory to updated weights. FLOPs are counted as `services.trainer.flops` counts them:
what the model needs, so that recomputation lowers the MFU. ``limit_tflops`` is a plain matrix product, 8192 x 8192 x 8192 in bfloat16,
measured beside each case.
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

from benchmarks.page_table import put_table

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
CASES = ("8192:none", "16384:layers-14")
MICRO_BATCHES = 4
RESULTS = Path(__file__).parent / "results" / "trainer_mfu.json"
PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"
WARM_UP = 2


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--case", action="append", metavar="TOKENS:RECOMPUTE", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--only", metavar="TOKENS:RECOMPUTE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        print(json.dumps(measure(arguments.only, arguments.steps, arguments.profile)))
        return 0
    if arguments.write:
        put_table(PAGE, "trainer_mfu", table(json.loads(RESULTS.read_text())))
        return 0
    rows = []
    for case in arguments.case or CASES:
        command = [sys.executable, "-m", "benchmarks.trainer_mfu", "--only", case, "--steps", str(arguments.steps)]
        done = subprocess.run([*command, *(["--profile"] if arguments.profile else [])], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{case}: failed with exit code {done.returncode}", file=sys.stderr)
            continue
        *said, figures = done.stdout.strip().splitlines()
        if said:
            print("\n".join(said), file=sys.stderr)
        rows.append(json.loads(figures))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0 if rows else 1


def measure(case: str, steps: int, profile: bool) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    from services.trainer import flops
    from services.trainer.actor import Actor
    from services.trainer.objective.loss import PolicyLoss
    from services.trainer.trainer_settings import TrainerSettings
    from shared.config.algorithm import AlgorithmSection
    from shared.config.trainer_section import TrainerSection

    tokens = int(case.partition(":")[0])
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        config = TrainerSettings(TrainerSection(lr=1e-6, **recomputation(case.partition(":")[2])))
        actor = Actor.create(config, directory, random=True)
    batches = [micro_batch(tokens, number) for number in range(MICRO_BATCHES)]
    loss = PolicyLoss(AlgorithmSection())
    for _ in range(WARM_UP):
        actor.train_step(batches, loss)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = actor.train_step(batches, loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        assert result.skipped is None, result.skipped
    peak = torch.cuda.max_memory_allocated() / 1e9
    if profile:
        show_profile(actor, batches, loss)
    step = statistics.median(seconds)
    tflops = flops.training(actor.architecture, [tokens] * MICRO_BATCHES) / step / 1e12
    del actor
    torch.cuda.empty_cache()
    limit = matrix_product_tflops()
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens * MICRO_BATCHES / step, 1),
        "tflops": round(tflops, 1),
        "mfu": round(tflops / limit, 4),
        "peak_gb": round(peak, 1),
        "recompute": case.partition(":")[2],
        "step_seconds": round(step, 3),
        "micro_batches": MICRO_BATCHES,
        "limit_tflops": round(limit, 1),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def recomputation(what: str) -> dict[str, Any]:
    """The actor's settings for it."""
    if what == "none":
        return {}
    if what == "full":
        return {"recompute": True}
    if what.startswith("layers-"):
        layers = int(what.removeprefix("layers-"))
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    return {"recompute_granularity": "selective", "recompute_modules": what.split("+")}


def micro_batch(tokens: int, number: int) -> Any:
    """One sequence whose second half is trained."""
    import numpy as np
    import torch

    from services.trainer.packing import pack, spread
    from shared.schema.sample import Sample

    generator = np.random.default_rng(number)
    response = tokens // 2
    sample = Sample(
        group="benchmark",
        index=number,
        prompt=generator.integers(0, SHAPE["vocab_size"], tokens - response).astype(np.int32),
        response=generator.integers(0, SHAPE["vocab_size"], response).astype(np.int32),
        log_probs=np.full(response, -12.0, np.float32),
        mask=np.ones(response, np.uint8),
        segments=[(0, response, 0)],
        finish="length",
        text="",
    )
    packed = pack([sample], [1.0 / (MICRO_BATCHES * response)])
    advantage = torch.full((response,), float(generator.normal()))
    return packed.with_fields(advantages=spread([sample], [advantage], "advantages"))


def matrix_product_tflops(size: int = 8192, times: int = 20) -> float:
    """TFLOP/s of a plain product of random bfloat16 matrices."""
    import torch

    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        left @ right
    end.record()
    torch.cuda.synchronize()
    return 2 * size**3 * times / (start.elapsed_time(end) / 1e3) / 1e12


def show_profile(actor: Any, batches: Any, loss: Any) -> None:
    """The kernels of one step, dearest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        actor.train_step(batches, loss)
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70))


def line(row: dict[str, Any]) -> str:
    """One case in a line of the table."""
    return (
        f"| {row['tokens']} | {row['recompute']} | {row['tokens_per_s']:,.0f} | {row['tflops']:.0f} of {row['limit_tflops']:.0f} | "
        f"{row['mfu']:.1%} | {row['peak_gb']:.0f} GB |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    head = ["| tokens a micro-batch | recomputed | tokens/s | TFLOP/s | MFU | peak memory |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(line, rows)])


if __name__ == "__main__":
    sys.exit(main())
