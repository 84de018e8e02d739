"""The answers of the page *Samples*: groups, their samples from the store or the run's directory, and commands that show them again."""

import asyncio
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from redis.exceptions import RedisError

from services.console.group_index import Facet, IndexedBatch
from services.console.pages.sample_tokens import Fork, SampleTurn, ShownSample, TokenWindow, as_text, safe
from services.console.run_index import IndexProgress, RunIndex
from services.console.run_source import RunSource
from shared.config.run_config import RunConfig
from shared.data.rollout_files import TRAINED
from shared.runtime.errors import MyxoError
from shared.schema import sample as sample_codec
from shared.schema.sample import Sample
from shared.view.group_history import BATCHED, GroupRecord, ProvenanceStep


class ReplayCommand(BaseModel):
    """A command and what it does; without one, ``what`` says how to have it."""

    what: str
    command: str | None = None


def replay_commands(run: str, directory: Path | None, config: RunConfig | None, group: GroupRecord) -> list[ReplayCommand]:
    """Returns the commands of a group."""
    place = run if directory is None else str(directory)
    shown = ReplayCommand(what="shows it in a terminal", command=shlex.join(["myxo", "samples", place, group.group]))
    if group.status not in (TRAINED, BATCHED) or config is None:
        return [shown]
    return [shown, batch_command(directory, config, group.step)]


def batch_command(directory: Path | None, config: RunConfig, step: int | None) -> ReplayCommand:
    """Returns the command that trains the batch of a step again."""
    template = config.debug.rollout_dump
    if template is None:
        return ReplayCommand(what="To train its batch again, have the run keep its batches: --dump-details DIR")
    if config.algorithm.has_critic:
        return ReplayCommand(what="Its batch cannot be trained again from a dump: the critic's values are not in it")
    where = "CONFIG" if directory is None else str(directory)
    words = ["myxo", "replay", where, template, "--deterministic"]
    return ReplayCommand(what=f"trains the batches up to step {step} again, and prints each step's metrics", command=shlex.join(words))


STORE_SECONDS = 8.0  # The deadline for reading a group from the store


@dataclass(frozen=True)
class FoundSamples:
    """The samples that were found of a group, and where. absent: why there are none. stale: positions of those too old to train."""

    samples: Sequence[Sample]
    source: Literal["store", "kept", "none"]
    absent: str = ""
    stale: tuple[int, ...] = ()


async def find_samples(source: RunSource, index: RunIndex, group: GroupRecord) -> FoundSamples:
    """Returns the samples of a group; never raises for a store that is away or has freed them."""
    absent = index.groups.history.gone(group) if source.live else "only the run's directory is left, which keeps none of this group"
    if absent is None:
        found = await _stored(source, group)
        if not isinstance(found, str):
            return FoundSamples(found, "store")
        absent = found
    record = await index.kept_record(group)
    if record is None or not record.samples:
        return FoundSamples((), "none", absent)
    stale = tuple(position for position, sample in enumerate(record.samples) if sample.stale)
    return FoundSamples(record.decoded(), "kept", stale=stale)


async def _stored(source: RunSource, group: GroupRecord) -> list[Sample] | str:
    """Returns the samples that the store has, or why there are none."""
    if group.payload is None or not group.payload.keys:
        return "the ledger names no payload"
    try:
        blobs = await source.store().read(group.payload, deadline=STORE_SECONDS)
        found = await asyncio.to_thread(sample_codec.decode, blobs)
    except (MyxoError, RedisError) as error:  # away, or freed since the ledger was read, or lost, or overwritten
        return str(error) or type(error).__name__
    there = [entry.index for entry in found]
    if len(there) != len(group.rewards):
        return f"the store holds {len(there)} samples where the ledger names {len(group.rewards)}"
    return found


PREVIEW = 240  # Characters of a response in a group's list of samples
SHOWN_REWARDS = 64  # Rewards of a group in a list


class GroupRow(BaseModel):
    """A group in a list. at: of its last change, admitted: seconds since the epoch. rewards: of its samples, the first `SHOWN_REWARDS`.

    parts: the mean of each named reward over the samples that have it. tokens: of all responses; longest: of one. oldest, newest: versions
    of its trained tokens. truncated: samples that ended at their length. rollouts: fewer than samples where some forked. durable: in a
    durable checkpoint.
    """

    group: str
    status: str
    where: str
    reason: str
    dataset: str | None
    step: int | None
    version: int | None
    attempt: int
    samples: int
    rollouts: int
    rewards: list[float]
    reward: float | None
    parts: dict[str, float]
    tokens: int | None
    longest: int | None
    truncated: int
    removed: int
    oldest: int | None
    newest: int | None
    replica: str
    seconds: float | None
    admitted: float | None
    at: float
    durable: bool


