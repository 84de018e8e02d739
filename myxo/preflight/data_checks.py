"""Checks that data files are there, that their lines can be used, and that labels can be matched at all.

Files of up to `MOST` lines are read whole, of longer ones that many lines spread over the file, for `SECONDS` at most: the service that
reads the others reports what is wrong with them. Where the config has prompts left out, all are read. The result is remembered: the same
files are not read again.

The first thousand labels of each set are tried on the run's own verifiers. These belong to the reward service, so a process of its own asks
them (`services.reward.label_trial`), each distinct label once. A run is refused where over half of the labels that were tried can surely
never be matched; fewer labels, or doubtful ones, are noted.
"""

import contextlib
import difflib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.engine_limits import longest_trained
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data import data_files, reasoning_gym_source
from shared.data.data_files import DataFile
from shared.data.demonstrations import TRAINED_ROLE, DemonstrationFile
from shared.data.prompts import Chat, PromptFile, TrainingPrompts, fingerprint, spread
from shared.data.rows import ReadProgress
from shared.data.tokenizer import Tokenizer
from shared.rewards.names import REASONING_GYM, RUNS_CODE, VERIFIERS, base, missing_package, needs_label
from shared.rewards.reference import label_text
from shared.runtime import user_cache
from shared.runtime.errors import ConfigError

MOST = 20_000
SECONDS = 5.0

# The most rows, and seconds, for which the texts of a file are read to be compared with those of others.
COMPARED_ROWS, COMPARED_SECONDS = 100_000, 2.0

# Two moments at which chats are rendered, and how many of a file.
DATES, DATED_ROWS = (datetime(2001, 2, 3, 4, 5, 6), datetime(2022, 11, 10, 19, 18, 17)), 16
_FORMAT = 4

Result = tuple[list[str], int, str]  # notes about data that was read, the tokens of the longest prompt, and its file and line


def check_files(inspection: Inspection) -> Findings:
    """Yields the data files that are not there."""
    config = inspection.config
    fields: dict[str, object] = {"sft.sft_data": config.sft.sft_data}
    if not config.debug.trains_only:
        fields = {"data.prompt_data": config.data.prompt_data, **{view.field: view.files for view in eval_views(config)}, **fields}
    expected = "give a JSONL or Parquet file, or hf:ORG/NAME:SPLIT"
    for field, value in fields.items():
        for path in data_files.paths(value):
            if path.is_dir():
                yield ConfigError(field, str(path), f"a directory; {expected}{_suggestion(path, '')}")
            elif not path.is_file():
                yield ConfigError(field, str(path), f"no such file; {expected}{_suggestion(path.parent, path.name)}")


def _suggestion(directory: Path, name: str) -> str:
    if "~" in directory.parts:
        return "; ~ is not expanded here: write the whole path"
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
    config, demonstrations = inspection.config, inspection.demonstrations
    if demonstrations is None or config.sft.sft_data is None:
        return

    def read() -> Result:
        rows, end, lines = spread(len(demonstrations), MOST), time.monotonic() + SECONDS, list[int]()
        with ReadProgress("reading sft.sft_data", len(rows)) as reading:
            for count, row in enumerate(rows, start=1):
                lines.append(demonstrations.check(row))
                reading.at(count)
                if time.monotonic() > end:
                    break
        notes = _unread("sft.sft_data", len(lines), len(demonstrations), "demonstrations", "the trainer")
        if parts := [count for count in lines if count > 1]:
            words = f"{len(parts):,} of {len(lines):,} demonstrations are split into {sum(parts):,} lines"
            notes.append(f"sft.sft_data: {words}, because the chat template rewrites earlier turns; each turn is trained once")
        return notes, 0, ""

    data = config.data
    settings = [config.sft.model_dump(mode="json"), data.tool_key, data.apply_chat_template_kwargs, data.add_special_tokens]
    yield from map(Note, _once(inspection, config.sft.sft_data, [*settings, longest_trained(config)], read)[0])


class _Contents(NamedTuple):
    """What prompts of a file ask, as text by which the same is known, each with its prompt's index; and those that hold an answer, too."""

    asked: list[tuple[int, str]]
    answered: list[int]


