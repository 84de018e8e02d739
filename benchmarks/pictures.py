"""A vision-language model of 2B shape learns the colours of `examples/colours`, its engine on one GPU and its trainer on another.

``python -m benchmarks.pictures --directory DIR --json FILE [--device cuda] [--steps N] [--seconds S] [FLAG ...]`` writes, while it runs,
the steps, and at the end or when its time is over: tokens and pictures a second, the difference of engine and trainer, pushes,
rewards. Weights are random, and the vocabulary has a few words: the layers are Qwen3-VL-2B's. ``--device cpu`` takes the
example's own sizes. Further flags are the run's.
"""

import argparse
import contextlib
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.example_run import ROOT, SMALL_ENGINE_FLAGS, launch, lines, stopped
from examples.colours.prepare import save_model, write_prompts
from shared.data.metric_files import METRIC_LINES

LARGE: dict[str, dict[str, Any]] = {
    "text": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6,
             "mrope_section": [24, 20, 20], "mrope_interleaved": True}},
    "vision": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "patch_size": 16, "out_hidden_size": 2048,
               "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
    "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
}  # fmt: skip


METRICS = {  # of a step, by the run's names; tokens are those of pictures, too
    "perf/step_time", "perf/actor_train_time", "perf/actor_train_tok_per_s", "rollout/tokens", "rollout/raw_reward",
    "train/train_rollout_logprob_abs_diff", "train/grad_norm",
}  # fmt: skip


def steps_of(root: Path) -> list[dict[str, float]]:
    """Returns the figures of each step that a run's directory has."""
    found: dict[int, dict[str, float]] = {}
    path = root / "tensorboard" / METRIC_LINES
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # the last one, while it is written
            _, step, values = json.loads(line)
            found.setdefault(step, {}).update({name: round(value, 6) for name, value in values.items() if name in METRICS})
    return [values for values in found.values() if values]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--directory", type=Path, required=True, help="of the run and of what it reads; made if missing")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=420, help="after which the run is ended")
    options, flags = parser.parse_known_args()
    row = measured(options, flags)
    options.json.write_text(json.dumps(row, indent=2) + "\n")
    print(json.dumps(row))


def measured(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Makes the files, runs, and returns the figures."""
    folder, large, rng = options.directory, options.device == "cuda", np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = save_model(folder / "model", 0, LARGE if large else {})
    for name, count in (("train", 512), ("heldout", 64)):
        write_prompts(folder / f"{name}.jsonl", rng, count, beside=name == "train", longest=768 if large else 48)
    config = (ROOT / "examples/colours/colours.toml").read_text().replace("runs/colours/data", str(folder))
    config = re.sub('device = "cpu"', f'device = "{options.device}"', config).replace("[run]\n", f'[run]\ndir = "{folder / "runs"}"\n')
    (folder / "run.toml").write_text(config)
    words = [str(folder / "run.toml"), "--num-rollout", str(options.steps)]
    if large:
        words += ["--train-dtype", "bfloat16", "--lr", "1e-6", *SMALL_ENGINE_FLAGS]
        words += ["--max-tokens-per-gpu", "4096"]  # 54.5 GB by plan: the layers that see keep four patches for a token
        words += ["--sglang-mm-attention-backend", "triton_attn"]  # its default wants kernels that not every installation has
    began, root = time.monotonic(), folder / "runs" / "colours"
    row: dict[str, Any] = {"device": options.device, "parameters": parameters}
    with (folder / "run.out").open("wb") as output:
        process = subprocess.Popen(launch([*words, *flags]), cwd=ROOT, stdout=output, stderr=output)
        while (code := process.poll()) is None:
            if (elapsed := time.monotonic() - began) > options.seconds:
                code = stopped(process)
                break
            row |= {"seconds": round(elapsed, 1), "steps": steps_of(root)}
            options.json.write_text(json.dumps(row, indent=2) + "\n")  # what there is, should this process be killed
            time.sleep(5)
    row |= {"exit": code, "seconds": round(time.monotonic() - began, 1), "steps": steps_of(root)}
    row["pushes"] = [line for line in lines(root / "logs" / "trainer-0.log") if line.get("event") == "weights_pushed"][:8]
    if (root / "summary.json").is_file():
        row["summary"] = summary = json.loads((root / "summary.json").read_text())
        trained = sum(summary["staleness_histogram"].values())
        row["pictures_per_s"] = round(trained / summary["wall_seconds"], 2)
        row["trained_tokens_per_s"] = round(summary["trained_tokens"] / summary["wall_seconds"], 2)
    return row


if __name__ == "__main__":
    main()
