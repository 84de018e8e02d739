"""A rank of the test that compares layouts over nodes: it runs all cases one after the other, for the cost of one start."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 PP2": ("qwen3_tied", {**TP2, "pipeline_model_parallel_size": 2}),
    "TP2 DP2": ("qwen3_tied", TP2),
    "TP2 EP2": ("qwen3_moe", {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
}
"""Kind of model and layout, by name. Megatron counts ranks of tensor parallelism first: they are those of one node."""


def main(directory: Path) -> None:
    import torch

    from services.trainer.parallel import runtime
    from tests.unit.trainer.megatron import rank_steps

    torch.set_num_threads(1)
    for name, (kind, layout) in CASES.items():
        found = rank_steps.reinforce(directory / "hf" / kind, layout)
        (directory / f"{name}-{os.environ['RANK']}").write_bytes(pickle.dumps(found))
        runtime.leave_groups()
    runtime.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