def check_contents(inspection: Inspection) -> Findings:
    """Notes prompts that end in an assistant's message, and held-out prompts that are trained on, too: their rewards would say little."""
    trained: dict[str, tuple[PromptFile | DemonstrationFile, _Contents]] = {}
    if (training := inspection.training) is not None:
        trained["training prompts"] = training, _contents(training)
        yield from _answered("data.prompt_data", training, trained["training prompts"][1])
    if inspection.heldout and inspection.demonstrations is not None:
        trained["demonstrations"] = inspection.demonstrations, _contents(inspection.demonstrations)
    for view, prompts in inspection.heldout:
        held = _contents(prompts)
        yield from _answered(view.field, prompts, held)
        for what, (file, found) in trained.items():
            known = {text for _, text in found.asked}
            if common := [index for index, text in held.asked if text in known]:
                count, read = f"{len(common)} of {len(held.asked)}", len({index for index, _ in found.asked})
                part = f" ({read:,} of {len(file):,} {what} were compared)" if read < len(file) else ""
                yield Note(f"{view.field}: {count} held-out prompts are {what}, too{part}; the first: {prompts.entry(common[0]).where()}")


def _answered(field: str, prompts: PromptFile, found: _Contents) -> Findings:
    if found.answered:
        words = f"{len(found.answered):,} of {len(found.asked):,} prompts end in an assistant's message (a gold answer left in?)"
        yield Note(f"{field}: {words}, behind which the model is to answer; the first: {prompts.entry(found.answered[0]).where()}")


def _contents(file: PromptFile | DemonstrationFile) -> _Contents:
    """Reads a file for `COMPARED_SECONDS`. Text counts as a user's message; spaces, and the answer at the end, do not count."""

    def words(content: Any) -> str:
        parts = content if isinstance(content, list) else [content]
        return " ".join(word for part in parts for word in str(part.get("text", part) if isinstance(part, dict) else part).split())

    found, end = _Contents([], []), time.monotonic() + COMPARED_SECONDS
    for index in spread(len(file), COMPARED_ROWS):
        with contextlib.suppress(ConfigError):  # another check reports it
            for question in file.questions(index):
                messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
                said = [(message.get("role"), words(message.get("content"))) for message in messages if isinstance(message, dict)]
                if said and said[-1][0] == TRAINED_ROLE:
                    found.answered.append(index)
                    said.pop()
                found.asked.append((index, json.dumps(said, default=str)))
        if time.monotonic() > end:
            break
    return found


def check_dates(inspection: Inspection) -> Findings:
    """Notes a chat template that writes today's date, by which prompts change from day to day, and how to pin it."""
    if (tokenizer := inspection.tokenizer) is None or not tokenizer.has_chat_template:
        return
    files: dict[str, PromptFile | DemonstrationFile | None] = {"sft.sft_data": inspection.demonstrations}
    if not inspection.config.debug.trains_only:
        files |= {"data.prompt_data": inspection.training} | {view.field: prompts for view, prompts in inspection.heldout}
    for field, file in files.items():
        if file is None:
            continue
        forms, dated = list[str](), list[Chat]()
        for index in spread(len(file), DATED_ROWS):
            with contextlib.suppress(ConfigError):  # another check reports it
                if (chat := file.chat(index)) is not None and _dated(tokenizer, chat, forms):
                    dated.append(chat)
        if not dated:
            continue
        names = dict.fromkeys(re.findall(r"\b(?!strftime_now)\w*(?:date|today|time|now)\w*", str(tokenizer.template)))
        today = datetime.now().strftime(forms[0])
        pin = next((name for name in names if not any(_dated(tokenizer, chat, [], **{name: today}) for chat in dated)), None)
        way = f"apply_chat_template_kwargs = {{{pin} = {json.dumps(today)}}}" if pin else "a chat_template.jinja that writes none"
        yield Note(f"{field}: the chat template writes today's date: prompts change from day to day, on resume too; to pin it: {way}")


def _dated(tokenizer: Tokenizer, chat: Chat, forms: list[str], **pinned: str) -> bool:
    """Returns whether the template writes a chat otherwise at another date. Puts the forms of dates that it asks for into ``forms``."""

    def at(date: datetime) -> str:
        def strftime_now(form: str) -> str:
            forms.append(form)
            return date.strftime(form)

        return tokenizer.render(chat.messages, {**chat.variables, **pinned, "strftime_now": strftime_now})

    try:
        return at(DATES[0]) != at(DATES[1])
    except ConfigError:  # another check reports it, or no variable to pin dates with
        return bool(pinned)


