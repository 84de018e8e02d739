"""``myxo init MODEL DATA``: writes a first config for a model and a file of prompts, with a layout that fits this machine's GPUs.

Bytes of training with Adam in bfloat16: two for a weight, four for its gradient in float32, twelve for the float32 copy and the two
moments, which the data-parallel ranks share (`use_distributed_optimizer`).
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.doctor import read_gpus
from myxo.preflight import Source, checked_config
from myxo.preflight.inspection import Inspection
from shared.config import config_reading, devices
from shared.data.prompts import chat_problem
from shared.data.rows import USUAL_LABELS, USUAL_PROMPTS, open_rows
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.model.architecture import Architecture
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, raise_problems
from shared.runtime.safe_text import json_text, say

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")  # but commands of LaTeX
_CHOICE = re.compile(r"\(?[A-J]\)?\Z")
_TESTS = ("assert ", "def check(")
SHORT_ANSWER = 64  # characters up to which text without numbers counts as an answer to be compared as it is


@dataclass(frozen=True)
class Columns:
    """The keys of a file. ``chat``: prompts are lists of messages. ``rm_type``: the reward that fits the labels; ``reason``: why."""

    input_key: str
    label_key: str | None
    chat: bool
    rm_type: str
    reason: str


def guessed(rows: Sequence[Mapping[str, Any]], where: str, rm_type: str | None = None) -> Columns:
    """Returns what rows hold. Raises ConfigError where no key can be the prompt, or no reward is known.

    ``where``: the file, for errors. ``rm_type``: the reward, if somebody knows it.
    """
    keys = [key for key in rows[0] if all(key in row for row in rows)]
    input_key = next((key for key in USUAL_PROMPTS if key in keys and all(_is_prompt(row[key]) for row in rows)), None)
    if input_key is None:
        raise ConfigError("DATA", where, f"no key of its rows ({', '.join(keys)}) is a usual name of a prompt: {', '.join(USUAL_PROMPTS)}")
    label_key = next((key for key in USUAL_LABELS if key in keys and key != input_key), None)
    found = (rm_type, "as it was said") if rm_type is not None else _reward_of(rows, label_key)
    return Columns(input_key, label_key, isinstance(rows[0][input_key], list), *found)


def _is_prompt(value: Any) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or (isinstance(value, list) and chat_problem(value) is None)


def _reward_of(rows: Sequence[Mapping[str, Any]], label_key: str | None) -> tuple[str, str]:
    found = None if label_key is None else _reward_for([row[label_key] for row in rows])
    if found is None:
        why = "there is no key of answers" if label_key is None else f"the answers under {label_key!r} are of no known kind"
        raise ConfigError("--rm-type", None, f"{why}; name a reward (docs/rewards.md), or your own: --custom-rm-path module:function")
    return found


def _reward_for(labels: Sequence[Any]) -> tuple[str, str] | None:
    if all(_is_tests(label) for label in labels):
        return "unit_tests", "the answers are tests of programs"
    texts = [str(label).strip() for label in labels if isinstance(label, str | int | float) and not isinstance(label, bool)]
    if len(texts) < len(labels):
        return None
    if all(_CHOICE.match(text) for text in texts):
        return "exact", "the answers are letters of a choice; the prompt must ask for the letter alone"
    answers = [text.rpartition("####")[2].strip() for text in texts]
    if all(re.search(r"\d", answer) and not _WORD.search(answer) for answer in answers):
        return "math_verify", "the answers are numbers or formulas"
    if all(len(text) <= SHORT_ANSWER for text in texts):
        return "exact", "the answers are short texts"
    return None


def _is_tests(label: Any) -> bool:
    if isinstance(label, dict):
        return {"inputs", "outputs"} <= label.keys() or {"test", "entry_point"} <= label.keys()
    if isinstance(label, list):
        return bool(label) and all(_is_tests(item) or (isinstance(item, dict) and {"input", "output"} <= item.keys()) for item in label)
    return isinstance(label, str) and any(mark in label for mark in _TESTS)


WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12

# Shares of a GPU's memory that the state may take in training, and the weights in serving; activations and the KV cache have the rest.
TRAINING_SHARE, SERVING_SHARE = 0.7, 0.6
MOST_PER_MACHINE = 8


@dataclass(frozen=True)
class GpuLayout:
    """``train_gpus`` ranks of the trainer, ``tensor`` of which share each matrix; ``engines``, each on ``engine_gpus``."""

    train_gpus: int
    tensor: int
    engines: int
    engine_gpus: int
    colocate: bool = False


def proposed(architecture: Architecture, parameters: int, gpus: int, gpu_bytes: float) -> GpuLayout | None:
    """Returns the first layout that fits: the trainer on half of the GPUs, or on more of them, or colocated with the engines on all.

    None: nothing fits.
    """
    gpus = min(gpus, MOST_PER_MACHINE)
    serving = next((size for size in _tensors(architecture, gpus) if parameters * WEIGHT / size <= SERVING_SHARE * gpu_bytes), None)
    if serving is None:
        return None
    for train in range(gpus // 2, gpus - serving + 1):
        if train and (tensor := _fitting(architecture, parameters, train, gpu_bytes)) is not None:
            return GpuLayout(train, tensor, (gpus - train) // serving, serving)
    if (tensor := _fitting(architecture, parameters, gpus, gpu_bytes)) is not None:
        return GpuLayout(gpus, tensor, gpus // serving, serving, colocate=True)
    return None


def _fitting(architecture: Architecture, parameters: int, train: int, gpu_bytes: float) -> int | None:
    for tensor in _tensors(architecture, train):
        state = parameters / tensor * (WEIGHT + GRADIENT) + parameters / train * OPTIMIZER
        if train % tensor == 0 and state <= TRAINING_SHARE * gpu_bytes:
            return tensor
    return None


def _tensors(architecture: Architecture, most: int) -> Iterator[int]:
    yield from (size for size in (1, 2, 4, 8) if size <= most and architecture.num_key_value_heads % size == 0)


ROWS = 64  # rows that are looked at
HELD_OUT, MOST_HELD_OUT = 0.1, 200  # share of the rows that is kept apart for evaluation, and how many at most
LEAST_HELD_OUT = 20  # with fewer nothing is kept apart

# Prompts of a batch, samples of a prompt, and tokens of a response, where data and context have as many.
PROMPTS, SAMPLES, RESPONSE = 32, 8, 1024
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
    reward = command.add_mutually_exclusive_group()
    reward.add_argument("--rm-type", help="the reward, instead of a guess by the answers (docs/rewards.md)")
    reward.add_argument("--custom-rm-path", metavar="MODULE:FUNCTION", help="a reward function of your own")
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
    last = parsed.model.rstrip("/").rpartition("/")[2].partition("@")[0].lower()
    name = parsed.name or re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:63] or "run"
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


def _found(model: str, data: str, name: str, rm_type: str | None) -> _Found:
    rollout = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "rollout_max_response_len": 1}
    given = {"run": {"name": name}, "model": {"hf_checkpoint": model}, "data": {"prompt_data": data}, "reward": {"rm_type": "given"}}
    config = config_reading.load(None, {**given, "rollout": rollout})
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
            room = f"{len(gpus)} x {memory / (1 << 30):.0f} GiB with Adam's moments"
            state = f"{size.parameters / 1e9:.1f} billion parameters do not fit {room}"
            raise ConfigError("MODEL", model, f"{state}; take a smaller model, more GPUs, or trainer.lora_rank (docs/layouts.md)")
    return _Found(columns, len(rows), architecture.max_positions, tokenizer.has_chat_template, layout)


# --- the file


def _lines(name: str, model: str, data: str, found: _Found, own: str | None) -> Iterator[str]:
    columns, held = found.columns, min(int(found.rows * HELD_OUT), MOST_HELD_OUT)
    held = held if held >= LEAST_HELD_OUT else 0
    trained = found.rows - held
    yield "# Made by `myxo init`. Every field is explained by `myxo up --help`; change what you know better."
    yield from _section("run", name=name)
    yield from _section("model", hf_checkpoint=model)
    yield from _section("data", prompt_data=f"{data}@[:{trained}]" if held else data, input_key=columns.input_key)
    yield f"label_key = {json_text(columns.label_key or '')}"
    yield "rollout_shuffle = true"
    if found.template and not columns.chat:
        yield "apply_chat_template = true # the model has a template, and the prompts are plain text"
    yield "\n[reward]"
    yield f"custom_rm_path = {json_text(own)}" if own else f"rm_type = {json_text(columns.rm_type)} # {columns.reason}"
    if held:
        yield from _section("eval", eval_prompt_data=f"{data}@[{trained}:]", eval_interval=20)
    yield from _rollout(found, trained)
    yield "\n[trainer]"
    if found.layout is None:
        yield 'train_dtype = "float32" # no GPU was found: this is for small models'
        yield "lr = 1e-5"
        return
    yield "lr = 1e-6"
    yield f"actor_num_gpus_per_node = {found.layout.train_gpus}"
    if found.layout.tensor > 1:
        yield f"tensor_model_parallel_size = {found.layout.tensor}"
        yield "sequence_parallel = true"
    if found.layout.train_gpus > found.layout.tensor:
        yield "use_distributed_optimizer = true"
    if found.layout.colocate:
        yield "colocate = true # trainer and engines take turns on the same GPUs: the model does not fit beside itself"


def _rollout(found: _Found, prompts: int) -> Iterator[str]:
    layout = found.layout
    yield from _section("rollout", num_rollout=200, rollout_batch_size=min(PROMPTS, prompts), n_samples_per_prompt=SAMPLES)
    yield f"rollout_max_response_len = {min(RESPONSE, found.context // 2)} # of a context of {found.context} tokens"
    if layout is not None:
        yield f"rollout_replicas = {layout.engines}\nrollout_num_gpus_per_engine = {layout.engine_gpus}"
    yield f"max_staleness = {0 if layout is not None and layout.colocate else 2} # versions; 0 is synchronous"


def _section(section: str, **fields: object) -> Iterator[str]:
    yield f"\n[{section}]"
    yield from (f"{field} = {json_text(value)}" for field, value in fields.items())
