"""Run configs for tests: the smallest that is valid, with what a test changes laid over it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.config.config_reading import parse
from shared.config.run_config import RunConfig

PROMPTS = [{"prompt": f"{left}+{right}=", "label": str(left + right)} for left in range(3) for right in range(3)]
"""Nine sums of one-digit numbers with their answers."""

HELDOUT = [{"prompt": f"{left}+3=", "label": str(left + 3)} for left in range(3, 7)]
"""Four more."""


SERVED: dict[str, Any] = {"tinker": {"tinker_endpoint": True}, "rollout": {"num_rollout": 0}, "data": {"prompt_data": None}}
"""Sections of a config for `myxo serve`."""


def values(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The plain values of `run_config`, section by section."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "dir": str(directory / "runs")},
        "model": {"hf_checkpoint": str(directory / "model")},
        "data": {"prompt_data": str(directory / "prompts.jsonl")},
        "rollout": {"num_rollout": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2},
    }
    for section, fields in sections.items():
        base.setdefault(section, {}).update(fields)
    return base


def run_config(directory: Path, **sections: dict[str, Any]) -> RunConfig:
    """A config whose files lie in ``directory``: four steps of two groups of two samples, unless ``sections`` say otherwise."""
    return parse(values(directory, **sections))


def write_jsonl(path: Path, rows: Sequence[object] = PROMPTS) -> Path:
    """Writes one JSON value a line; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
