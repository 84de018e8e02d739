r"""What the rollout service costs: an engine's tokens a second, driven directly and through the service, at equal running requests.

``python -m benchmarks.rollout_overhead --shape tiny --device cpu --json benchmarks/results/rollout_overhead.json``; on a GPU::

    python -m benchmarks.rollout_overhead --shape 0.6b --device cuda --at-once 256 --seconds 15 --pairs 4 \
        --sglang attention-backend=triton sampling-backend=pytorch grammar-backend=none --json FILE

One engine, in one replica. *Direct*: this process keeps ``--at-once`` requests in it, and replaces as many together as the service does
(`services.rollout.request_slots.lot`). *Service*: it takes groups from a queue that never runs dry, with as many slots. The two take turns,
``--pairs`` times. Tokens are the engine's own count. FILE is written after each pair. Exit code 1 where the ratio's median is below `GOAL`.
``--write`` puts the table of `RESULTS` into docs/performance.md.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.agents.site import Machine
from benchmarks.command_line import write
from benchmarks.end_to_end.length_distribution import LengthDistribution
from benchmarks.end_to_end.model_shapes import SIZES, config_of, write_checkpoint
from benchmarks.page_table import markdown_table, put_table
from benchmarks.rollout_overhead.engine_bench import EngineLoadPlan, engine_bench
from shared.runtime.telemetry import silence_logs

GOAL = 0.98

RESULTS = Path(__file__).parents[1] / "results" / "rollout_overhead.json"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SIZES), default="tiny", help="of the model (default tiny)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine (default cpu)")
    parser.add_argument("--lengths", default="geometric:64", help="of the responses (default geometric:64)")
    parser.add_argument("--cap", type=int, default=256, metavar="N", help="tokens of the longest response (default 256)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="tokens of a prompt (default 64)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="of a group (default 8)")
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="requests in the engine (default 32)")
    parser.add_argument("--seconds", type=float, default=10, help="of each figure (default 10)")
    parser.add_argument("--warm", type=float, default=5, help="seconds before each figure (default 5)")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="figures of each kind (default 3)")
    parser.add_argument("--sglang", nargs="*", type=flag, default=[], metavar="FLAG=VALUE", help="flags of the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--write", action="store_true", help="put the table of RESULTS into the docs; nothing is measured")
    options = parser.parse_args()
    if options.write:
        put_table(PAGE, "rollout_overhead", table(json.loads(RESULTS.read_text())))
        return 0
    silence_logs()
    figures = asyncio.run(measure(options))
    print(
        f"direct {figures['direct_tokens_per_s']:g} tokens/s, through the service {figures['service_tokens_per_s']:g}: {figures['ratio']:g}"
    )
    return int(figures["ratio"] < GOAL)


def flag(text: str) -> tuple[str, str]:
    """Returns name and value of an engine's flag. Raises argparse.ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: FLAG=VALUE, as in attention-backend=triton")
    return name, value


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all pairs, their medians, and the median of their ratios; writes them after each pair."""
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    machine = Machine(options.device, 1, dtype, dict(options.sglang))
    lengths = LengthDistribution.parse(options.lengths, options.cap)
    vocabulary = config_of(options.shape, dtype)["vocab_size"]
    plan = EngineLoadPlan(lengths, vocabulary, options.samples, options.prompt_tokens, options.warm, options.seconds)
    pairs: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mx-") as name:
        directory = Path(name)
        await asyncio.to_thread(write_checkpoint, directory / "model", options.shape, dtype)
        async with engine_bench(directory, directory / "model", machine, plan, options.at_once) as bench:
            for number in range(options.pairs):
                ways = (bench.direct, bench.through_service)
                found = {way.__name__: await way(options.at_once) for way in (ways if number % 2 == 0 else ways[::-1])}
                direct, service = found["direct"], found["through_service"]
                ratio = round(service.tokens_per_s / direct.tokens_per_s, 4)
                pairs.append({"direct": direct.as_json(), "service": service.as_json(), "ratio": ratio})
                print(pairs[-1], file=sys.stderr, flush=True)
                figures = _figures(options, machine, dtype, pairs)
                write(options.json, figures)
    return figures


def _figures(options: argparse.Namespace, machine: Machine, dtype: str, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {f"{kind}_tokens_per_s": statistics.median(pair[kind]["tokens_per_s"] for pair in pairs) for kind in ("direct", "service")}
    return {
        "shape": options.shape,
        "device": machine.device,
        "dtype": dtype,
        "lengths": options.lengths,
        "cap": options.cap,
        "at_once": options.at_once,
        "seconds": options.seconds,
        "flags": dict(options.sglang),
        **medians,
        "ratio": statistics.median(pair["ratio"] for pair in pairs),
        "pairs": pairs,
    }


def table(figures: dict[str, Any]) -> str:
    """Returns the pairs and their medians as a table of the documentation."""
    ways, rows = ("direct", "service"), []
    for number, pair in enumerate(figures["pairs"], 1):
        running = ", ".join(f"{pair[way]['running']:.0f}" for way in ways)
        rows.append((str(number), running, *(f"{pair[way]['tokens_per_s']:,.0f}" for way in ways), f"{pair['ratio']:.2f}"))
    medians = (f"{figures[f'{way}_tokens_per_s']:,.0f}" for way in ways)
    rows.append(("median", "", *medians, f"**{figures['ratio']:.3f}** (goal {GOAL})"))
    return markdown_table(("pair", "requests that run", "directly, tokens/s", "through the service", "ratio"), rows)


if __name__ == "__main__":
    sys.exit(main())
