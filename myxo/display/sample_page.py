"""A group and its samples as a page or as plain data: text, tokens beside their mask, versions and log-probs, provenance."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from myxo.display.sample_list import span
from myxo.display.text import printable
from myxo.run.group_history import GroupProvenance, GroupRecord
from shared.schema.sample import Sample

CELL = 9
"""Characters of one token's column."""

BEGINNING = 60
"""Characters of a response that a group's overview shows."""

SHOWN = 600
"""Characters of a prompt or response that a list of groups shows."""

NOT_KEPT = "not kept: only their text is; keep_rollouts_tokens keeps ids, masks and log-probs as well"

Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each of some token ids."""


def page(
    run: str,
    life: GroupProvenance,
    samples: Sequence[Sample],
    index: int | None,
    absent: str | None,
    width: int,
    pieces: Pieces | None = None,
) -> RenderableType:
    """Returns a group: all its samples in a line each, or the one of ``index`` in full.

    Args:
        absent: why there are no samples, where there are none. width: of the terminal, in characters. pieces: None without a tokenizer.
    """
    group = life.record
    assert group is not None  # pages are made of groups that were found
    parts: list[RenderableType] = [_heading(run, group, index)]
    if absent is not None:
        parts.append(Text(f"No samples to show: {absent}.", style="yellow"))
    parts += [Text(), _overview(group, samples)] if index is None or absent is not None else []
    if index is None and samples:
        hint = Text(f"One of them in full: myxo samples {run} {group.group}/0", style="dim")
        parts += [*_titled("prompt", prompt_text(samples[0].prompt_text)), Text(), hint]
    elif index is not None and absent is None:
        parts += _in_full(samples[index], group, index, width, pieces)
    if life.steps:
        parts += [Text(), Text("provenance", style="bold"), _provenance(life)]
    return Group(*parts)


def responses(run: str, rows: Sequence[GroupRecord], samples: Mapping[str, Sequence[Sample]], absent: Mapping[str, str]) -> RenderableType:
    """Returns prompt and responses of each of some groups, long ones cut. ``absent``: why a group has none."""
    parts: list[RenderableType] = []
    for group in rows:
        parts += [Text(), Text.assemble((group.group, "bold"), "  ", printable(group.where()))]
        found = samples.get(group.group, ())
        if not found:
            parts.append(Text(f"No samples to show: {absent.get(group.group, 'none were kept')}.", style="yellow"))
            continue
        parts += _named("prompt", prompt_text(found[0].prompt_text))
        for index, sample in enumerate(found):
            reward = reward_of(group, index)
            removed = ", removed" if index in group.removed else ""
            parts += _named(f"{index}: {'no reward' if reward is None else f'reward {reward:.4g}'}{removed}", sample.text)
    return Group(*parts, Text(), Text(f"All of one: myxo samples {run} GROUP, of one sample: myxo samples {run} GROUP/INDEX", style="dim"))


def texts(group: GroupRecord, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns prompt and responses of a group as plain data for JSON."""
    return {
        "prompt_text": _json_value(samples[0].prompt_text) if samples else None,
        "label": samples[0].label if samples else None,
        "samples": [
            {
                "index": sample.index,
                "text": sample.text,
                "finish": sample.finish,
                "reward": reward_of(group, index),
                "reward_parts": parts_of(group, index),
                "removed": index in group.removed,
            }
            for index, sample in enumerate(samples)
        ],
    }


def as_plain(
    run: str, life: GroupProvenance, samples: Sequence[Sample], index: int | None, absent: str | None, pieces: Pieces | None = None
) -> dict[str, Any]:
    """Returns what `page` shows as plain data for JSON, with whole arrays; a value that is no number, or was not kept, is None."""
    group = life.record
    assert group is not None
    return {
        "run": run,
        **group.as_plain(),
        "durable": life.history.durable(group),
        "payload": group.payload.model_dump() if group.payload else None,
        "absent": absent,
        "samples": [_sample(sample, group, pieces) for sample in samples if index in (None, sample.index)],
        "provenance": [asdict(step) for step in life.steps],
    }


def reward_of(group: GroupRecord, index: int) -> float | None:
    """Returns the reward of one of the group's samples, where it has one."""
    return group.rewards[index] if index < len(group.rewards) else None


def parts_of(group: GroupRecord, index: int) -> dict[str, float]:
    """Returns the named rewards of one of the group's samples."""
    return group.parts[index] if index < len(group.parts) else {}


def prompt_text(prompt: Any) -> str:
    """Returns a prompt as text: chat messages under their roles."""
    if not isinstance(prompt, list):
        return str(prompt)
    said = ((entry.get("role", "?"), entry.get("content", "")) if isinstance(entry, dict) else ("?", entry) for entry in prompt)
    return "\n".join(f"{role}: {content}" for role, content in said)