def _check(
    inspection: Inspection,
    config: RunConfig,
    prompts: TrainingPrompts | PromptFile,
    field: str,
    named: list[DataFile],
    metadata: dict[str, Any] | None = None,
) -> Findings:
    def read() -> Result:
        notes = _unread(field, prompts.check(SECONDS, MOST), len(prompts.rows), "prompts", "the buffer")
        if not notes and (count := sum(prompts.left_out.values())):
            reasons = ", ".join(f"{number} {reason}" for reason, number in prompts.left_out.items() if number)
            words = f"{count} of {count + len(prompts)} prompts are left out ({reasons})"
            notes = [f"{field}: {words}; the first: {prompts.first_left_out}"]
        return notes, prompts.longest, "" if prompts.longest_row is None else prompts.rows.where(prompts.longest_row)

    rollout, reward = config.rollout, config.reward
    limits = [rollout.rollout_max_prompt_len, config.may_give_rewards, reward.rm_type, reward.environment_names(), config.algorithm.use_opd]
    notes, longest, place = _once(inspection, named, [field, limits, metadata, config.data.model_dump(mode="json")], read)
    inspection.longest_prompts[field], inspection.longest_places[field] = longest, place
    yield from map(Note, notes)


def _once(inspection: Inspection, named: list[DataFile], settings: Sequence[object], read: Callable[[], Result]) -> Result:
    """Returns the result of ``read``, or of an earlier reading of the same. Raises as ``read``."""
    if inspection.tokenizer is None:
        return read()
    key = f"{fingerprint(inspection.config.model.hf_checkpoint, named, [_FORMAT, MOST, *settings])}.read"
    if (known := user_cache.read(key)) is not None:
        notes, longest, place = json.loads(known)
        return notes, int(longest), place
    result = read()
    user_cache.write(key, json.dumps(result).encode())
    return result


def _unread(field: str, read: int, size: int, what: str, reader: str) -> list[str]:
    reported = f"{field}: {read:,} of {size:,} {what} were read before the start; {reader} tells what is wrong with the others"
    return [reported] if read < size else []


TRIAL_MODULE = "services.reward.label_trial"
MOST_LABELS = 1000  # labels of each set that are looked at
LABEL_SECONDS = 3.0  # processor time for trying labels, once what verifiers need is loaded
START_SECONDS = 30.0  # time that all of it may take besides, on a machine that is busy with other things
PROSE_WORDS = 12  # label of more words is a text, not an answer
_MATHEMATICAL = ("dapo", "deepscaler", "math", "math_verify")
_MISSING = 3
_HASH = "####"
MATH_WORDS = 2  # a mathematical answer may be so many plain words
_WORD = re.compile(r"(?<![\\\w])[A-Za-z]{2,}(?!\w)")


@dataclass(frozen=True)
class Label:
    """The label of a row. ``where``: file and line. ``verifier``: the one that compares it."""

    where: str
    verifier: str
    text: str


def check_labels(inspection: Inspection) -> Findings:
    """Yields a problem for each set of prompts of which most labels can never be matched."""
    training, config = inspection.training, inspection.config
    labels = {} if training is None else {"data.prompt_data": first_labels(config, training)}
    keys = {"data.prompt_data": config.data.label_key}
    for view, prompts in inspection.heldout:
        labels[view.field], keys[view.field] = first_labels(view.config, prompts, view.metadata), view.config.data.label_key
    yield from _without_label(inspection, keys)
    interleaved = (label for several in zip_longest(*labels.values()) for label in several if label is not None)
    distinct = list(dict.fromkeys((label.verifier, label.text) for label in interleaved))
    results, failure = ask_verifiers(distinct) if distinct else ({}, None)
    if failure is not None:
        yield Note(f"labels were not tried on the verifiers: {failure}")
    for field, found in labels.items():
        tried = [(label, results[label.verifier, label.text]) for label in found if (label.verifier, label.text) in results]
        problems = [(label, wrong) for label, result in tried if (wrong := label_problem(label, result, inspection)) is not None]
        if problems:
            yield from _report(f"{field}:{keys[field]}", problems, len(tried))


