"""``myxo init MODEL DATA``: writes a first config for a model and a file of prompts, with a layout that fits this machine's GPUs."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.doctor.gpus import read_gpus
from myxo.preflight import Source, checked_config
from myxo.preflight.inspection import Inspection
from myxo.proposal.columns import Columns, guessed
from myxo.proposal.layouts import GpuLayout, proposed
from shared.config import config_reading, devices
from shared.data.rows import open_rows
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, raise_problems
from shared.runtime.safe_text import json_text, say

ROWS = 64
"""The rows that are looked at."""

HELD_OUT, MOST_HELD_OUT = 0.1, 200
"""The share of the rows that is kept apart for evaluation, and how many at most."""

LEAST_HELD_OUT = 20
"""With fewer nothing is kept apart."""

PROMPTS, SAMPLES, RESPONSE = 32, 8, 1024
"""Prompts of a batch, samples of a prompt, and tokens of a response, where data and context have as many."""

_ABOUT = """Write a first config: which keys of DATA are prompts and answers, which reward compares them, a held-out part, and a layout that
fits this machine's GPUs. MODEL is a directory or a name on the Hugging Face hub, DATA a JSONL or Parquet file, or hf:ORG/NAME:SPLIT. Every
guess stands in the file with its reason; the config is then checked as `myxo up` checks it."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description = _ABOUT
    command.add_argument("model", metavar="MODEL", help="a directory, or a name on the hub")
    command.add_argument("data", metavar="DATA", help="a file of prompts, or hf:ORG/NAME:SPLIT")
    command.add_argument("-o", "--output", type=Path, help="the config's file (default: NAME.toml)")
    command.add_argument("--name", help="the run's name (default: the model's)")
    command.add_argument("--rm-type", help="the reward, instead of a guess by the answers (docs/rewards.md)")
    command.add_argument("--custom-rm-path", metavar="MODULE:FUNCTION", help="a reward function of your own")
    command.add_argument("--force", action="store_true", help="write over a file that is there")
    command.set_defaults(run_command=_run)


@dataclass(frozen=True)
class _Found:
    """What the config is made from. ``rows``: of the data; ``context``: tokens of the model's; ``template``: it has a chat template."""

    columns: Columns
    rows: int
    context: int
    template: bool
    layout: GpuLayout | None


def _run(parsed: argparse.Namespace, console: Console) -> int:
    name = parsed.name or _name_of(parsed.model)
    path = parsed.output or Path(f"{name}.toml")
    if path.exists() and not parsed.force:
        raise ConfigError("--output", str(path), "a file that is not there yet, or --force")
    own = parsed.custom_rm_path
    found = _found(parsed.model, parsed.data, name, parsed.rm_type or ("custom" if own else None))
    text = "\n".join(_lines(name, parsed.model, parsed.data, found, own)) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError("--output", str(path), f"a file that can be written: {error.strerror}") from error
    say(f"myxo: {path} is written; it is checked now")
    checked_config(Source.of(path, []), starts=True)
    console.print(f"Nothing is wrong with it. Start it: myxo up {path}", soft_wrap=True)
    return exit_codes.DONE


def _name_of(model: str) -> str:
    """Returns a run's name from the last part of a model's."""
    last = model.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
    return re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:63] or "run"