def token_lines(sample: Sample, width: int, pieces: Pieces | None = None) -> Iterator[str]:
    """Yields the response's tokens in blocks of as many columns as fit: position, id, text, mask, weight version, log-prob."""
    across, versions = max(1, (width - CELL) // CELL), sample.versions()
    texts = [_cell(text) for text in pieces(sample.response.tolist())] if pieces else []
    for begin in range(0, len(sample.response), across):
        part = slice(begin, begin + across)
        yield _row("position", range(begin, min(begin + across, len(sample.response))))
        yield _row("token", sample.response[part])
        if texts:
            yield _row("text", texts[part])
        yield _row("mask", sample.mask[part])
        yield _row("version", versions[part])
        yield _row("log-prob", [f"{value:.3f}" for value in sample.log_probs[part]])
        yield ""


# --- parts of a page


def _heading(run: str, group: GroupRecord, index: int | None) -> Text:
    name = group.group if index is None else f"{group.group}/{index}"
    made = f" by {group.replica} in {group.seconds:.1f} s" if group.seconds is not None else ""
    where = f"attempt {group.attempt}{made}, {group.where()}"
    return Text.assemble((f"{name} of run {run}", "bold"), "  ", printable(where))


def _overview(group: GroupRecord, samples: Sequence[Sample]) -> Table:
    lines = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("sample", "reward", "tokens", "versions"):
        lines.add_column(name, justify="right", no_wrap=True)
    lines.add_column("finish")
    lines.add_column("response")
    for index, reward in enumerate(group.rewards):
        sample = samples[index] if index < len(samples) else None
        text = " ".join(sample.text.split()) if sample else ""
        versions = [version for _, _, version in sample.segments] if sample else []
        oldest, newest = group.oldest[index : index + 1], group.newest[index : index + 1]
        lines.add_row(
            str(index),
            f"{reward:.4g}" + (" (removed)" if index in group.removed else ""),
            str(_length(group, index, sample) or "–"),
            span(versions, versions) if group.dataset is not None else span(oldest, newest),
            sample.finish if sample else "–",
            Text(printable(text if len(text) <= BEGINNING else text[:BEGINNING] + " …")),
        )
    return lines


def _length(group: GroupRecord, index: int, sample: Sample | None) -> int:
    """Returns the tokens of a response; 0 where they are not known."""
    if index < len(group.tokens):
        return group.tokens[index]
    return sample.segments[-1][1] if sample is not None and sample.segments else 0


def _has_ids(sample: Sample) -> bool:
    """Returns whether the sample has its arrays, not only its text."""
    return bool(len(sample.prompt)) or not sample.segments


def _in_full(sample: Sample, group: GroupRecord, index: int, width: int, pieces: Pieces | None) -> list[RenderableType]:
    reward, parts = reward_of(group, index), parts_of(group, index)
    segments = ", ".join(f"tokens {start}–{end - 1} under version {version}" for start, end, version in sample.segments)
    trained = 0 if index in group.removed else int(np.count_nonzero(sample.mask[sample.versions() >= group.mask_below]))
    there = _has_ids(sample)
    tokens = f"{len(sample.prompt)} prompt, {len(sample.response)} response, {trained} of them trained"
    ids = " ".join(str(token) for token in sample.prompt)
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("reward", "none" if reward is None else f"{reward:g}"),
        *((f"reward {name}", f"{value:g}") for name, value in parts.items()),
        ("label", "none" if sample.label is None else str(sample.label)),
        ("finish", sample.finish),
        ("tokens", tokens if there else f"{_length(group, index, sample)} response"),
        ("versions", segments or "none"),
        *((f"metadata {key}", str(value)) for key, value in sample.metadata.items()),
    ):
        lines.add_row(Text(printable(name), style="dim"), Text(printable(value)))
    return [
        Text(),
        lines,
        *_titled("prompt", prompt_text(sample.prompt_text)),
        *_titled("response", sample.text),
        *(_titled("prompt tokens", ids) if there else ()),
        *_titled("response tokens", "\n".join(token_lines(sample, width, pieces)).rstrip("\n") if there else NOT_KEPT),
    ]


def _provenance(life: GroupProvenance) -> Table:
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for step in life.steps:
        at = datetime.fromtimestamp(step.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines.add_row(Text(f"{step.sequence}", style="dim", justify="right"), Text(at, style="dim"), Text(printable(step.what)))
    return lines


def _titled(title: str, text: str) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), Text(printable(text))]


def _named(name: str, text: str) -> list[RenderableType]:
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]} … ({len(text) - SHOWN} more characters)"
    return [Text(name, style="dim"), Padding(Text(printable(shown)), (0, 0, 0, 2))]


def _cell(text: str) -> str:
    """Returns a token's text in one column: white space visible, the rest cut."""
    shown = printable(text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣"))
    return shown if len(shown) < CELL else shown[: CELL - 2] + "…"


def _row(name: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> str:
    return name.ljust(CELL) + "".join(str(value).rjust(CELL) for value in values)


def _sample(sample: Sample, group: GroupRecord, pieces: Pieces | None) -> dict[str, Any]:
    names = ("index", "finish", "label", "metadata", "prompt_text", "text", "prompt", "response", "mask", "log_probs", "segments")
    fields = {name: _json_value(getattr(sample, name)) for name in names}
    scored = {"reward": reward_of(group, sample.index), "reward_parts": parts_of(group, sample.index)}
    arrays = {
        "versions": sample.versions().tolist(),
        "response_pieces": pieces(sample.response.tolist()) if pieces else None,
    }
    if not _has_ids(sample):
        arrays = dict.fromkeys((*arrays, "prompt", "response", "mask", "log_probs"))
    return {**fields, **arrays, **scored, "removed": sample.index in group.removed}


def _json_value(value: Any) -> Any:
    """Returns a value of a payload as JSON has it: arrays as lists, no NaN and no infinity, bytes as text."""
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
