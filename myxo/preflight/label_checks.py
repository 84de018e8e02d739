"""Checks that labels can be matched at all: the first thousand of training and of held-out prompts are tried on the run's own verifiers.

The verifiers belong to the reward service, so a process of its own asks them (`services.reward.label_trial`), each distinct label once. A
run is refused where over half of the labels that were tried can surely never be matched; fewer labels, or doubtful ones, are noted.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.run_config import RunConfig
from shared.data.prompts import PromptFile, TrainingPrompts
from shared.rewards.names import RUNS_CODE, VERIFIERS, base, needs_label
from shared.rewards.reference import label_text
from shared.runtime.errors import ConfigError

MODULE = "services.reward.label_trial"
MOST = 1000
"""Labels of each set that are looked at."""

SECONDS = 3.0
"""Processor time for trying labels, once what verifiers need is loaded."""

START_SECONDS = 30.0
"""The time that all of it may take besides, on a machine that is busy with other things."""

PROSE_WORDS = 12
"""A label of more words is a text, not an answer."""

_MATHEMATICAL = ("dapo", "deepscaler", "math", "math_verify")
_MISSING = 3
_HASH = "####"


@dataclass(frozen=True)
class Label:
    """The label of a row. ``where``: file and line. ``verifier``: the one that compares it."""

    where: str
    verifier: str
    text: str


def check(inspection: Inspection) -> Findings:
    """Yields a problem for each set of prompts of which most labels can never be matched."""
    training, config = inspection.training, inspection.config
    labels = {} if training is None else {"data.prompt_data": first_labels(config, training)}
    keys = {"data.prompt_data": config.data.label_key}
    for view, prompts in inspection.heldout:
        labels[view.field], keys[view.field] = first_labels(view.config, prompts, view.metadata), view.config.data.label_key
    yield from _without_label(inspection, keys)
    interleaved = (label for several in zip_longest(*labels.values()) for label in several if label is not None)
    distinct = list(dict.fromkeys((label.verifier, label.text) for label in interleaved))
    results, failure = ask(distinct) if distinct else ({}, None)
    if failure is not None:
        yield Note(f"labels were not tried on the verifiers: {failure}")
    for field, found in labels.items():
        tried = [(label, results[label.verifier, label.text]) for label in found if (label.verifier, label.text) in results]
        problems = [(label, wrong) for label, result in tried if (wrong := problem(label, result, inspection)) is not None]
        if problems:
            yield from _report(f"{field}:{keys[field]}", problems, len(tried))


def _without_label(inspection: Inspection, keys: Mapping[str, str | None]) -> Findings:
    """Yields a note for each set of prompts of which some have no label that their verifier needs: a teacher makes up for it."""
    if not inspection.config.algorithm.use_opd:
        return
    training = [] if inspection.training is None else [("data.prompt_data", inspection.config, inspection.training.rows)]
    for field, config, rows in (*training, *((view.field, view.config, prompts.rows) for view, prompts in inspection.heldout)):
        named, looked = config.reward.environment_of(None), min(len(rows), MOST)
        bare = sum(rows[row].get(keys[field] or "") is None for row in range(looked)) if needs_label(named) else 0
        if bare:
            yield Note(f"{field}: {bare} of {looked} prompts have no label: {named} gives 0 to every response, only the teacher teaches")


def first_labels(config: RunConfig, prompts: TrainingPrompts | PromptFile, overrides: Mapping[str, Any] | None = None) -> list[Label]:
    """Returns the labels that built-in verifiers compare, of the first rows; rows that are no prompts are left out, and so are tests, which
    are no answers and are read with the prompts.

    ``overrides``: put into the metadata of each prompt.
    """
    data, reward, rows = config.data, config.reward, prompts.rows
    found: list[Label] = []
    for row in range(min(len(rows), MOST)):
        try:
            entry = rows[row]
        except ConfigError:  # another check reports it, or it is left out
            continue
        label, metadata = entry.get(data.label_key or ""), entry.get(data.metadata_key)
        named = {**(metadata if isinstance(metadata, dict) else {}), **(overrides or {})}.get("rm_type")
        verifier = reward.environment_of(named)
        if verifier in VERIFIERS and base(verifier) not in RUNS_CODE and isinstance(label, str | int | float):
            found.append(Label(rows.where(row), verifier, label_text(label)[0] or ""))
    return found


def ask(labels: list[tuple[str, str]]) -> tuple[dict[tuple[str, str], dict[str, Any]], str | None]:
    """Returns what the verifiers say of each label, of as many as there was time for, and why they cannot be asked, where that is so."""
    lines, failure = "".join(json.dumps(label) + "\n" for label in labels), None
    try:
        trial = subprocess.run(
            [sys.executable, "-m", MODULE, str(SECONDS)], input=lines, capture_output=True, text=True, timeout=START_SECONDS + SECONDS
        )
        output = trial.stdout
        if trial.returncode:
            last = (trial.stderr.strip().splitlines() or ["no words"])[-1]
            failure = last + (": pip install 'myxo[reward]'" if trial.returncode == _MISSING else "")
    except subprocess.TimeoutExpired as error:  # a verifier hangs on a label; the answers before it count
        output = (error.stdout or b"").decode(errors="replace")
    answers = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    return dict(zip(labels, answers, strict=False)), failure


def problem(label: Label, result: dict[str, Any], inspection: Inspection) -> tuple[bool, str] | None:
    """Returns what is wrong with a label, given what its verifier says of it: whether surely no answer can match it, and why."""
    text, right = label.text.strip(), "give the final answer alone, such as 42 or \\frac{1}{2}"
    name = base(label.verifier)
    if not text:
        return True, f"is empty; {right if name in _MATHEMATICAL else 'give the text that an answer must have'}"
    if result["why"]:
        return True, f"{result['why']}; {right}"
    prose = len(text.split()) > PROSE_WORDS
    if name in _MATHEMATICAL:
        if not result["matches"]:
            return True, f"{name} reads {result['reads']!r} in it and gives no reward even to an answer that says just it; {right}"
        if prose and _HASH not in text and "\\boxed" not in text:
            return False, f"is a whole text, of which {name} reads {result['reads'][:60]!r} alone; {right}"
        return None
    if name != "exact":
        return None
    longest, tokenizer = inspection.config.rollout.rollout_max_response_len, inspection.tokenizer
    if tokenizer is not None and len(text) > longest and (tokens := len(tokenizer.encode(text))) > longest:
        return True, f"has {tokens} tokens, and {label.verifier} compares all of a response; rollout_max_response_len = {longest}"
    if prose:
        verifier = f"{label.verifier} rewards only a response that is the same"
        return False, f"is a whole text, and {verifier}; give the answer alone, or another rm_type"
    return None


def _report(field: str, problems: list[tuple[Label, tuple[bool, str]]], tried: int) -> Findings:
    """Yields the refusal, or one note of the labels that can surely not be matched and one of the others."""
    for sure, what in ((True, "can never be matched"), (False, "can hardly be matched")):
        some = [(label, why) for label, (certain, why) in problems if certain == sure]
        if not some:
            continue
        first, why = some[0]
        shown = repr(first.text if len(first.text) <= 80 else first.text[:80] + "…")
        count = f"{len(some)} of {tried} labels that were tried {what}"
        if sure and len(some) > tried / 2:
            yield ConfigError(field, first.where, f"{count}; this one, {shown}: {why}")
        else:
            yield Note(f"{field}: {count}; the first, {first.where}: {shown}: {why}")
