"""A small run's input: a tiny random model, sums of one-digit numbers, demonstrations."""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.fork_server import forked_engines, forked_python

__all__ = ["forked_engines", "forked_python"]

SUMS = [(left, right) for left in range(10) for right in range(10)]

CONFIG = """
[run]
name = "{name}"
dir = "{directory}/runs"
[model]
hf_checkpoint = "{model}"
[data]
prompt_data = "{directory}/train.jsonl"
rollout_shuffle = true
[rollout]
num_rollout = {steps}
rollout_batch_size = 4
n_samples_per_prompt = 4
max_staleness = {staleness}
rollout_max_response_len = 6
rollout_device = "cpu"
[eval]
eval_prompt_data = "{directory}/heldout.jsonl"
[trainer]
train_dtype = "float32"
train_device = "cpu"
lr = 1e-4
save_interval = 3
[sft]
sft_data = "{directory}/sft.jsonl"
sft_steps = 4
sft_batch_size = 16
sft_lr = 1e-3
[bus]
ack_wait = 10
[console]
console = false
"""


def write_small_run(directory: Path, model: Path, name: str, *, steps: int, staleness: int, endings: Sequence[str] = ("",)) -> Path:
    """Writes a small run's config and data; returns the config's path. endings: of its prompts, one after another."""

    def write(path: Path, rows: list[dict[str, str]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    ends = itertools.cycle(endings)
    prompts = [{"prompt": f"{a}+{b}={next(ends)}", "label": str(a + b)} for a, b in SUMS]
    write(directory / "train.jsonl", prompts[:80])
    write(directory / "heldout.jsonl", prompts[80:88])
    write(directory / "sft.jsonl", [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in SUMS[:80]])
    path = directory / f"{name}.toml"
    path.write_text(CONFIG.format(name=name, directory=directory, model=model, steps=steps, staleness=staleness))
    return path


@pytest.fixture
def small_run(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """Writes a small run's config and data; returns the config's path. Keywords: name, steps, staleness."""
    return functools.partial(write_small_run, tmp_path, tiny_model)
