"""The run that a seed disturbs: its config, its prompts, and the model that all runs of a suite share."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.fast.scripted_weights import write_untrained

RUN = "chaos"
SUMS = [(left, right) for left in range(10) for right in range(10)]
SMALLEST = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


@dataclass(frozen=True)
class FastShape:
    """What differs between the runs of seeds. ``mode``: `rollout.in_flight_on_push`. ``lend``: the last replica is on the trainer's GPU
    (`trainer.lend_gpus`), and the others have room for part of a batch alone."""

    steps: int = 7
    groups: int = 3
    samples: int = 2
    replicas: int = 2
    staleness: int = 1
    policy: str = "drop"
    mode: str = "in_place"
    save_interval: int = 2
    eval_interval: int = 5
    lend: bool = False


def write_model(path: Path) -> Path:
    """Writes the tiny checkpoint of which nothing was trained; returns its path."""
    from tests.support.tiny_model import TinyModelShape, write_tiny_model

    write_tiny_model(path, shape=TinyModelShape(**SMALLEST))
    write_untrained(path)
    return path


def sections(directory: Path, model: Path, shape: FastShape) -> dict[str, dict[str, Any]]:
    """Returns the values of a run whose files lie in ``directory``. Times are as short as they may be on a busy machine."""
    return {
        "run": {"name": RUN, "dir": str(directory / "runs")},
        "model": {"hf_checkpoint": str(model)},
        "data": {"prompt_data": str(directory / "train.jsonl"), "rollout_shuffle": True},
        "rollout": {
            "num_rollout": shape.steps,
            "rollout_batch_size": shape.groups,
            "n_samples_per_prompt": shape.samples,
            "rollout_replicas": shape.replicas - shape.lend,
            **({"rollout_concurrency": shape.samples} if shape.lend else {}),
            "max_staleness": shape.staleness,
            "staleness_policy": shape.policy,
            "in_flight_on_push": shape.mode,
            "rollout_max_response_len": 8,
            "rollout_device": "cpu",
            "engine_start_timeout": 60.0,
            "generate_timeout": 20.0,
        },
        "reward": {"rm_type": "math_verify", "reward_workers": 1},
        "eval": {"eval_prompt_data": str(directory / "heldout.jsonl"), "eval_interval": shape.eval_interval, "eval_timeout": 30.0},
        "trainer": {"train_dtype": "float32", "train_device": "cpu", "save_interval": shape.save_interval, "keep_checkpoints": 2}
        | ({"lend_gpus": True} if shape.lend else {}),
        "weights": {"push_timeout": 60.0, "snapshot_interval": 3, "update_weight_buffer_size": 4000},
        "bus": {"ack_wait": 4.0, "registry_ttl": 3.0, "lease_duration": 2.0},
        "monitoring": {"logprob_alarm": 1e9, "keep_rollouts": 1.0, "keep_rollouts_tokens": True},
        "console": {"console": False},
    }


def write_run(directory: Path, model: Path, shape: FastShape) -> Path:
    """Writes a run's config and data; returns the config's path."""
    return write_toml(directory, sections(directory, model, shape))


def write_toml(directory: Path, values: dict[str, dict[str, Any]]) -> Path:
    """Writes a config of these values, and its data beside it; returns its path."""

    def rows(path: Path, sums: list[tuple[int, int]]) -> None:
        path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n" for a, b in sums))

    directory.mkdir(parents=True, exist_ok=True)
    rows(directory / "train.jsonl", SUMS[:80])
    rows(directory / "heldout.jsonl", SUMS[80:84])
    path = directory / "run.toml"
    path.write_text("\n".join(_section(name, fields) for name, fields in values.items()))
    return path


def _section(name: str, fields: dict[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]) + "\n"
