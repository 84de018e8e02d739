"""One group and its samples told to a person, or as plain data: text, tokens beside their mask, versions and log-probs, provenance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared.cli.listing import span
from shared.cli.printable import printable
from shared.cli.trails import Facts, Life
from shared.sample import Sample

CELL = 9
"""Characters of one token's column."""

BEGINNING = 60
"""Characters of a response that a group's overview shows."""


def page(run: str, life: Life, samples: Sequence[Sample], index: int | None, absent: str | None, width: int) -> RenderableType:
    """A group: all its samples in a line each, or the one of ``index`` in full.

    Args:
        absent: why there are no samples, where there are none. width: of the terminal, in characters.
    """
    facts = life.facts
    assert facts is not None  # pages are made of groups that were found
    parts: list[RenderableType] = [_heading(run, facts, index)]
    if absent is not None:
        parts.append(Text(f"No samples to show: {absent}.", style="yellow"))
    parts += [Text(), _overview(facts, samples)] if index is None or absent is not None else []
    if index is None and samples:
        parts += [*_titled("prompt", prompt_text(samples[0].prompt_text)), Text(), _hint(run, facts.group)]
    elif index is not None and absent is None:
        parts += _in_full(samples[index], facts, index, width)
    parts += [Text(), Text("provenance", style="bold"), _provenance(life)]
    return Group(*parts)


def as_plain(run: str, life: Life, samples: Sequence[Sample], index: int | None, absent: str | None) -> dict[str, Any]:
    """The same as plain data for JSON, with whole arrays. What is no number there is None."""
    facts = life.facts
    assert facts is not None
    return {
        "run": run,
        **facts.as_plain(),
        "durable": life.trails.durable(facts),
        "payload": life.payload.model_dump() if life.payload else None,
        "absent": absent,
        "samples": [_sample(sample, facts) for sample in samples if index in (None, sample.index)],
        "provenance": [asdict(passage) for passage in life.passages],
    }


def reward_of(facts: Facts, index: int) -> float | None:
    """The reward of one of the group's samples, where it has one."""
    return facts.rewards[index] if index < len(facts.rewards) else None


def parts_of(facts: Facts, index: int) -> dict[str, float]:
    """The named rewards of one of the group's samples."""
    return facts.parts[index] if index < len(facts.parts) else {}


def prompt_text(prompt: Any) -> str:
    """A prompt as text: chat messages under their roles."""
    if not isinstance(prompt, list):
        return str(prompt)
    said = ((entry.get("role", "?"), entry.get("content", "")) if isinstance(entry, dict) else ("?", entry) for entry in prompt)
    return "\n".join(f"{role}: {content}" for role, content in said)


def token_lines(sample: Sample, width: int) -> Iterator[str]:
    """The response's tokens in blocks of as many columns as fit: position, id, mask, weight version and log-prob under each other."""
    across, versions = max(1, (width - CELL) // CELL), sample.versions()
    for begin in range(0, len(sample.response), across):
        part = slice(begin, begin + across)
        yield _row("position", range(begin, min(begin + across, len(sample.response))))
        yield _row("token", sample.response[part])
        yield _row("mask", sample.mask[part])
        yield _row("version", versions[part])
        yield _row("log-prob", [f"{value:.3f}" for value in sample.log_probs[part]])
        yield ""


# --- parts of a page


def _heading(run: str, facts: Facts, index: int | None) -> Text:
    name = facts.group if index is None else f"{facts.group}/{index}"
    made = f" by {facts.replica} in {facts.seconds:.1f} s" if facts.seconds is not None else ""
    where = f"attempt {facts.attempt}{made}, {facts.where()}"
    return Text.assemble((f"{name} of run {run}", "bold"), "  ", printable(where))


def _overview(facts: Facts, samples: Sequence[Sample]) -> Table:
    lines = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("sample", "reward", "tokens", "versions"):
        lines.add_column(name, justify="right", no_wrap=True)
    lines.add_column("finish")
    lines.add_column("response")
    for index, reward in enumerate(facts.rewards):
        sample = samples[index] if index < len(samples) else None
        text = " ".join(sample.text.split()) if sample else ""
        lines.add_row(
            str(index),
            f"{reward:.4g}" + (" (removed)" if index in facts.removed else ""),
            str(facts.tokens[index]),
            span(facts.oldest[index : index + 1], facts.newest[index : index + 1]),
            sample.finish if sample else "–",
            Text(printable(text if len(text) <= BEGINNING else text[:BEGINNING] + " …")),
        )
    return lines


def _hint(run: str, group: str) -> Text:
    return Text(f"One of them in full: myxo samples {run} {group}/0", style="dim")


def _in_full(sample: Sample, facts: Facts, index: int, width: int) -> list[RenderableType]:
    reward, parts = reward_of(facts, index), parts_of(facts, index)
    segments = ", ".join(f"tokens {start}–{end - 1} under version {version}" for start, end, version in sample.segments)
    trained = 0 if index in facts.removed else int(np.count_nonzero(sample.mask[sample.versions() >= facts.mask_below]))
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("reward", "none" if reward is None else f"{reward:g}"),
        *((f"reward {name}", f"{value:g}") for name, value in parts.items()),
        ("label", "none" if sample.label is None else str(sample.label)),
        ("finish", sample.finish),
        ("tokens", f"{len(sample.prompt)} prompt, {len(sample.response)} response, {trained} of them trained"),
        ("versions", segments or "none"),
        *((f"metadata {key}", str(value)) for key, value in sample.metadata.items()),
    ):
        lines.add_row(Text(printable(name), style="dim"), Text(printable(value)))
    return [
        Text(),
        lines,
        *_titled("prompt", prompt_text(sample.prompt_text)),
        *_titled("response", sample.text),
        *_titled("prompt tokens", " ".join(str(token) for token in sample.prompt)),
        *_titled("response tokens", "\n".join(token_lines(sample, width)).rstrip("\n")),
    ]


def _provenance(life: Life) -> Table:
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for passage in life.passages:
        at = datetime.fromtimestamp(passage.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines.add_row(Text(f"{passage.sequence}", style="dim", justify="right"), Text(at, style="dim"), Text(printable(passage.what)))
    return lines


def _titled(title: str, text: str) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), Text(printable(text))]


def _row(name: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> str:
    return name.ljust(CELL) + "".join(str(value).rjust(CELL) for value in values)


def _sample(sample: Sample, facts: Facts) -> dict[str, Any]:
    names = ("index", "finish", "label", "metadata", "prompt_text", "text", "prompt", "response", "mask", "log_probs", "segments")
    fields = {name: _json_value(getattr(sample, name)) for name in names}
    scored = {"reward": reward_of(facts, sample.index), "reward_parts": parts_of(facts, sample.index)}
    return {**fields, "versions": sample.versions().tolist(), **scored, "removed": sample.index in facts.removed}


def _json_value(value: Any) -> Any:
    """What a payload may hold, as JSON has it: arrays as lists, no NaN and no infinity, bytes as text."""
    match value:
        case dict():
            return {str(key): _json_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_json_value(entry) for entry in value]
        case np.ndarray():
            return _json_value(value.tolist())
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | None:
            return value
        case _:
            return str(value)
