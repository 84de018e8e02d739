"""Whether the files that a config names, and the packages that it needs, are there."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from myxo.preflight.inspection import Inspection
from shared.data import data_files
from shared.runtime import extras
from shared.runtime.errors import ConfigError


def check_model(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is missing of the model's directory."""
    model = inspection.config.model.hf_checkpoint
    if not model.is_dir():
        expected = "no such directory; give one with config.json and *.safetensors, or ORG/NAME of a model on the hub"
        yield ConfigError("model.hf_checkpoint", str(model), expected)
        return
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            yield ConfigError("model.hf_checkpoint", str(model), f"the directory holds no {name}")


def check_tokenizer(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the model's tokenizer."""
    model = inspection.config.model.hf_checkpoint
    if (model / "tokenizer.json").is_file() and inspection.tokenizer_problem is not None:
        yield inspection.tokenizer_problem
    elif inspection.tokenizer is not None and inspection.config.data.apply_chat_template and not inspection.tokenizer.has_chat_template:
        expected = f"the model has no chat template; put a chat_template.jinja into {model}, or leave it out and give prompts as text"
        yield ConfigError("data.apply_chat_template", True, expected)


def check_data(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the data files that are not there."""
    config = inspection.config
    fields = {
        "data.prompt_data": config.data.prompt_data,
        "eval.eval_prompt_data": config.eval.eval_prompt_data,
        "sft.sft_data": config.sft.sft_data,
    }
    expected = "give a JSONL or Parquet file, or hf:ORG/NAME:SPLIT"
    for field, value in fields.items():
        for path in data_files.paths(value):
            if path.is_dir():
                yield ConfigError(field, str(path), f"a directory; {expected}{_among(path, '')}")
            elif not path.is_file():
                yield ConfigError(field, str(path), f"no such file; {expected}{_among(path.parent, path.name)}")


def _among(directory: Path, name: str) -> str:
    """Returns a hint at the data files in ``directory``: the one that is called almost like ``name``, or any."""
    try:
        there = sorted(path.name for path in directory.iterdir() if path.suffix in (".jsonl", ".parquet", ".json"))
    except OSError:
        return ""
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.6) if name else there[:1]
    return f"; did you mean {directory / near[0]}?" if near else ""


def check_packages(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the packages that the config asks for and that are not installed."""
    extras.check(inspection.config)  # raises ConfigError
    yield from ()