def _found(model: str, data: str, name: str, rm_type: str | None) -> _Found:
    """Reads model and data. Raises ConfigError, or Problems of several."""
    rollout = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "rollout_max_response_len": 1}
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name},
        "model": {"hf_checkpoint": model},
        "data": {"prompt_data": data},
        "rollout": rollout,
        "reward": {"rm_type": "given"},
    }
    reading = config_reading.read(None, sections)
    raise_problems(reading.problems)
    config = reading.config
    assert config is not None  # or there was a problem
    if hub_resolve.found(config):
        hub = Hub.of()
        config = hub_resolve.local(hub_resolve.pinned(config, hub=hub), hub=hub)
    inspection = Inspection(config)
    architecture, size, tokenizer = inspection.architecture, inspection.model_size, inspection.tokenizer
    raise_problems(inspection.problems)
    if architecture is None or size is None or tokenizer is None:
        raise ConfigError("MODEL", model, "a directory with config.json, *.safetensors and tokenizer.json, or a name on the hub")
    rows = open_rows(config.data.prompt_data or [], "DATA")
    if not len(rows):
        raise ConfigError("DATA", data, "at least one row")
    columns = guessed([rows[index] for index in range(min(ROWS, len(rows)))], data, rm_type)
    gpus, layout = read_gpus()[0] if devices.gpus() else [], None
    if gpus:
        memory = min(gpu.total for gpu in gpus) * (1 << 20)
        layout = proposed(architecture, size.parameters, len(gpus), memory)
        if layout is None:
            state = (
                f"{size.parameters / 1e9:.1f} billion parameters do not fit {len(gpus)} x {memory / (1 << 30):.0f} GiB with Adam's moments"
            )
            raise ConfigError("MODEL", model, f"{state}; take a smaller model, more GPUs, or trainer.lora_rank (docs/layouts.md)")
    return _Found(columns, len(rows), architecture.max_positions, tokenizer.has_chat_template, layout)


# --- the file


def _lines(name: str, model: str, data: str, found: _Found, own: str | None) -> Iterator[str]:
    """Yields the config's lines."""
    columns, held = found.columns, min(int(found.rows * HELD_OUT), MOST_HELD_OUT)
    held = held if held >= LEAST_HELD_OUT else 0
    trained = found.rows - held
    yield "# Made by `myxo init`. Every field is explained by `myxo up --help`; change what you know better."
    yield from _section("run", name=name)
    yield from _section("model", hf_checkpoint=model)
    yield from _section("data", prompt_data=f"{data}@[:{trained}]" if held else data, input_key=columns.input_key)
    yield f"label_key = {_toml(columns.label_key or '')}"
    yield "rollout_shuffle = true"
    if found.template and not columns.chat:
        yield "apply_chat_template = true # the model has a template, and the prompts are plain text"
    yield "\n[reward]"
    yield f"custom_rm_path = {_toml(own)}" if own else f"rm_type = {_toml(columns.rm_type)} # {columns.reason}"
    if held:
        yield from _section("eval", eval_prompt_data=f"{data}@[{trained}:]", eval_interval=20)
    yield from _rollout(found, trained)
    yield from _trainer(found.layout)


def _rollout(found: _Found, prompts: int) -> Iterator[str]:
    yield from _section("rollout", num_rollout=200, rollout_batch_size=min(PROMPTS, prompts), n_samples_per_prompt=SAMPLES)
    yield f"rollout_max_response_len = {min(RESPONSE, found.context // 2)} # of a context of {found.context} tokens"
    layout = found.layout
    if layout is not None:
        yield f"rollout_replicas = {layout.engines}"
        yield f"rollout_num_gpus_per_engine = {layout.engine_gpus}"
    yield f"max_staleness = {0 if layout is not None and layout.colocate else 2} # versions; 0 is synchronous"


def _trainer(layout: GpuLayout | None) -> Iterator[str]:
    yield "\n[trainer]"
    if layout is None:
        yield 'train_dtype = "float32" # no GPU was found: this is for small models'
        yield "lr = 1e-5"
        return
    yield "lr = 1e-6"
    yield f"actor_num_gpus_per_node = {layout.train_gpus}"
    if layout.tensor > 1:
        yield f"tensor_model_parallel_size = {layout.tensor}"
        yield "sequence_parallel = true"
    if layout.train_gpus > layout.tensor:
        yield "use_distributed_optimizer = true"
    if layout.colocate:
        yield "colocate = true # trainer and engines take turns on the same GPUs: the model does not fit beside itself"


def _section(section: str, **fields: object) -> Iterator[str]:
    yield f"\n[{section}]"
    yield from (f"{field} = {_toml(value)}" for field, value in fields.items())


def _toml(value: object) -> str:
    """Returns a text or a number as TOML, whose escapes JSON's are."""
    return json_text(value)
