"""``/api/samples``: the answers of the page *Samples*: lists of groups, a step's batch, a group, a sample token by token."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from services.console.group_samples import FoundSamples, find_samples
from services.console.pages.replay_commands import batch_command, replay_commands
from services.console.pages.sample_answers import (
    Facets,
    GroupAnswer,
    GroupList,
    SampleAnswer,
    StepBatch,
    facets_of,
    group_answer,
    group_row,
    sample_answer,
    sample_line,
    step_batch,
)
from services.console.pages.sample_tokens import MOST_TOKENS, ShownSample, advantages_of, forks, turns, window
from services.console.run_index.group_query import GroupQuery
from services.console.run_index.run_index import RunIndex
from services.console.run_source import RunSource
from services.console.trainer_tokens import trainer_tokens
from shared.data.tokenizer_files import local_tokenizer
from shared.history.group_history import GroupRecord
from shared.schema.ledger import is_evaluation
from shared.schema.message import Count, GroupId

NO_TOKENS = (
    "Tokens cannot be coloured here: this run has kept the text of its responses alone. With monitoring.keep_rollouts_tokens = true "
    "(--keep-rollouts-tokens) it keeps token ids, versions and log-probs, too."
)
NO_TOKENIZER = "the run's tokenizer is not on this machine"


@dataclass
class SamplePages:
    """Answers what the page asks of a run."""

    source: RunSource
    index: RunIndex

    def page(self, query: GroupQuery) -> GroupList:
        """Returns a page of groups."""
        groups, total = self.index.groups.page(query)
        history = self.index.groups.history
        rows = [group_row(group, history.durable(group)) for group in groups]
        return GroupList(groups=rows, total=total, offset=query.offset, limit=query.limit, reading=self.index.reading())

    def batch(self, step: int) -> StepBatch:
        """Returns the batch of a step."""
        config = self.source.config
        found = self.index.groups.batch(step)
        if found is None or config is None:
            raise HTTPException(404, f"no batch of step {step} is known{self._so_far()}")
        return step_batch(found, batch_command(self.source.directory, config, step))

    async def group(self, name: str) -> GroupAnswer:
        """Returns a group with its samples in short."""
        group, found = await self._found(name)
        config = self.source.config
        advantages = advantages_of(group, found.samples, None if config is None else config.algorithm)
        commands = replay_commands(self.source.run, self.source.directory, config, group)
        row = group_row(group, self.index.groups.history.durable(group))
        provenance = await asyncio.to_thread(self.index.groups.provenance, group)
        return group_answer(row, group, found, advantages, provenance, commands)

    async def sample(self, name: str, position: int, first: int, count: int) -> SampleAnswer:
        """Returns one sample, with ``count`` tokens from ``first`` on."""
        group, found = await self._found(name)
        if position >= len(found.samples):
            there = f"it has {len(found.samples)}, from 0" if found.samples else found.absent
            raise HTTPException(404, f"group {name} has no sample {position} to show: {there}")
        return await asyncio.to_thread(self._sample, group, found, position, first, count)

    def _sample(self, group: GroupRecord, found: FoundSamples, position: int, first: int, count: int) -> SampleAnswer:
        config, sample = self.source.config, replace(found.samples[position], group=group.group)
        shown = ShownSample(group, position, sample, stale=position in found.stale)
        tokenizer = None if config is None else local_tokenizer(config)
        trainer = trainer_tokens(config, group.step, sample)
        advantages, why = advantages_of(group, found.samples, None if config is None else config.algorithm)
        advantage = None if advantages is None else advantages[position]
        pieces = None if tokenizer is None else tokenizer.pieces
        decode = None if tokenizer is None else functools.partial(tokenizer.decode, skip_special_tokens=False)
        unknown = {"difference": trainer.absent, "advantages": "" if trainer.advantages is not None else why}
        if not shown.has_ids:
            unknown = {}  # these are figures of tokens
        elif tokenizer is None:
            unknown |= {"text": NO_TOKENIZER}
        if sample.log_probs is None and shown.has_ids:
            unknown |= {"log_probs": "the function that generated it kept none"}
        return sample_answer(
            shown,
            found,
            sample_line(group, position, found, advantages),
            turns(sample, decode) if shown.has_ids else [],
            forks(found.samples, position),
            window(shown, first, count, trainer, advantage, pieces) if shown.has_ids else None,
            unknown,
            "" if shown.has_ids else NO_TOKENS,
            _decoded_prompt(shown, decode),
            replay_commands(self.source.run, self.source.directory, config, group),
        )

    async def _found(self, name: str) -> tuple[GroupRecord, FoundSamples]:
        group = await asyncio.to_thread(self.index.groups.group, name)
        if group is None:
            kind = "held-out prompt has come back under this id" if is_evaluation(name) else "group has this id"
            raise HTTPException(404, f"no {kind}: {name}{self._so_far()}")
        return group, await find_samples(self.source, self.index, group)

    def _so_far(self) -> str:
        reading = self.index.reading()
        return "" if reading.read >= reading.of else f"; {reading.read} of {reading.of} records of the ledger have been read so far"


def _decoded_prompt(shown: ShownSample, decode: Callable[[Sequence[int]], str] | None) -> str:
    """Returns the prompt as the model read it; empty where that is not known."""
    return "" if decode is None or not shown.has_ids else decode(shown.sample.prompt.tolist())


def router(source: RunSource) -> APIRouter:
    """Returns the routes."""
    router, pages = APIRouter(), SamplePages(source, source.shared(RunIndex))

    @router.get("")
    def read_groups(query: Annotated[GroupQuery, Query()]) -> GroupList:
        """A page of groups: filtered, sorted, ``offset`` and ``limit``."""
        return pages.page(query)

    @router.get("/facets")
    def read_facets() -> Facets:
        """What lists can be filtered by, and how many groups there are of each."""
        return facets_of(pages.index.groups.facets())

    @router.get("/batches/{step}")
    def read_batch(step: Count) -> StepBatch:
        """The batch of a step; its groups are the list with ``step``."""
        return pages.batch(step)

    @router.get("/groups/{group}")
    async def read_group(group: GroupId) -> GroupAnswer:
        """A group: its prompt, its samples in short, what became of it, the commands that show and train it again."""
        return await pages.group(group)

    @router.get("/groups/{group}/{sample}")
    async def read_sample(
        group: GroupId, sample: Count, first: Count = 0, count: Annotated[int, Query(ge=0, le=MOST_TOKENS)] = MOST_TOKENS
    ) -> SampleAnswer:
        """A sample: its turns, and ``count`` of its tokens from ``first`` on with version, log-probs, difference and advantage."""
        return await pages.sample(group, sample, first, count)

    return router
