"""How fast one GPU trains: tokens/s, TFLOP/s, MFU and peak memory of training steps of a model of Qwen3-4B's shape, random weights.

``python -m benchmarks.trainer_mfu [--json FILE] [--case TOKENS:RECOMPUTE] [--steps N] [--write]`` trains with the default objective
in bfloat16, distributed optimizer, one sequence a micro-batch, four micro-batches a step; every case in a process of its own. RECOMPUTE
says what is run again in the backward pass: ``none``, ``full``, ``layers-K`` (K whole layers) or modules such as ``layernorm+mlp``.

``--shape qwen3-30b-a3b`` takes the hidden and expert sizes of that model with fewer layers. Each case is then run twice, with the experts
as groups and, ``loop``, one after the other. ``--expert-parallel N`` spreads them over N GPUs, each of which trains its own micro-batches;
figures are those of one GPU.

A step is timed whole, from micro-batches in host memory to updated weights. FLOPs are counted as `services.trainer.flops` counts them:
what the model needs, so that recomputation lowers the MFU. ``limit_tflops`` is a plain matrix product, 8192 x 8192 x 8192 in bfloat16,
measured beside each case.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end.model_shapes import COMMON, SIZES
from benchmarks.page_table import put_table

if TYPE_CHECKING:
    from shared.config.trainer_section import TrainerSection

SHAPE = COMMON | SIZES["4b"]
MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Hidden, attention and expert sizes of Qwen3-30B-A3B. Of its 48 layers these are four; the vocabulary is cut in about the same proportion,
so that its product has about its share of the work."""

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES = {"qwen3-4b": SHAPE, "qwen3-1.7b": COMMON | SIZES["1.7b"], "qwen3-30b-a3b": MIXTURE, "tiny-moe": MIXTURE | SMALL}
"""By name: the first is the default; the last is for trying this out on a CPU."""

