"""Every layout on real GPUs over NCCL, held to what one GPU computes.

``python -m benchmarks.gpu_layouts [--gpus 2] [--json FILE]`` trains tiny models in the layouts of
`tests/unit/trainer/megatron/test_layouts.py` that take so many GPUs: a GRPO step, a PPO step and three steps of a critic, in float32 (with
TF32 off), from the same weights on the same batches. Figures are the largest differences of losses, of gradient norms, and of the
log-probs of fresh sequences after training, to one GPU.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = ("grpo", "ppo", "critic 0", "critic 1", "critic 2")
LOSS, GRAD_NORM, LOG_PROB = 1e-5, 1e-4, 1e-4
"""What the tests on a CPU demand."""


def main() -> int:
    """The command line. Exits 1 where a layout differs by more than the tests allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
    parser.add_argument("--json", type=Path, help="write the figures there, as they come")
    arguments = parser.parse_args()
    from tests.unit.trainer.megatron.test_layouts import FOUR_RANKS, TWO_RANKS
    from tests.unit.trainer.megatron.tiny import make_checkpoint
    from tests.unit.trainer.megatron.world import World

    layouts = TWO_RANKS if arguments.gpus == 2 else FOUR_RANKS
    one, several = World(1, "spawn"), World(arguments.gpus, "spawn")
    rows, expected = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (kind, config) in layouts.items():
            checkpoint = Path(directory, kind)
            if kind not in expected:
                make_checkpoint(kind, checkpoint)
                (expected[kind],) = one.run(figures, checkpoint, {})
            ranks = several.run(figures, checkpoint, config)
            rows.append({"layout": name, "model": kind, "gpus": arguments.gpus, **differences(expected[kind], ranks)})
            print(line(rows[-1]), file=sys.stderr, flush=True)
            if arguments.json is not None:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    one.stop()
    several.stop()
    print("| layout | model | GPUs | loss | gradient norm | log-prob |\n|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))
    return 0 if all(row["equal"] for row in rows) else 1


def figures(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What one rank computed, as plain numbers."""
    import torch

    from tests.unit.trainer.megatron import rank_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    report = rank_steps.reinforce(checkpoint, config)
    told = {name: (report[name].loss, report[name].grad_norm) for name in STEPS}
    return {**told, "log_probs": report["log_probs"].cpu().tolist(), "device": torch.cuda.get_device_name()}


def differences(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest over steps and ranks."""
    loss = max(abs(rank[name][0] - expected[name][0]) for rank in ranks for name in STEPS)
    norm = max(abs(rank[name][1] - expected[name][1]) for rank in ranks for name in STEPS)
    log_prob = max(abs(ours - theirs) for rank in ranks for ours, theirs in zip(rank["log_probs"], expected["log_probs"], strict=True))
    equal = loss < LOSS and norm < GRAD_NORM and log_prob < LOG_PROB
    return {"loss": loss, "grad_norm": norm, "log_prob": log_prob, "equal": equal, "device": expected["device"]}


def line(row: dict[str, Any]) -> str:
    """One layout in a line of the table."""
    numbers = " | ".join(f"{row[name]:.1e}" for name in ("loss", "grad_norm", "log_prob"))
    return f"| {row['layout']} | {row['model']} | {row['gpus']} | {numbers} |{'' if row['equal'] else ' DIFFERS'}"


if __name__ == "__main__":
    sys.exit(main())
