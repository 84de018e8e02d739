"""Whether the files that a config names, and the packages that it needs, are there."""

from __future__ import annotations

from collections.abc import Iterator

from shared import data_files, extras
from shared.cli.preflight.inspection import Inspection
from shared.errors import ConfigError


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
    if (inspection.config.model.hf_checkpoint / "tokenizer.json").is_file() and inspection.tokenizer_problem is not None:
        yield inspection.tokenizer_problem


def check_data(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the data files that are not there."""
    config = inspection.config
    fields = {
        "data.prompt_data": config.data.prompt_data,
        "eval.eval_prompt_data": config.eval.eval_prompt_data,
        "sft.sft_data": config.sft.sft_data,
    }
    for field, value in fields.items():
        for path in data_files.paths(value):
            if not path.is_file():
                yield ConfigError(field, str(path), "no such file; give a JSONL or Parquet file, or hf:ORG/NAME:SPLIT")


def check_packages(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the packages that the config asks for and that are not installed."""
    extras.check(inspection.config)  # raises ConfigError
    yield from ()
