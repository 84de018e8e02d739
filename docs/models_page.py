"""Writes the table of plans in ``docs/models.md`` from the ready configs: ``python -m docs.models_page [--check]``."""

import argparse
import re
import sys
from pathlib import Path

from docs.catalogue import settle
from myxo.commands.plan import planned
from myxo.preflight import Source
from myxo.preflight.run_plan import RunPlan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"

GPU_BYTES = 80_000_000_000

_TABLE = re.compile(r"(<!-- plans: python -m docs\.models_page -->\n).*?(<!-- /plans -->)", re.DOTALL)


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.models_page", description="the table of plans in docs/models.md")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    return settle(PAGE, _TABLE.sub(lambda place: place[1] + table() + place[2], PAGE.read_text()), parser.parse_args().check)


def table() -> str:
    """Returns a line for each ready config: the fullest of the trainer's ranks, and an engine on the fewest GPUs that hold the model."""
    trainer, engine = "trainer's GPUs | weights | gradients | optimizer | activations | a rank, GB", "engine's GPUs | weights | KV tokens"
    lines = [f"| config | {trainer} | {engine} |", "|---|---|---|---|---|---|---|---|---|---|"]
    for path in sorted((ROOT / "configs" / "models").glob("*.toml")):
        lines.append(_line(path.stem, planned(Source.of(path, []), GPU_BYTES).plan))
    return "\n".join(lines) + "\n"


def _line(name: str, plan: RunPlan) -> str:
    fullest = max((need for need in plan.needs if need.role == "actor"), key=lambda need: need.total)
    trainer, engine = plan.config.trainer, plan.engine
    assert engine is not None  # a ready config has both
    nodes = f"{trainer.actor_num_nodes} x " if trainer.actor_num_nodes > 1 else ""
    parts = " | ".join(f"{fullest.parts[part] / 1e9:.1f}" for part in ("weights", "gradients", "optimizer", "activations"))
    ranks = f"{nodes}{trainer.actor_num_gpus_per_node} | {parts} | {fullest.total / 1e9:.1f}"
    return f"| `{name}` | {ranks} | {engine.gpus} | {engine.weights / 1e9:.1f} | {engine.tokens:,} |"


if __name__ == "__main__":
    sys.exit(main())