CASES = ("8192:none", "16384:layers-14")
MIXTURE_CASES = ("8192:none", "32768:none")
MICRO_BATCHES = 4
RESULTS = Path(__file__).parent / "results"
WRITTEN = ("trainer_mfu", "trainer_moe", "trainer_memory", "trainer_torch")
"""Tables of the page, each of the file of that name in `RESULTS`."""
PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"
WARM_UP = 2


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, as they come")
    parser.add_argument("--case", action="append", metavar="TOKENS:RECOMPUTE", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--write", action="store_true", help="plan the cases of benchmarks/results anew, and put them into the docs")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b", help="of the model")
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="N", help="GPUs that share the experts")
    parser.add_argument("--no-loop", action="store_true", help="leave out the loop over experts")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron", help="what trains")
    parser.add_argument("--layers", choices=("fused", "plain", "compiled"), default="fused", help="of the torch backend")
    parser.add_argument("--float8", choices=("rowwise", "rowwise_with_gw_hp"), help="of the torch backend, by torchao")
    parser.add_argument("--likelihood", action="store_true", help="raise the tokens' likelihood at a rate of 1e-4, and write each loss")
    parser.add_argument("--keep-gathered", action="store_true", help="of the torch backend: gather weights once a step")
    parser.add_argument("--only", metavar="TOKENS:RECOMPUTE", help=argparse.SUPPRESS)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        if (measured := measure(arguments.only, arguments)) is not None:
            print(json.dumps(measured))
        return 0
    if arguments.write:
        write_page()
        return 0
    rows = []
    mixture = "num_experts" in SHAPES[arguments.shape]
    ways = [[], ["--loop"]] if mixture and not arguments.no_loop else [[]]
    for case, way in itertools.product(arguments.case or (MIXTURE_CASES if mixture else CASES), ways):
        done = subprocess.run(command_line(case, arguments) + way, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{case} {' '.join(way)}: failed with exit code {done.returncode}", file=sys.stderr)
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


def command_line(case: str, arguments: argparse.Namespace) -> list[str]:
    """The command of one case, on all its GPUs."""
    ranks = arguments.expert_parallel
    launcher = [sys.executable, "-m"] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m"]
    options = ["--only", case, "--steps", str(arguments.steps), "--shape", arguments.shape, "--expert-parallel", str(ranks)]
    return [
        *launcher,
        "benchmarks.trainer_mfu",
        *options,
        *(["--profile"] if arguments.profile else []),
        *(["--offload"] if arguments.offload else []),
        *(["--keep-gathered"] if arguments.keep_gathered else []),
        *(["--likelihood"] if arguments.likelihood else []),
        *(["--float8", arguments.float8] if arguments.float8 else []),
        *(["--backend", arguments.backend, "--layers", arguments.layers] if arguments.backend != "megatron" else []),
    ]


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """One case, in this process; None where it is not the first of several."""
    import torch

    from services.trainer import flops
    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.megatron.moe import GroupedExperts
    from services.trainer.objective.loss import PolicyLoss
    from shared.config.algorithm import AlgorithmSection

    GroupedExperts.loops = arguments.loop
    tokens, shape, rank = int(case.partition(":")[0]), SHAPES[arguments.shape], int(os.environ.get("RANK", "0"))
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape))
        section = trainer_section(tokens, case.partition(":")[2], arguments.expert_parallel, arguments.offload, arguments.backend)
        if arguments.backend == "torch":
            kept: dict[str, Any] = {"fsdp_reshard_after_forward": not arguments.keep_gathered}
            kept |= {"fsdp_compile": arguments.layers == "compiled", "fsdp_float8": arguments.float8}
            section = section.model_copy(update=kept)
            torch_model: Any = importlib.import_module("services.trainer.fsdp.model")
            torch_model.fuse = (lambda _: []) if arguments.layers == "plain" else torch_model.fuse
        section = section.model_copy(update={"lr": 1e-4} if arguments.likelihood else {})
        actor = Actor.create(TrainerSettings(section), directory, random=True)
    batches = [micro_batch(tokens, rank * MICRO_BATCHES + number, shape["vocab_size"]) for number in range(MICRO_BATCHES)]
    loss: Any = PolicyLoss(AlgorithmSection())
    if arguments.likelihood:
        loss = lambda log_probs, _, batch: (-(log_probs * batch.loss_mask).sum() / (tokens // 2) / MICRO_BATCHES, {})  # noqa: E731
    losses = [actor.train_step(batches, loss).loss for _ in range(WARM_UP)]
    seconds = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments.steps):
        began = finished()
        result = actor.train_step(batches, loss)
        seconds.append(finished() - began)
        assert result.skipped is None, result.skipped
        losses.append(result.loss)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    if arguments.profile and rank == 0:
        show_profile(actor, batches, loss)
    step = statistics.median(seconds)
    tflops = flops.training(actor.architecture, [tokens] * MICRO_BATCHES) / step / 1e12
    actor.close()
    del actor
    if rank:
        return None
    if cuda:
        torch.cuda.empty_cache()
    limit = matrix_product_tflops() if cuda else 1.0
    ways = "gathered once" * arguments.keep_gathered, "offloaded" * arguments.offload
    kinds = arguments.layers, arguments.float8 and f"float8 {arguments.float8}", *ways
    row = {
        "shape": arguments.shape,
        "experts": "" if "num_experts" not in shape else "loop" if arguments.loop else "grouped",
        "backend": arguments.backend,
        "layers": ", ".join(filter(None, kinds)) if arguments.backend == "torch" else "",
        "gpus": arguments.expert_parallel,
        "tokens": tokens,
        "tokens_per_s": round(tokens * MICRO_BATCHES / step, 1),
        "tflops": round(tflops, 1),
        "mfu": round(tflops / limit, 4),
        "peak_gb": round(peak, 1),
        "plan_gb": 0.0,
        "offloaded": arguments.offload,
        "recompute": case.partition(":")[2],
        "step_seconds": round(step, 3),
        "micro_batches": MICRO_BATCHES,
        "limit_tflops": round(limit, 1),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
    }
    return row | {"plan_gb": planned_gb(row)} | ({"losses": losses} if arguments.likelihood else {})


def trainer_section(
    tokens: int, recomputed: str, expert_parallel: int = 1, offload: bool = False, backend: str = "megatron"
) -> "TrainerSection":
    """The trainer's section of a case."""
    from shared.config.trainer_section import TrainerSection

    layout: dict[str, Any] = {"trainer_backend": backend, "expert_model_parallel_size": expert_parallel}
    if offload and backend == "torch":
        layout["fsdp_cpu_offload"] = True
    elif offload:
        layout["megatron"] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
    return TrainerSection(lr=1e-6, max_tokens_per_gpu=tokens, **layout, **recomputation(recomputed))


def planned_gb(row: dict[str, Any]) -> float:
    """What `shared.model.memory_plan` plans for the case of a row, in GB of 10^9 bytes; it takes neither a GPU nor torch."""
    from shared.model.families import read_architecture
    from shared.model.memory_plan import plan_trainer

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPES[row.get("shape", "qwen3-4b")]))
        architecture = read_architecture(Path(directory))
    gpus = row.get("gpus", 1)
    section = trainer_section(row["tokens"], row["recompute"], gpus, row.get("offloaded", False), row.get("backend", "megatron"))
    (plan,) = plan_trainer(architecture, section, gpus)
    return round(plan.peak / 1e9, 1)


def write_page() -> None:
    """Puts the tables into the page, with what the present plan says of each measured case."""
    for name in WRITTEN:
        path = RESULTS / f"{name}.json"
        rows = [row | {"plan_gb": planned_gb(row)} for row in json.loads(path.read_text())]
        path.write_text(json.dumps(rows, indent=1) + "\n")
        put_table(PAGE, "trainer_mfu", table(rows), name)


def finished() -> float:
    """The time once the GPU has done all that it was given, in seconds."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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


def micro_batch(tokens: int, number: int, vocabulary: int = 151936) -> Any:
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
        prompt=generator.integers(0, vocabulary, tokens - response).astype(np.int32),
        response=generator.integers(0, vocabulary, response).astype(np.int32),
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
    backend = f"torch {row.get('layers', '')}".strip() if row.get("backend") == "torch" else ""
    shape = "1.7B" if row.get("shape") == "qwen3-1.7b" else ""
    parts = (shape, row.get("experts", ""), f"EP{row['gpus']}" if row.get("gpus", 1) > 1 else "", backend)
    named = "".join(f" {part}" for part in parts if part)
    return (
        f"| {row['tokens']}{named} | {row['recompute']} | {row['tokens_per_s']:,.0f} | {row['tflops']:.0f} of {row['limit_tflops']:.0f} | "
        f"{row['mfu']:.1%} | {row['peak_gb']:.0f} GB |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    head = ["| tokens a micro-batch | recomputed | tokens/s | TFLOP/s | MFU | peak memory |", "|---|---|---|---|---|---|"]
    wider = [f"{head[0]} planned |", f"{head[1]}---|"]
    return "\n".join([*wider, *(f"{line(row)} {row['plan_gb']:.0f} GB |" for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
