"""What a checkpoint costs each rank: host memory, bytes written, seconds that training waits and seconds in the background.

``python -m benchmarks.checkpoint [--against TREE] [--json FILE] [--write]``. Four ranks share the optimizer of a model of 64 million
parameters (float32, on a CPU, over gloo) and save after one step. ``--against`` measures the same with the trainer of another checkout,
which its ranks import: run it on one of an earlier commit for a comparison.

Memory is the kernel's peak of the resident set between the call and the end of the save, less what was resident before. A shard is what a
rank wrote.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
PAGE = Path(__file__).parents[1] / "docs" / "layouts.md"
RANKS = 4
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout whose trainer is measured, too")
    parser.add_argument("--json", type=Path, help=f"put the figures there; {RESULTS.name} is shown")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(save_on_one_rank(arguments.rank)))
        return 0
    if arguments.write:
        from benchmarks.page_table import put_table

        put_table(PAGE, "checkpoint", table(json.loads(RESULTS.read_text())))
        return 0
    trees = {"this tree": Path(__file__).parents[1], **({} if arguments.against is None else {"the other tree": arguments.against})}
    rows = [row for name, tree in trees.items() for row in measure(name, tree)]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


def measure(name: str, tree: Path) -> list[dict[str, Any]]:
    """Returns a row for each rank, of ranks that import the trainer of ``tree``."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as directory, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        listener.close()
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
        meeting = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what is freed goes back at once, or it would count as resident before
        meeting |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute()), "--rank", directory]
        ranks = [
            subprocess.Popen(
                command,
                cwd=tree,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **meeting, "PYTHONPATH": str(tree.absolute()), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
        told = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{name}: a rank failed")
    return [{"tree": name, "commit": commit, "rank": rank, **json.loads(text.splitlines()[-1])} for rank, text in enumerate(told)]


def save_on_one_rank(directory: Path) -> dict[str, Any]:
    """Saves on this rank, with the others, and returns its figures."""
    import torch

    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.packing import PackedBatch
    from shared.config.trainer_section import TrainerSection

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    actor = Actor.create(TrainerSettings(TrainerSection(train_dtype="float32")), directory, random=True)
    tokens = torch.arange(32) + 32 * rank
    batch = PackedBatch(tokens, tokens + 1, torch.ones(32), torch.tensor([0, 32], dtype=torch.int32), 32, {})
    actor.train_step([batch], lambda log_probs, entropy, batch: (-log_probs.sum() / 128, {}))
    actor.save_checkpoint(directory / "warm", 0)  # imports, connections, the allocator's arenas
    reset_peak()
    before, began = status("VmRSS"), time.perf_counter()
    path = actor.save_checkpoint(directory / "checkpoints", 1, wait=False)
    blocked = time.perf_counter() - began
    actor.finish_save()
    took = time.perf_counter() - began
    written = sum(file.stat().st_size for file in path.glob(f"__{rank}_*.distcp"))
    figures = {"peak_growth": status("VmHWM") - before, "written": written, "blocked_s": round(blocked, 2), "total_s": round(took, 2)}
    figures["parameters"] = sum(parameter.numel() for module in actor.model.modules for parameter in module.parameters())
    actor.close()
    return figures


def reset_peak() -> None:
    """Has the kernel begin a new peak of this process's resident set."""
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """Returns a field of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    lines = ["| trainer | rank | peak growth of host memory | written by it | growth / written | training waits | in all |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = f"{row['peak_growth'] / row['written']:.2f}" if row["written"] > 1e6 else ""  # some write next to nothing
        lines.append(
            f"| {row['tree']} ({row['commit']}) | {row['rank']} | {row['peak_growth'] / 1e6:.0f} MB | {row['written'] / 1e6:.0f} MB "
            f"| {ratio} | {row['blocked_s']:.1f} s | {row['total_s']:.1f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