def _without_label(inspection: Inspection, keys: Mapping[str, str | None]) -> Findings:
    """Yields a note for each set of prompts of which some have no label that their verifier needs: a teacher makes up for it."""
    if not inspection.config.algorithm.use_opd:
        return
    training = [] if inspection.training is None else [("data.prompt_data", inspection.config, inspection.training.rows)]
    for field, config, rows in (*training, *((view.field, view.config, prompts.rows) for view, prompts in inspection.heldout)):
        named, looked = config.reward.environment_of(None), min(len(rows), MOST_LABELS)
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
    for row in range(min(len(rows), MOST_LABELS)):
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


def ask_verifiers(labels: list[tuple[str, str]]) -> tuple[dict[tuple[str, str], dict[str, Any]], str | None]:
    """Returns what the verifiers say of each label, of as many as there was time for, and why they cannot be asked, where that is so."""
    lines, failure = "".join(json.dumps(label) + "\n" for label in labels), None
    try:
        command, seconds = [sys.executable, "-m", TRIAL_MODULE, str(LABEL_SECONDS)], START_SECONDS + LABEL_SECONDS
        trial = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=seconds)
        output = trial.stdout
        if trial.returncode:
            last = (trial.stderr.strip().splitlines() or ["no words"])[-1]
            failure = last + (": pip install 'myxo[reward]'" if trial.returncode == _MISSING else "")
    except subprocess.TimeoutExpired as error:  # a verifier hangs on a label; the answers before it count
        output = (error.stdout or b"").decode(errors="replace")
    answers = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    return dict(zip(labels, answers, strict=False)), failure


def _math_problem(text: str, reads: str, matches: bool, right: str) -> tuple[bool, str] | None:
    if not matches:
        return True, f"{reads} in it and gives no reward even to an answer that says just it; {right}"
    if _HASH in text or "\\boxed" in text:
        return None
    if len(text.split()) > PROSE_WORDS:
        return False, f"is a whole text, of which {reads} alone; {right}"
    in_words = len(_WORD.findall(text)) > MATH_WORDS and "\\text" not in text
    return (False, f"is words, of which {reads}: no number or term that a model would give matches it; {right}") if in_words else None


def label_problem(label: Label, result: dict[str, Any], inspection: Inspection) -> tuple[bool, str] | None:
    """Returns what is wrong with a label, given what its verifier says of it: whether surely no answer can match it, and why."""
    text, right = label.text.strip(), "give the final answer alone, such as 42 or \\frac{1}{2}"
    name = base(label.verifier)
    if not text and needs_label(label.verifier):
        return True, f"is empty; {right if name in _MATHEMATICAL else 'give the text that an answer must have'}"
    if result["why"]:
        return True, f"{result['why']}; {right}"
    if name in _MATHEMATICAL:
        return _math_problem(text, f"{name} reads {result['reads'][:60]!r}", result["matches"], right)
    if name != "exact":
        return None
    longest, tokenizer = inspection.config.rollout.rollout_max_response_len, inspection.tokenizer
    if tokenizer is not None and len(text) > longest and (tokens := len(tokenizer.encode(text))) > longest:
        return True, f"has {tokens} tokens, and {label.verifier} compares all of a response; rollout_max_response_len = {longest}"
    if len(text.split()) > PROSE_WORDS:
        verifier = f"{label.verifier} rewards only a response that is the same"
        return False, f"is a whole text, and {verifier}; give the answer alone, or another rm_type"
    return None


def _report(field: str, problems: list[tuple[Label, tuple[bool, str]]], tried: int) -> Findings:
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


def check_generators(inspection: Inspection) -> Findings:
    """Yields what is wrong with ``reasoning_gym``."""
    curriculum = inspection.config.curriculum
    if curriculum.reasoning_gym and (missing := missing_package(REASONING_GYM)) is not None:
        yield ConfigError(reasoning_gym_source.FIELD, ", ".join(curriculum.reasoning_gym), missing)
    elif curriculum.reasoning_gym:
        for name, (level, *_) in reasoning_gym_source.make(inspection.config).state()["levels"].items():  # raises ConfigError
            if level < (start := curriculum.start_level):
                yield Note(f"curriculum.start_level = {start}: {name} does not take it; it begins at level {level}, its highest")
