"""Whether every line of the prompt files and of the demonstrations can be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shared.cli.preflight.inspection import Inspection
from shared.demonstrations import DemonstrationFile
from shared.errors import ConfigError
from shared.prompts import PromptFile, TrainingPrompts, eval_prompts, training_prompts

LONGEST_LINE = 1000
"""Characters that are shown about prompts that are left out: one may be long."""


def check_training_prompts(inspection: Inspection) -> Iterator[ConfigError]:
    """Reads every training prompt once; the prompts of a source are seen when they are drawn."""
    config = inspection.config
    if config.data.data_source is None and inspection.tokenizer is not None and inspection.there(config.data.prompt_data):
        _read_all(training_prompts(config, inspection.tokenizer), "data.prompt_data", inspection)
    yield from ()


def check_heldout_prompts(inspection: Inspection) -> Iterator[ConfigError]:
    """Reads every held-out prompt once."""
    config = inspection.config
    if inspection.tokenizer is None or not inspection.there(config.eval.eval_prompt_data):
        return
    if (heldout := eval_prompts(config, inspection.tokenizer)) is not None:
        _read_all(heldout, "eval.eval_prompt_data", inspection)
    yield from ()


def check_demonstrations(inspection: Inspection) -> Iterator[ConfigError]:
    """Reads every demonstration of the warm start once."""
    config = inspection.config
    if config.sft.sft_data is not None and inspection.tokenizer is not None and inspection.there(config.sft.sft_data):
        demonstrations = DemonstrationFile(config, inspection.tokenizer)
        for row in range(len(demonstrations)):
            demonstrations.check(row)
    yield from ()


def _read_all(prompts: TrainingPrompts | PromptFile, field: str, inspection: Inspection) -> None:
    """Raises ConfigError for the first prompt that cannot be used; tells on standard error how many are left out."""
    prompts.check()
    if prompts.longest:
        inspection.longest_prompts[field] = prompts.longest
    if (count := sum(prompts.left_out.values())) > 0:
        reasons = ", ".join(f"{number} {reason}" for reason, number in prompts.left_out.items() if number)
        first = " ".join(str(prompts.first_left_out).split())
        line = f"{field}: {count} of {count + len(prompts)} prompts are left out ({reasons}); the first: {first}"
        print(f"myxo: {line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + ' …'}", file=sys.stderr)
