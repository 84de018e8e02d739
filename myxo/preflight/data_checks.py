"""Whether the lines of the prompt files and of the demonstrations can be used.

Of files of up to `MOST` lines all are read, of longer ones a spread of so many, for `SECONDS` at most: what reads the others tells what is
wrong with them. Where the config has prompts left out, all are read. What was read is remembered: the same files are not read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

from myxo.preflight.inspection import Inspection
from shared.data.data_files import DataFile, files
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
"""How far training prompts are compared with held-out ones."""

_FORMAT = 1

Result = tuple[str | None, int]
"""What there is to say of data that was read, and how many tokens the longest prompt has."""


def check_training_prompts(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the first training prompt that cannot be used; the prompts of a source are seen when they are drawn."""
    yield from _check(inspection, inspection.training, "data.prompt_data", files(inspection.config.data.prompt_data))


def check_heldout_prompts(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the first held-out prompt that cannot be used."""
    yield from _check(inspection, inspection.heldout, "eval.eval_prompt_data", files(inspection.config.eval.eval_prompt_data))


def check_demonstrations(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the first demonstration of the warm start that cannot be used."""
    config = inspection.config
    if config.sft.sft_data is None or inspection.tokenizer is None or not inspection.there(config.sft.sft_data):
        return
    demonstrations = DemonstrationFile(config, inspection.tokenizer)  # raises ConfigError

    def read() -> Result:
        numbers, count, end = spread(len(demonstrations), MOST), 0, time.monotonic() + SECONDS
        with ReadProgress("reading sft.sft_data", len(numbers)) as reading:
            for count, row in enumerate(numbers, start=1):
                demonstrations.check(row)
                reading.at(count)
                if time.monotonic() > end:
                    break
        return _told("sft.sft_data", count, len(demonstrations), "demonstrations", "the trainer"), 0

    budget = config.trainer.max_tokens_per_gpu * config.trainer.context_parallel_size
    settings = [config.sft.model_dump(mode="json"), config.data.tool_key, config.data.apply_chat_template_kwargs, budget]
    _once(inspection, files(config.sft.sft_data), settings, read)
    yield from ()


def check_overlap(inspection: Inspection) -> Iterator[ConfigError]:
    """Tells how many held-out prompts are training prompts too: their rewards would say little."""
    heldout, training = inspection.heldout, inspection.training
    if isinstance(heldout, PromptFile) and isinstance(training, TrainingPrompts):
        end, key = time.monotonic() + OVERLAP_SECONDS, inspection.config.data.input_key
        trained = {hash(content) for _, content in _contents(training.rows, key, end)}
        asked = list(_contents(heldout.rows, key, end))
        if common := [row for row, content in asked if hash(content) in trained]:
            where = heldout.rows.where(common[0])
            inspection.note(
                f"eval.eval_prompt_data: {len(common)} of {len(asked)} held-out prompts are training prompts, too; the first: {where}"
            )
    yield from ()


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
    inspection: Inspection, prompts: TrainingPrompts | PromptFile | ConfigError | None, field: str, named: list[DataFile]
) -> Iterator[ConfigError]:
    if isinstance(prompts, ConfigError):
        yield prompts
    if prompts is None or isinstance(prompts, ConfigError):
        return
    config = inspection.config

    def read() -> Result:
        told = _told(field, prompts.check(SECONDS, MOST), len(prompts.rows), "prompts", "the buffer")
        return told or _left_out(field, prompts), prompts.longest

    limits = [config.rollout.rollout_max_prompt_len, config.reward.rm_type, config.reward.environment_names()]
    longest = _once(inspection, named, [field, limits, config.data.model_dump(mode="json")], read)
    inspection.longest_prompts[field] = longest


def _once(inspection: Inspection, named: list[DataFile], settings: Sequence[object], read: Callable[[], Result]) -> int:
    """Reads, unless the same was read before, and notes what there is to say. Returns the longest prompt's tokens. Raises as ``read``."""
    key = f"{fingerprint(inspection.config.model.hf_checkpoint, named, [_FORMAT, MOST, *settings])}.read"
    known = user_cache.read(key)
    line, longest = read() if known is None else json.loads(known)
    if known is None:
        user_cache.write(key, json.dumps([line, longest]).encode())
    if line is not None:
        inspection.note(line)
    return int(longest)


def _told(field: str, read: int, size: int, what: str, reader: str) -> str | None:
    """Returns how many were read where that is not all."""
    if read >= size:
        return None
    return f"{field}: {read:,} of {size:,} {what} were read before the start; {reader} tells what is wrong with the others"


def _left_out(field: str, prompts: TrainingPrompts | PromptFile) -> str | None:
    """Returns how many prompts are left out where some are."""
    if not (count := sum(prompts.left_out.values())):
        return None
    reasons = ", ".join(f"{number} {reason}" for reason, number in prompts.left_out.items() if number)
    return f"{field}: {count} of {count + len(prompts)} prompts are left out ({reasons}); the first: {prompts.first_left_out}"
