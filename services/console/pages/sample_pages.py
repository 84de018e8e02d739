"""``/api/samples``: the answers of the page *Samples*: lists of groups, a step's batch, a group, a sample token by token.

Samples are the store's, or else those of the run's directory.
"""

import asyncio
import functools
import hashlib
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BaseModel
from redis.exceptions import RedisError

from services.console.pages.sample_tokens import (
    MOST_TOKENS,
    Fork,
    SampleTurn,
    ShownSample,
    TokenWindow,
    advantages_of,
    as_text,
    forks,
    safe,
    trainer_tokens,
    turns,
    window,
)
from services.console.run_histories import IndexProgress, RunIndex
from services.console.run_source import RunSource
from shared.config.run_config import RunConfig
from shared.data.rollout_files import TRAINED
from shared.hub.hub_resolve import local_tokenizer
from shared.runtime.errors import MyxoError
from shared.schema.ledger import is_evaluation
from shared.schema.message import Count, GroupId
from shared.schema.sample import Sample, runs, sampled
from shared.view.group_history import BATCHED, GroupRecord, ProvenanceStep
from shared.view.group_index import Facet, GroupQuery, stored_samples


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
        try:
            found = await stored_samples(source.store(), group, STORE_SECONDS)
        except (MyxoError, RedisError) as error:  # the store is away
            found = str(error) or type(error).__name__
        if not isinstance(found, str):
            return FoundSamples(found, "store")
        absent = found
    record = await index.kept_record(group)
    if record is None or not record.samples:
        return FoundSamples((), "none", absent)
    stale = tuple(position for position, sample in enumerate(record.samples) if sample.stale)
    return FoundSamples(record.decoded(), "kept", stale=stale)


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
    provenance: list[ProvenanceStep]
    commands: list[ReplayCommand]


