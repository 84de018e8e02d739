"""Checks that data files are there, and that the lines of the prompt files and of the demonstrations can be used.

Files of up to `MOST` lines are read whole, of longer ones that many lines spread over the file, for `SECONDS` at most: the service that
reads the others tells what is wrong with them. Where the config has prompts left out, all are read. The result is remembered: the same
files are not read again.
"""

import difflib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data import data_files
from shared.data.data_files import DataFile
from shared.data.demonstrations import DemonstrationFile
from shared.data.filter_cache import fingerprint
from shared.data.prompts import PromptFile, TrainingPrompts, spread
from shared.data.read_progress import ReadProgress
from shared.data.rows import Rows
from shared.runtime import user_cache
from shared.runtime.errors import ConfigError

MOST = 20_000
SECONDS = 5.0

OVERLAP_ROWS, OVERLAP_SECONDS = 100_000, 2.0
"""The most rows, and seconds, for which training prompts are compared with held-out ones."""

_FORMAT = 3

Result = tuple[str | None, int]
"""A note about data that was read, and the tokens of the longest prompt."""


def check_files(inspection: Inspection) -> Findings:
    """Yields the data files that are not there."""
    config = inspection.config
    sets = {view.field: view.files for view in eval_views(config)}
    fields = {"data.prompt_data": config.data.prompt_data, **sets, "sft.sft_data": config.sft.sft_data}
    if config.debug.trains_only:
        fields = {"sft.sft_data": config.sft.sft_data}
    expected = "give a JSONL or Parquet file, or hf:ORG/NAME:SPLIT"
    for field, value in fields.items():
        for path in data_files.paths(value):
            if path.is_dir():
                yield ConfigError(field, str(path), f"a directory; {expected}{_suggestion(path, '')}")
            elif not path.is_file():
                yield ConfigError(field, str(path), f"no such file; {expected}{_suggestion(path.parent, path.name)}")


def _suggestion(directory: Path, name: str) -> str:
    """Returns a hint at the data files in ``directory``: the one that is called almost like ``name``, or any."""
    try:
        there = sorted(path.name for path in directory.iterdir() if path.suffix in (".jsonl", ".parquet", ".json"))
    except OSError:
        return ""
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.6) if name else there[:1]
    return f"; did you mean {directory / near[0]}?" if near else ""


def check_training_prompts(inspection: Inspection) -> Findings:
    """Yields what is wrong with the first training prompt that cannot be used; the prompts of a source are seen when they are drawn."""
    if inspection.training is not None:
        yield from _check(inspection, inspection.config, inspection.training, "data.prompt_data", inspection.config.data.prompt_data or [])


def check_heldout_prompts(inspection: Inspection) -> Findings:
    """Yields what is wrong with the first prompt of each evaluation set that cannot be used."""
    for view, prompts in inspection.heldout:
        yield from _check(inspection, view.config, prompts, view.field, view.files, view.metadata)


def check_demonstrations(inspection: Inspection) -> Findings:
    """Yields what is wrong with the first demonstration of the warm start that cannot be used."""
    config = inspection.config
    if config.sft.sft_data is None or inspection.tokenizer is None or not inspection.there(config.sft.sft_data):
        return
    demonstrations = DemonstrationFile(config, inspection.tokenizer)  # raises ConfigError

    def read() -> Result:
        rows, count, end = spread(len(demonstrations), MOST), 0, time.monotonic() + SECONDS
        with ReadProgress("reading sft.sft_data", len(rows)) as reading:
            for count, row in enumerate(rows, start=1):
                demonstrations.check(row)
                reading.at(count)
                if time.monotonic() > end:
                    break
        return _unread("sft.sft_data", count, len(demonstrations), "demonstrations", "the trainer"), 0

    budget = config.longest_sample
    data = config.data
    settings = [config.sft.model_dump(mode="json"), data.tool_key, data.apply_chat_template_kwargs, data.add_special_tokens, budget]
    note, _ = _once(inspection, config.sft.sft_data, settings, read)
    yield from [Note(note)] if note is not None else []


def check_overlap(inspection: Inspection) -> Findings:
    """Notes how many held-out prompts are training prompts too: their rewards would say little."""
    training = inspection.training
    if not inspection.heldout or training is None:
        return
    end = time.monotonic() + OVERLAP_SECONDS
    trained = {hash(content) for _, content in _contents(training.rows, inspection.config.data.input_key, end)}
    for view, prompts in inspection.heldout:
        held = list(_contents(prompts.rows, view.config.data.input_key, end))
        if common := [row for row, content in held if hash(content) in trained]:
            count, where = f"{len(common)} of {len(held)}", prompts.rows.where(common[0])
            yield Note(f"{view.field}: {count} held-out prompts are training prompts, too; the first: {where}")


def _contents(rows: Rows, key: str, end: float) -> Iterator[tuple[int, str]]:
    for row in spread(len(rows), OVERLAP_ROWS):
        try:
            content = rows[row].get(key)
        except ConfigError:  # another check reports it, or it is left out
            continue
        yield row, content if isinstance(content, str) else json.dumps(content, default=str)
        if time.monotonic() > end:
            return


def _check(
    inspection: Inspection,
    config: RunConfig,
    prompts: TrainingPrompts | PromptFile,
    field: str,
    named: list[DataFile],
    metadata: dict[str, Any] | None = None,
) -> Findings:
    def read() -> Result:
        unread = _unread(field, prompts.check(SECONDS, MOST), len(prompts.rows), "prompts", "the buffer")
        return unread or _left_out(field, prompts), prompts.longest

    rollout, reward = config.rollout, config.reward
    limits = [rollout.rollout_max_prompt_len, config.may_give_rewards, reward.rm_type, reward.environment_names()]
    note, longest = _once(inspection, named, [field, limits, metadata, config.data.model_dump(mode="json")], read)
    inspection.longest_prompts[field] = longest
    yield from [Note(note)] if note is not None else []


def _once(inspection: Inspection, named: list[DataFile], settings: Sequence[object], read: Callable[[], Result]) -> Result:
    """Returns the result of ``read``, or of an earlier reading of the same. Raises as ``read``."""
    key = f"{fingerprint(inspection.config.model.hf_checkpoint, named, [_FORMAT, MOST, *settings])}.read"
    if (known := user_cache.read(key)) is not None:
        note, longest = json.loads(known)
        return note, int(longest)
    result = read()
    user_cache.write(key, json.dumps(result).encode())
    return result


def _unread(field: str, read: int, size: int, what: str, reader: str) -> str | None:
    """Returns how many were read where that is not all."""
    told = f"{field}: {read:,} of {size:,} {what} were read before the start; {reader} tells what is wrong with the others"
    return told if read < size else None


def _left_out(field: str, prompts: TrainingPrompts | PromptFile) -> str | None:
    """Returns how many prompts are left out where some are."""
    if not (count := sum(prompts.left_out.values())):
        return None
    reasons = ", ".join(f"{number} {reason}" for reason, number in prompts.left_out.items() if number)
    return f"{field}: {count} of {count + len(prompts)} prompts are left out ({reasons}); the first: {prompts.first_left_out}"