class GroupList(BaseModel):
    """A page of groups: those from ``offset`` on, of ``total``."""

    groups: list[GroupRow]
    total: int
    offset: int
    limit: int
    reading: IndexProgress


class KindCounts(BaseModel):
    """How many groups there are, of training groups or held-out prompts, by status, data set and replica."""

    total: int
    statuses: dict[str, int]
    datasets: dict[str, int]
    replicas: dict[str, int]


class Facets(BaseModel):
    """What lists can be filtered by."""

    training: KindCounts
    evaluation: KindCounts


class StepBatch(BaseModel):
    """The batch of a step; times in seconds since the epoch."""

    step: int
    version: int
    groups: int
    mask_below: int
    amended: int
    formed: float
    started: float | None
    ended: float | None
    replay: ReplayCommand


class PromptMessage(BaseModel):
    """A message of a prompt; a prompt that is no chat is one message without a role. calls: of tools, as JSON."""

    role: str
    text: str
    calls: str = ""


class SampleLine(BaseModel):
    """A sample in its group. stale: its age took it out of the loss; removed: a filter did. unread: why a verifier could not read it.

    rollout: samples that forked from one rollout share it. turns: stretches that the model wrote, None where it is not known.
    """

    index: int
    reward: float | None
    parts: dict[str, float]
    advantage: float | None
    tokens: int | None
    finish: str
    oldest: int | None
    newest: int | None
    removed: bool
    stale: bool
    unread: str
    rollout: int
    role: str
    turns: int | None
    preview: str


class Provenance(BaseModel):
    """A ledger record as far as it concerns a group."""

    sequence: int
    at: float
    event: str
    what: str


class GroupAnswer(BaseModel):
    """A group: source says where its samples are from, absent why there are none."""

    row: GroupRow
    source: Literal["store", "kept", "none"]
    absent: str
    prompt: list[PromptMessage]
    label: str | None
    metadata: dict[str, str]
    samples: list[SampleLine]
    advantage_unknown: str
    provenance: list[Provenance]
    commands: list[ReplayCommand]


class SampleAnswer(BaseModel):
    """A sample in full but for its tokens beyond the window. segments: (start, end, weight version) of the response.

    prompt_read: the prompt as the model read it, which an agent may have made of the task's; empty: not known.
    unknown: by name of a figure of the tokens why there is none; no_tokens: why there are no tokens at all.
    """

    group: str
    line: SampleLine
    status: str
    step: int | None
    source: Literal["store", "kept"]
    prompt: list[PromptMessage]
    prompt_tokens: int | None
    prompt_read: str
    response: str
    label: str | None
    metadata: dict[str, str]
    segments: list[tuple[int, int, int]]
    mask_below: int
    turns: list[SampleTurn]
    forks: list[Fork]
    tokens: TokenWindow | None
    unknown: dict[str, str]
    no_tokens: str
    commands: list[ReplayCommand]
    samples: int


def group_row(group: GroupRecord, durable: bool) -> GroupRow:
    """Returns a group as a line of a list."""
    names = {name for parts in group.parts for name in parts}
    of = len(group.rewards)
    return GroupRow(
        **{name: getattr(group, name) for name in ("group", "status", "dataset", "step", "version", "attempt", "reward", "seconds", "at")},
        where=safe(group.where()),
        reason=safe(group.reason),
        samples=of,
        rollouts=len(set(group.rollouts)) if group.rollouts else of,
        rewards=list(group.rewards[:SHOWN_REWARDS]),
        parts={safe(name): fmean(parts[name] for parts in group.parts if name in parts) for name in sorted(names)},
        tokens=sum(group.tokens) if group.tokens else None,
        longest=max(group.tokens, default=None),
        truncated=len(group.truncated),
        removed=len(group.removed),
        oldest=min(group.oldest, default=None),
        newest=max(group.newest, default=None),
        replica=safe(group.replica),
        admitted=group.admitted or None,
        durable=durable,
    )


def facets_of(found: Sequence[Facet]) -> Facets:
    """Returns the counts of both kinds of groups."""
    return Facets(training=_counts(found, evaluation=False), evaluation=_counts(found, evaluation=True))


