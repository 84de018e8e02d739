"""What `myxo samples` shows: the list of groups, and a group with its samples as a page or as plain data."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic_core
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.data.rollout_files import json_value
from shared.runtime.safe_text import figure_table, printable
from shared.schema.sample import Sample
from shared.view.group_history import BATCHED, DEAD, DROPPED, READY, REQUEUED, TRAINED, GroupRecord, ProvenanceStep

_STYLES = {READY: "green", BATCHED: "cyan", TRAINED: "", DROPPED: "yellow", DEAD: "bold red", REQUEUED: "yellow"}
_REWARDS_SHOWN = 8  # group with more samples shows its rewards as their mean and range
_REASON_SHOWN = 60  # characters of a status: the reason of a death may be long, and the group's own page has all of it


def table(run: str, rows: Sequence[GroupRecord], of: int) -> Table:
    """Returns one line a group."""
    shown = f"{of} groups" if len(rows) == of else f"{len(rows)} of {of} groups"
    lines = Table(title=Text(f"Run {run}: {shown}"), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "attempt"):
        lines.add_column(name, no_wrap=True)
    lines.add_column("status", overflow="fold")
    for name in ("rewards", "tokens", "versions"):
        lines.add_column(name, justify="right")
    lines.add_column("replica")
    lines.add_column("seconds", justify="right", no_wrap=True)
    for group in rows:
        where = printable(group.where())
        lines.add_row(
            Text(printable(group.group)),
            str(group.attempt),
            Text(where if len(where) <= _REASON_SHOWN else where[:_REASON_SHOWN] + " …", style=_STYLES.get(group.status, "dim")),
            _rewards(group.rewards),
            span(group.tokens, group.tokens),
            span(group.oldest, group.newest),
            Text(printable(group.replica) or "–"),
            "–" if group.seconds is None else f"{group.seconds:.1f}",
        )
    return lines


def span(low: Sequence[int], high: Sequence[int]) -> str:
    """Returns the lowest and the highest value, as text."""
    if not low or not high:
        return "–"
    return str(min(low)) if min(low) == max(high) else f"{min(low)}–{max(high)}"


def _rewards(rewards: Sequence[float]) -> str:
    if not rewards:
        return "–"
    if len(rewards) <= _REWARDS_SHOWN:
        return " ".join(f"{reward:.3g}" for reward in rewards)
    return f"{sum(rewards) / len(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})"


CELL = 9  # characters of one token's column
BEGINNING = 60  # characters of a response that a group's overview shows
SHOWN = 600  # characters of a prompt or response that a list of groups shows
NOT_KEPT = "not kept: only their text is; keep_rollouts_tokens keeps ids, masks and log-probs as well"

Pieces = Callable[[Sequence[int]], list[str]]  # returns the text of each of some token ids


@dataclass(frozen=True)
class ShownGroup:
    """A group to show. absent: why there are no samples, where there are none. durable: its step is in a durable checkpoint."""

    run: str
    group: GroupRecord
    samples: Sequence[Sample]
    absent: str | None = None
    durable: bool = False
    provenance: Sequence[ProvenanceStep] = ()


def page(shown: ShownGroup, index: int | None, width: int, pieces: Pieces | None = None) -> RenderableType:
    """Returns a group: all its samples in a line each, or the one of ``index`` in full.

    ``width``: of the terminal, in characters. ``pieces``: None without a tokenizer.
    """
    group, samples = shown.group, shown.samples
    parts: list[RenderableType] = [_heading(shown.run, group, index)]
    if shown.absent is not None:
        parts.append(_nothing(shown.absent))
    if index is None or shown.absent is not None:
        parts += [Text(), _overview(group, samples)]
    if index is None and samples:
        hint = Text(f"One of them in full: myxo samples {shown.run} {group.group}/0", style="dim")
        parts += [*_titled("prompt", prompt_text(samples[0].prompt_text)), Text(), hint]
    elif index is not None and shown.absent is None:
        parts += _in_full(samples[index], group, index, width, pieces)
    if shown.provenance:
        parts += [Text(), Text("provenance", style="bold"), _provenance(shown.provenance)]
    return Group(*parts)


def responses(run: str, groups: Sequence[ShownGroup]) -> RenderableType:
    """Returns prompt and responses of each of some groups, long ones cut."""
    parts: list[RenderableType] = []
    for shown in groups:
        group, samples = shown.group, shown.samples
        parts += [Text(), Text.assemble((printable(group.group), "bold"), "  ", printable(group.where()))]
        parts += [_nothing(shown.absent)] if shown.absent is not None else _named("prompt", prompt_text(samples[0].prompt_text))
        for index, sample in enumerate(samples):
            reward = group.reward_of(index)
            removed = ", removed" if index in group.removed else ""
            parts += _named(f"{index}: {'no reward' if reward is None else f'reward {reward:.4g}'}{removed}", sample.text)
    return Group(*parts, Text(), Text(f"All of one: myxo samples {run} GROUP, of one sample: myxo samples {run} GROUP/INDEX", style="dim"))


# --- plain data


def row_as_plain(shown: ShownGroup, with_texts: bool) -> dict[str, Any]:
    """Returns a line of the list as plain data; ``with_texts``: with prompt and responses."""
    row = {**shown.group.as_plain(), "durable": shown.durable}
    if not with_texts:
        return row
    first = shown.samples[0] if shown.samples else None
    prompt = {"prompt_text": first.prompt_text, "label": first.label} if first is not None else {"prompt_text": None, "label": None}
    samples = [_response(shown.group, index, sample) for index, sample in enumerate(shown.samples)]
    return {**row, **prompt, "samples": samples, "absent": shown.absent}


def as_plain(shown: ShownGroup, index: int | None, pieces: Pieces | None = None) -> dict[str, Any]:
    """Returns what `page` shows as plain data, with whole arrays."""
    wanted = [entry for entry in enumerate(shown.samples) if index in (None, entry[0])]
    return {
        "run": shown.run,
        **shown.group.as_plain(),
        "durable": shown.durable,
        "payload": shown.group.payload,
        "absent": shown.absent,
        "samples": [_sample(shown.group, position, sample, pieces) for position, sample in wanted],
        "provenance": shown.provenance,
    }


def json_line(plain: dict[str, Any]) -> str:
    """Returns plain data as JSON; what is not finite becomes null, and what JSON does not know becomes text."""
    value = pydantic_core.to_jsonable_python(plain, inf_nan_mode="null", bytes_mode="base64", fallback=json_value)
    return json.dumps(value, allow_nan=False)


def _response(group: GroupRecord, index: int, sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "text": sample.text,
        "finish": sample.finish,
        "reward": group.reward_of(index),
        "reward_parts": group.parts_of(index),
        "removed": index in group.removed,
        "unread": group.unread_of(index),
    }


def _sample(group: GroupRecord, index: int, sample: Sample, pieces: Pieces | None) -> dict[str, Any]:
    arrays = {name: getattr(sample, name) for name in ("prompt", "response", "mask", "log_probs")}
    arrays |= {"versions": sample.versions(), "response_pieces": pieces(sample.response.tolist()) if pieces else None}
    return {
        **_response(group, index, sample),
        **{name: getattr(sample, name) for name in ("label", "metadata", "prompt_text", "segments", "turn_rewards")},
        **(arrays if sample.has_ids else dict.fromkeys(arrays)),
    }


# --- parts of a page


def prompt_text(prompt: Any) -> str:
    """Returns a prompt as text: chat messages under their roles."""
    if not isinstance(prompt, list):
        return str(prompt)
    said = ((entry.get("role", "?"), entry.get("content", "")) if isinstance(entry, dict) else ("?", entry) for entry in prompt)
    return "\n".join(f"{role}: {content}" for role, content in said)


def token_lines(sample: Sample, width: int, pieces: Pieces | None = None) -> Iterator[str]:
    """Yields the response's tokens in blocks of as many columns as fit: position, id, text, mask, weight version, log-prob."""
    across, length = max(1, (width - CELL) // CELL), len(sample.response)
    rows: dict[str, Sequence[Any]] = {
        "position": range(length),
        "token": sample.response.tolist(),
        **({"text": [_cell(text) for text in pieces(sample.response.tolist())]} if pieces else {}),
        "mask": sample.mask.tolist(),
        "version": sample.versions().tolist(),
        "log-prob": ["-"] * length if sample.log_probs is None else [f"{value:.3f}" for value in sample.log_probs],
    }
    for begin in range(0, length, across):
        for name, values in rows.items():
            yield name.ljust(CELL) + "".join(str(value).rjust(CELL) for value in values[begin : begin + across])
        yield ""


def _heading(run: str, group: GroupRecord, index: int | None) -> Text:
    name = group.group if index is None else f"{group.group}/{index}"
    made = f" by {group.replica} in {group.seconds:.1f} s" if group.seconds is not None else ""
    where = f"attempt {group.attempt}{made}, {group.where()}"
    return Text.assemble((printable(f"{name} of run {run}"), "bold"), "  ", printable(where))


def _nothing(absent: str) -> Text:
    return Text(printable(f"No samples to show: {absent}."), style="yellow")


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
            f"{reward:.4g}" + (" (removed)" if index in group.removed else "") + (" (unread)" if group.unread_of(index) else ""),
            str(_length(group, index, sample) or "–"),
            span(versions, versions) if group.dataset is not None else span(oldest, newest),
            Text(printable(sample.finish) if sample else "–"),
            Text(printable(text if len(text) <= BEGINNING else text[:BEGINNING] + " …")),
        )
    return lines