class SampleAnswer(BaseModel):
    """A sample in full but for its tokens beyond the window. segments: (start, end, weight version) of the response.

    prompt_read: the prompt as the model read it, which an agent may have made of the task's; empty: not known.
    unknown: by name of a figure of the tokens why there is none; no_tokens: why there are no tokens at all. pictures: the SHA-256 of each
    that its tokens show, in order; sounds: whether these are sounds.
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
    pictures: list[str]
    sounds: bool


def group_row(group: GroupRecord, durable: bool) -> GroupRow:
    """Returns a group as a line of a list."""
    names = {name for parts in group.parts for name in parts}
    own = {
        "group": group.group,
        "where": safe(group.where()),
        "reason": safe(group.reason),
        "rollouts": len(set(group.rollouts)) if group.rollouts else len(group.rewards),
        "rewards": group.rewards[:SHOWN_REWARDS],
        "parts": {safe(name): fmean(parts[name] for parts in group.parts if name in parts) for name in sorted(names)},
        "removed": len(group.removed),
        "oldest": min(group.oldest, default=None),
        "newest": max(group.newest, default=None),
        "replica": safe(group.replica),
        "durable": durable,
    }
    return GroupRow.model_validate(group.figures() | own)


def kind_counts(found: Sequence[Facet], *, evaluation: bool) -> KindCounts:
    """Returns the counts of one kind of groups."""
    counts: dict[str, Counter[str]] = {"status": Counter(), "dataset": Counter(), "replica": Counter()}
    for facet in found:
        for name, counted in counts.items():
            if facet.evaluation == evaluation and (key := getattr(facet, name)):
                counted[safe(key)] += facet.groups
    total = sum(facet.groups for facet in found if facet.evaluation == evaluation)
    statuses, datasets, replicas = (dict(sorted(counted.items())) for counted in counts.values())
    return KindCounts(total=total, statuses=statuses, datasets=datasets, replicas=replicas)


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
        turns=None if sample is None else sampled_turns(sample),
        preview=text if len(text) <= PREVIEW else text[:PREVIEW] + " …",
    )


def sampled_turns(sample: Sample) -> int | None:
    """Returns how many stretches of the response the model wrote; None where it is not known."""
    return len(runs(sampled(sample.mask, sample.log_probs))) or None


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


NO_TOKENS = (
    "Tokens cannot be coloured here: this run has kept the text of its responses alone. With monitoring.keep_rollouts_tokens = true "
    "(--keep-rollouts-tokens) it keeps token ids, versions and log-probs, too."
)
NO_TOKENIZER = "the run's tokenizer is not on this machine"


@dataclass
class SamplePages:
    """Answers what the page asks of a run: each route is a method."""

    source: RunSource
    index: RunIndex

    def page(self, query: Annotated[GroupQuery, Query()]) -> GroupList:
        """Returns a page of groups: filtered, sorted, ``offset`` and ``limit``."""
        groups, total = self.index.groups.page(query)
        history = self.index.groups.history
        rows = [group_row(group, history.durable(group)) for group in groups]
        return GroupList(groups=rows, total=total, offset=query.offset, limit=query.limit, reading=self.index.reading())

    def facets(self) -> Facets:
        """Returns what lists can be filtered by, and how many groups there are of each."""
        found = self.index.groups.facets()
        return Facets(training=kind_counts(found, evaluation=False), evaluation=kind_counts(found, evaluation=True))

    def batch(self, step: Count) -> StepBatch:
        """Returns the batch of a step; its groups are the list with ``step``."""
        config = self.source.config
        found = self.index.groups.batch(step)
        if found is None or config is None:
            raise HTTPException(404, f"no batch of step {step} is known{self._so_far()}")
        replay = batch_command(self.source.directory, config, step)
        return StepBatch(**{**asdict(found), "groups": len(found.groups)}, replay=replay)

    async def group(self, group: GroupId) -> GroupAnswer:
        """Returns a group: its prompt, its samples in short, what became of it, the commands that show and train it again."""
        record, found = await self._found(group)
        advantages, unknown = self._advantages(record, found)
        provenance = await asyncio.to_thread(self.index.groups.provenance, record)
        first = found.samples[0] if found.samples else None
        return GroupAnswer(
            row=group_row(record, self.index.groups.history.durable(record)),
            source=found.source,
            absent=safe(found.absent),
            prompt=[] if first is None else prompt_messages(first.prompt_text),
            label=None if first is None else _label(first),
            metadata={} if first is None else metadata_of(first),
            samples=[sample_line(record, index, found, advantages) for index in range(max(len(record.rewards), len(found.samples)))],
            advantage_unknown=unknown,
            provenance=[replace(step, what=safe(step.what)) for step in provenance],
            commands=replay_commands(self.source.run, self.source.directory, self.source.config, record),
        )

    async def sample(
        self, group: GroupId, sample: Count, first: Count = 0, count: Annotated[int, Query(ge=0, le=MOST_TOKENS)] = MOST_TOKENS
    ) -> SampleAnswer:
        """Returns a sample: its turns, and ``count`` of its tokens from ``first`` on with version, log-probs, difference and advantage."""
        record, found = await self._present(group, sample)
        return await asyncio.to_thread(self._sample, record, found, sample, first, count)

    async def picture(self, group: GroupId, sample: Count, digest: str) -> Response:
        """Returns a picture that a sample shows, by the SHA-256 of its PNG, or a sound, of its WAV."""
        _, found = await self._present(group, sample)
        picture = {named(one): one for one in found.samples[sample].pictures}.get(digest)
        if picture is None:
            raise HTTPException(404, f"sample {sample} of group {group} shows no such picture, or the store has freed it")
        headers = {"Cache-Control": "private, max-age=3600, immutable"}
        return Response(picture, media_type="audio/wav" if picture[:4] == b"RIFF" else "image/png", headers=headers)

    async def _present(self, name: str, position: int) -> tuple[GroupRecord, FoundSamples]:
        group, found = await self._found(name)
        if position >= len(found.samples):
            there = f"it has {len(found.samples)}, from 0" if found.samples else found.absent
            raise HTTPException(404, f"group {name} has no sample {position} to show: {there}")
        return group, found

    def _sample(self, group: GroupRecord, found: FoundSamples, position: int, first: int, count: int) -> SampleAnswer:
        sample = replace(found.samples[position], group=group.group)
        shown = ShownSample(group, position, sample, stale=position in found.stale)
        advantages, why = self._advantages(group, found)
        of_tokens = self._of_tokens(shown, first, count, None if advantages is None else advantages[position], why)
        if found.source == "kept" and self.source.config is not None and self.source.config.data.multimodal_keys is not None:
            of_tokens["unknown"] |= {"pictures": "the store has freed them with the group"}
        return SampleAnswer(
            group=group.group,
            line=sample_line(group, position, found, advantages),
            status=group.status,
            step=group.step,
            source="store" if found.source == "store" else "kept",
            prompt=prompt_messages(sample.prompt_text),
            prompt_tokens=len(sample.prompt) or None,
            response=safe(sample.text),
            label=_label(sample),
            metadata=metadata_of(sample),
            segments=list(sample.segments),
            mask_below=group.mask_below,
            forks=forks(found.samples, position),
            commands=replay_commands(self.source.run, self.source.directory, self.source.config, group),
            samples=max(len(group.rewards), len(found.samples)),
            pictures=[named(one) for one in sample.pictures],
            sounds=any(one[:4] == b"RIFF" for one in sample.pictures),
            **of_tokens,
        )

    def _of_tokens(self, shown: ShownSample, first: int, count: int, advantage: float | None, why: str) -> dict[str, Any]:
        """Returns the fields of a `SampleAnswer` that are made of its token ids. ``why``: why its advantage is not known."""
        if not shown.sample.has_ids:
            return {"prompt_read": "", "turns": [], "tokens": None, "unknown": {}, "no_tokens": NO_TOKENS}
        config, sample = self.source.config, shown.sample
        tokenizer = None if config is None else local_tokenizer(config)
        decode = None if tokenizer is None else functools.partial(tokenizer.decode, skip_special_tokens=False)
        trainer = trainer_tokens(config, shown.group.step, sample)
        unknown = {"difference": trainer.absent, "advantages": "" if trainer.advantages is not None else why}
        unknown["text"] = NO_TOKENIZER if tokenizer is None else ""
        unknown["log_probs"] = "the function that generated it kept none" if sample.log_probs is None else ""
        return {
            "prompt_read": "" if decode is None else safe(decode(sample.prompt.tolist())),
            "turns": turns(sample, decode),
            "tokens": window(shown, first, count, trainer, advantage, None if tokenizer is None else tokenizer.pieces),
            "unknown": {name: safe(reason) for name, reason in unknown.items() if reason},
            "no_tokens": "",
        }

    def _advantages(self, group: GroupRecord, found: FoundSamples) -> tuple[list[float] | None, str]:
        config = self.source.config
        if config is not None and config.rollout.agent_roles and not found.samples:
            return None, "rewards are compared within a role, and the samples that say who played which are not kept"
        return advantages_of(group, found.samples, None if config is None else config.algorithm)

    async def _found(self, name: str) -> tuple[GroupRecord, FoundSamples]:
        group = await asyncio.to_thread(self.index.groups.group, name)
        if group is None:
            kind = "held-out prompt has come back under this id" if is_evaluation(name) else "group has this id"
            raise HTTPException(404, f"no {kind}: {name}{self._so_far()}")
        return group, await find_samples(self.source, self.index, group)

    def _so_far(self) -> str:
        reading = self.index.reading()
        return "" if reading.read >= reading.of else f"; {reading.read} of {reading.of} records of the ledger have been read so far"


def named(picture: bytes) -> str:
    """Returns a picture's name: its SHA-256."""
    return hashlib.sha256(picture).hexdigest()


def _label(sample: Sample) -> str | None:
    return None if sample.label is None else as_text(sample.label)


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    router, pages = APIRouter(), SamplePages(source, source.shared(RunIndex))
    router.get("")(pages.page)
    router.get("/facets")(pages.facets)
    router.get("/batches/{step}")(pages.batch)
    router.get("/groups/{group}")(pages.group)
    router.get("/groups/{group}/{sample}/pictures/{digest}")(pages.picture)
    router.get("/groups/{group}/{sample}")(pages.sample)
    return router
