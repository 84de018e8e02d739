"""What it would bring that a trainer's GPU generates while the trainer waits, by the simulation fed with a measured engine.

``python -m benchmarks.lending [--record FILE] [--json FILE] [--write]`` takes the engine's decoding and prefill of a record of
`benchmarks.end_to_end` and simulates its load at bound 2 on one GPU that generates and one that trains, for three distributions of lengths
and three times of training. *Limit*: of a split, max(g, h); *lending limit*: (g + h) / 2, with g at the engine's best number of requests.
It takes half a minute on one core. A run lends its GPUs with ``--lend-gpus``.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.command_line import conditions
from benchmarks.end_to_end.length_distribution import LengthDistribution
from benchmarks.end_to_end.prediction import MeasuredEngine, at_context, predicted
from benchmarks.page_table import put_table
from services.buffer.policy import Order
from services.buffer.simulate_command import Simulated

ROOT = Path(__file__).parents[1]
RECORD, RESULT = (ROOT / "benchmarks" / "results" / name for name in ("end_to_end_h200.json", "lending.json"))
PAGE = ROOT / "docs" / "simulation.md"
LENGTHS = ("geometric:656", "lognormal:656:0.5", "lognormal:656:1")
TRAINING_S = (4.43, 2.8, 1.7)
BOUND, SLOTS, PUSH_S = 2, 512, 0.03
WAYS: dict[str, tuple[Order, Simulated]] = {"fifo": ("fifo", "drop"), "mask": ("completion", "mask")}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="of benchmarks.end_to_end, on two GPUs")
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULT.name}")
    parser.add_argument("--write", action="store_true", help="put the table of RESULT into the docs; nothing is simulated")
    given = parser.parse_args()
    if given.write:
        put_table(PAGE, "lending", table(json.loads(RESULT.read_text())["rows"]))
        return 0
    record = json.loads(given.record.read_text())
    rows = [row for spec in LENGTHS for row in simulated(record, spec)]
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps({**conditions(), "record": given.record.name, "bound": BOUND, "rows": rows}, indent=1) + "\n")
    return 0


def simulated(record: dict[str, Any], spec: str) -> list[dict[str, Any]]:
    """A row for each time of training."""
    lengths, batch, samples = LengthDistribution.parse(spec, record["cap"]), record["batch"] * record["samples"], record["samples"]
    decode = at_context(record["alone_batch"]["decode_seconds"], record["prompt_tokens"] + lengths.capped_mean / 2)
    engine, rows = MeasuredEngine(decode, record["prefill_seconds"]), []
    generation = batch * lengths.capped_mean * (decode[0] + decode[1] * SLOTS) / SLOTS
    for training in TRAINING_S:
        row: dict[str, Any] = {"lengths": spec, "g": generation, "h": training}
        row |= {"limit": max(generation, training), "lending_limit": (generation + training) / 2}
        for name, (order, policy) in WAYS.items():
            for lend, suffix in ((0.0, ""), (1.0, "_lent")):
                row[name + suffix] = predicted(
                    lengths, engine, batch, samples, training, PUSH_S, {BOUND: SLOTS}, order, lend=lend, policy=policy
                )[BOUND]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    heads = ("lengths", "g", "h", "limit", "fifo", "mask", "lending limit", "fifo, lent", "mask, lent")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["lengths"], *(f"{row[name]:.2f}" for name in ("g", "h", "limit", "fifo", "mask", "lending_limit"))]
        cells += [f"{row[name]:.2f} ({row['lending_limit'] / row[name]:.0%})" for name in ("fifo_lent", "mask_lent")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