def _length(group: GroupRecord, index: int, sample: Sample | None) -> int:
    if index < len(group.tokens):
        return group.tokens[index]
    return sample.segments[-1][1] if sample is not None and sample.segments else 0


def _in_full(sample: Sample, group: GroupRecord, index: int, width: int, pieces: Pieces | None) -> list[RenderableType]:
    reward, there = group.reward_of(index), sample.has_ids
    segments = ", ".join(f"tokens {start}–{end - 1} under version {version}" for start, end, version in sample.segments)
    trained = 0 if index in group.removed else int(np.count_nonzero(sample.mask[sample.versions() >= group.mask_below]))
    tokens = f"{len(sample.prompt)} prompt, {len(sample.response)} response, {trained} of them trained"
    ids = " ".join(str(token) for token in sample.prompt)
    figures = {
        "reward": "none" if reward is None else f"{reward:g}",
        **({"unread": group.unread_of(index)} if group.unread_of(index) else {}),
        **{f"reward {name}": f"{value:g}" for name, value in group.parts_of(index).items()},
        **_rewards_of_turns(sample),
        "label": "none" if sample.label is None else str(sample.label),
        "finish": sample.finish,
        "tokens": tokens if there else f"{_length(group, index, sample)} response",
        "versions": segments or "none",
        **{f"metadata {key}": str(value) for key, value in sample.metadata.items()},
    }
    return [
        Text(),
        figure_table((printable(name), printable(value)) for name, value in figures.items()),
        *_titled("prompt", prompt_text(sample.prompt_text)),
        *_titled("response", sample.text),
        *(_titled("prompt tokens", ids) if there else ()),
        *_titled("response tokens", "\n".join(token_lines(sample, width, pieces)).rstrip("\n") if there else NOT_KEPT),
    ]


def _rewards_of_turns(sample: Sample) -> dict[str, str]:
    turns = ", ".join(f"{value:g} (tokens {start}–{end - 1})" for start, end, value in sample.turn_rewards if value)
    return {"rewards of turns": turns} if turns else {}


def _provenance(steps: Sequence[ProvenanceStep]) -> Table:
    lines = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for step in steps:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.at))
        lines.add_row(Text(f"{step.sequence}", style="dim", justify="right"), Text(at, style="dim"), Text(printable(step.what)))
    return lines


def _titled(title: str, text: str) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), Text(printable(text))]


def _named(name: str, text: str) -> list[RenderableType]:
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]} … ({len(text) - SHOWN} more characters)"
    return [Text(printable(name), style="dim"), Padding(Text(printable(shown)), (0, 0, 0, 2))]


def _cell(text: str) -> str:
    shown = printable(text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣"))
    return shown if len(shown) < CELL else shown[: CELL - 2] + "…"