def _counts(found: Sequence[Facet], *, evaluation: bool) -> KindCounts:
    own = [facet for facet in found if facet.evaluation == evaluation]

    def by(name: Callable[[Facet], str | None]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for facet in own:
            if key := name(facet):
                counts[safe(key)] = counts.get(safe(key), 0) + facet.groups
        return dict(sorted(counts.items()))

    return KindCounts(
        total=sum(facet.groups for facet in own),
        statuses=by(lambda facet: facet.status),
        datasets=by(lambda facet: facet.dataset),
        replicas=by(lambda facet: facet.replica),
    )


def step_batch(batch: IndexedBatch, replay: ReplayCommand) -> StepBatch:
    """Returns the batch of a step."""
    names = ("step", "version", "mask_below", "amended", "formed", "started", "ended")
    return StepBatch(**{name: getattr(batch, name) for name in names}, groups=len(batch.groups), replay=replay)


def group_answer(
    row: GroupRow,
    group: GroupRecord,
    found: FoundSamples,
    advantages: tuple[list[float] | None, str],
    provenance: Sequence[ProvenanceStep],
    commands: list[ReplayCommand],
) -> GroupAnswer:
    """Returns a group with its samples in short."""
    first = found.samples[0] if found.samples else None
    count = max(len(group.rewards), len(found.samples))
    return GroupAnswer(
        row=row,
        source=found.source,
        absent=safe(found.absent),
        prompt=[] if first is None else prompt_messages(first.prompt_text),
        label=None if first is None or first.label is None else as_text(first.label),
        metadata={} if first is None else metadata_of(first),
        samples=[sample_line(group, index, found, advantages[0]) for index in range(count)],
        advantage_unknown=advantages[1],
        provenance=[Provenance(sequence=step.sequence, at=step.at, event=step.event, what=safe(step.what)) for step in provenance],
        commands=commands,
    )


def sample_line(group: GroupRecord, index: int, found: FoundSamples, advantages: Sequence[float] | None) -> SampleLine:
    """Returns a sample in short: what the ledger tells of it, and what was found."""
    sample = found.samples[index] if index < len(found.samples) else None
    text = "" if sample is None else safe(sample.text)
    return SampleLine(
        index=index,
        reward=group.reward_of(index),
        parts={safe(name): value for name, value in group.parts_of(index).items()},
        advantage=advantages[index] if advantages is not None and index < len(advantages) else None,
        tokens=_entry(group.tokens, index, None if sample is None else _length(sample)),
        finish=sample.finish if sample is not None else "length" if index in group.truncated else "",
        oldest=_entry(group.oldest, index),
        newest=_entry(group.newest, index),
        removed=index in group.removed,
        stale=index in found.stale,
        unread=safe(group.unread_of(index)),
        rollout=sample.rollout if sample is not None else _entry(group.rollouts, index, index) or 0,
        role="" if sample is None else safe(sample.role),
        turns=None if sample is None or not len(sample.response) else sampled_turns(sample),
        preview=text if len(text) <= PREVIEW else text[:PREVIEW] + " …",
    )


def sample_answer(
    shown: ShownSample,
    found: FoundSamples,
    line: SampleLine,
    turns: list[SampleTurn],
    forks: list[Fork],
    tokens: TokenWindow | None,
    unknown: dict[str, str],
    no_tokens: str,
    prompt_read: str,
    commands: list[ReplayCommand],
) -> SampleAnswer:
    """Returns a sample in full."""
    sample, group = shown.sample, shown.group
    return SampleAnswer(
        group=group.group,
        line=line,
        status=group.status,
        step=group.step,
        source="store" if found.source == "store" else "kept",
        prompt=prompt_messages(sample.prompt_text),
        prompt_tokens=len(sample.prompt) or None,
        prompt_read=safe(prompt_read),
        response=safe(sample.text),
        label=None if sample.label is None else as_text(sample.label),
        metadata=metadata_of(sample),
        segments=list(sample.segments),
        mask_below=group.mask_below,
        turns=turns,
        forks=forks,
        tokens=tokens,
        unknown={name: safe(why) for name, why in unknown.items() if why},
        no_tokens=no_tokens,
        commands=commands,
        samples=max(len(group.rewards), len(found.samples)),
    )


def sampled_turns(sample: Sample) -> int:
    """Returns how many stretches of the response the model wrote."""
    mask = (sample.mask != 0).astype(np.int8)
    return int(mask[0]) + int(np.count_nonzero(np.diff(mask) > 0))


def metadata_of(sample: Sample) -> dict[str, str]:
    """Returns a sample's metadata as text."""
    return {safe(str(key)): as_text(value) for key, value in sample.metadata.items()}


def prompt_messages(prompt: Any) -> list[PromptMessage]:
    """Returns a prompt as messages, whatever its form."""
    if isinstance(prompt, list):
        return [_message(entry) for entry in prompt]
    return [PromptMessage(role="", text=as_text(prompt))]


def _message(entry: Any) -> PromptMessage:
    if not isinstance(entry, dict):
        return PromptMessage(role="", text=as_text(entry))
    content, calls = entry.get("content"), entry.get("tool_calls")
    text = "" if content is None else as_text(content)
    return PromptMessage(role=as_text(entry.get("role", "?")), text=text, calls=as_text(calls) if calls else "")


def _entry(values: Sequence[int], index: int, otherwise: int | None = None) -> int | None:
    return values[index] if index < len(values) else otherwise


def _length(sample: Sample) -> int | None:
    return len(sample.response) or (sample.segments[-1][1] if sample.segments else None)
