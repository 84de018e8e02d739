"""The large scale, computed: ``python -m benchmarks.scale [--json FILE] [--write] [--length N] [--token-rate N] [--batch N]``.

Prints published pushes beside the model's, Myxo's own pushes of the ready configs, and the planes' rates by the number of GPUs; ``--write``
puts the tables into docs/scale.md. It takes a second and measures nothing: it starts from the figures in benchmarks/results.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.page_table import markdown_table, put_table
from benchmarks.scale.plane_rates import Workload, gpus_until, rates
from benchmarks.scale.published_pushes import published_pushes
from benchmarks.scale.push_model import MEASURED_PER_LOAD, PER_COLLECTIVE, PER_LOAD, PIPELINED, RDMA, ROOT, ours, weights_of

PAGE = ROOT / "docs" / "scale.md"
MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b", "glm-4.5", "deepseek-v3", "kimi-k2")
SIZES = (16, 256, 1_024, 4_096, 16_384)
MINUTE = 60.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    parser.add_argument("--length", type=float, default=Workload.length, help="mean tokens of a sample (default %(default)s)")
    parser.add_argument(
        "--token-rate", type=float, default=Workload.token_rate, help="tokens/s of a GPU that generates (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=Workload.batch, help="samples of a step (default %(default)s)")
    given = parser.parse_args()
    work = Workload(SIZES[0], length=given.length, token_rate=given.token_rate, batch=given.batch)
    tables = {
        "constants": constants_table(),
        "published": published_table(),
        "pushes": push_table(),
        "planes": plane_table(work),
        "limits": limit_table(work),
    }
    if given.write:
        for name, table in tables.items():
            put_table(PAGE, "scale", table, f"scale_{name}")
    if given.json is not None:
        figures = {
            "published": [asdict(row) for row in published_pushes()],
            "pushes": {name: ours(weights_of(name)) for name in MODELS},
            "planes": {gpus: rates(replace(work, gpus=gpus)) for gpus in SIZES},
        }
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n\n".join(tables.values()))
    return 0


def constants_table() -> str:
    """Returns what the model of pushes starts from."""
    nccl, slime = "`python -m benchmarks.weight_push`, two H200", "the same, pushed as slime does"
    fitted = f"fitted to one push below; `weight_push` says at most {MEASURED_PER_LOAD * 1e6:.0f}, of large tensors"
    rows = [
        ("share of NVLink's nominal rate that a push in flattened buckets reaches", f"{PIPELINED:.2f}", nccl),
        ("a collective of its own for each tensor", f"{PER_COLLECTIVE * 1e6:.0f} µs", slime),
        ("share of a network card's nominal rate", f"{RDMA:.3f}", "prime-rl, pull request 3341: 44.26 of 50 GB/s on each of 32 H200"),
        ("an engine's work for a tensor", f"{PER_LOAD * 1e6:.0f} µs", fitted),
    ]
    return markdown_table(("constant", "value", "from"), rows)


def published_table() -> str:
    """Returns published pushes beside the model's."""
    rows = [
        (
            row.model,
            row.setup,
            f"{row.seconds:.2f} s",
            f"{row.predicted:.2f} s",
            f"{row.difference:+.0%}{' (fitted)' if row.fitted else ''}",
            row.source,
        )
        for row in published_pushes()
    ]
    return markdown_table(("model", "on", "published", "model", "off by", "source"), rows)


def push_table() -> str:
    """Returns what the model says of Myxo's own pushes of the ready configs."""
    rows = []
    for name in MODELS:
        weights = weights_of(name)
        parts = ours(weights)
        size = f"{weights.gigabytes:,.0f} GB", f"{weights.tensors:,}", str(weights.stages)
        rows.append((f"`{name}`", *size, *(f"{parts[part]:.1f} s" for part in ("wire", "load", "push"))))
    return markdown_table(("config", "BF16", "tensors", "senders", "wire", "loading", "push"), rows)


def plane_table(work: Workload) -> str:
    """Returns the planes' rates by the number of GPUs."""
    rows = []
    for gpus in SIZES:
        found = rates(replace(work, gpus=gpus))
        rows.append(
            (
                f"{gpus:,}",
                f"{found['samples_per_s']:,.0f}",
                f"{found['of_path']:.1%}",
                f"{found['redis_mb_per_s']:,.1f} MB/s",
                f"{found['step_seconds']:,.1f} s",
                f"{found['versions']:,}",
                f"{found['records_per_day']:,.0f}",
                f"{found['replay_seconds'] / MINUTE:,.1f} min",
            )
        )
    head = (
        "GPUs",
        "samples/s",
        "of the path",
        "Redis, both ways",
        "a step",
        "versions in the longest response",
        "records a day",
        "their replay",
    )
    return markdown_table(head, rows)


def limit_table(work: Workload) -> str:
    """Returns at how many GPUs each thing becomes the bound, smallest first."""
    limits = [
        (gpus_until(work, "replay_seconds", MINUTE), "a buffer that starts without a standby replays a day's ledger in over a minute"),
        (gpus_until(work, "of_path", 1.0), "buffer, NATS and store, two cores in all, carry no more samples"),
        (gpus_until(work, "redis_mb_per_s", 1_250.0), "payloads fill a network of 10 Gbit/s"),
    ]
    for name in ("qwen3-235b-a22b", "kimi-k2"):
        push = ours(weights_of(name))["push"]
        most = int(work.gpus * rates(work)["step_seconds"] / (10 * push))
        limits.append((most, f"a push of `{name}` takes a tenth of a step"))
    return markdown_table(("GPUs", "what is reached"), [(f"{gpus:,}", what) for gpus, what in sorted(limits)])


if __name__ == "__main__":
    raise SystemExit(main())
