"""``myxo trace RUN``: writes the timeline of a run for Perfetto and ``chrome://tracing``: what each group, the trainer, pushes and services
did when.

Events are those of the Trace Event Format: times in microseconds since the epoch; a group is one slice from its admission to its end, with
its phases as slices inside. It is made from the ledger and the events stream alone; of the events the newest are kept, the ledger is whole.
"""

import argparse
import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.command_arguments import add_run
from myxo.run.run_access import Access, reach
from shared.bus import streams
from shared.bus.subjects import Subjects
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import replacement
from shared.runtime.safe_text import say
from shared.schema.ledger import (
    BatchAmended,
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalEnded,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    LedgerRepaired,
    RunFinished,
    SampleRefused,
    ValuesChanged,
)
from shared.schema.messages import Trained
from shared.schema.service_messages import ServiceEvent
from shared.schema.weight_messages import WeightsLive
from shared.view.group_history import BATCHED, OUTSTANDING, READY, REQUEUED, TRAINED, GroupHistory, GroupRecord

TraceEvent = dict[str, Any]

GROUPS, TRAINER, PUSHES, BUFFER, EVALUATIONS = "groups", "trainer", "weights", "buffer", "evaluations"

# Where a group in flight is, by its status in the history: with the rollout and reward services, back with rewards, in the batch of a step
PLACES = {OUTSTANDING: "outstanding", REQUEUED: "outstanding", READY: "ready", BATCHED: "in batch"}

WAITING, GENERATING, SCORING, TRAINING = "waiting", "generating", "scoring", "training"  # Phases that are known once they are over


@dataclass(slots=True)
class _OpenSlice:
    """A group in flight. ``now``: the time that its slices have come to, seconds since the epoch, which never goes back: clocks differ."""

    where: str
    now: float


@dataclass
class Timeline:
    """Makes trace events of a run's events and of its groups' history."""

    _history: GroupHistory = field(default_factory=GroupHistory)
    _steps: dict[int, dict[str, float]] = field(default_factory=dict)
    _open: dict[str, _OpenSlice] = field(default_factory=dict)
    _evaluating: set[str] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES.values(), 0))
    _tracks: dict[str, int] = field(default_factory=dict)
    _trained_until: float | None = None
    _last: float = 0.0

    def apply(self, record: LedgerRecord) -> Iterator[TraceEvent]:
        """Yields the events that a record makes; records come in the ledger's order."""
        self._last = max(self._last, record.at)
        counted = dict(self._counts)
        yield from self._moment(record)
        for group in self._history.apply(0, record):
            yield from self._group(group, record)
        if self._counts != counted:
            yield self._event("C", GROUPS, "groups in flight", record.at, args=dict(self._counts))

    def step(self, trained: Trained) -> None:
        """Takes the metrics of a training step, which are shown with it; of a step that was made again, the first."""
        self._steps.setdefault(trained.step, {name: value for name, value in trained.metrics.items() if math.isfinite(value)})

    def push(self, live: WeightsLive) -> Iterator[TraceEvent]:
        """Yields the slice of a push."""
        rate = live.bytes / live.seconds / 1e9 if live.seconds > 0 else None
        args = {"replicas": live.replicas, "bytes": live.bytes, "GB/s": rate}
        yield from self._slice(PUSHES, f"push of version {live.version}", live.at - live.seconds, live.at, args)

    def service_event(self, event: ServiceEvent) -> Iterator[TraceEvent]:
        """Yields the mark of something that a service told."""
        yield from self._mark(event.instance, event.what, event.at, {"detail": event.detail} if event.detail else {})

    def end(self) -> Iterator[TraceEvent]:
        """Yields the ends of what had not ended at the last record, and the names of the tracks."""
        for name, group in self._open.items():
            yield from self._phase(name, group.where, self._last, {})
            yield self._event("e", GROUPS, "group", group.now, id=name, args={"end": "in flight"})
        for evaluation in sorted(self._evaluating):
            yield self._event("e", EVALUATIONS, evaluation, self._last, id=evaluation)
        for track, pid in self._tracks.items():
            yield {"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": track}}

    # --- records

    def _moment(self, record: LedgerRecord) -> Iterator[TraceEvent]:
        """Yields the events that are of no single group."""
        match record:
            case BatchTrained(step=step, started=started, ended=ended):
                if self._trained_until is not None:
                    yield from self._slice(TRAINER, WAITING, self._trained_until, started, {"for": f"the batch of step {step}"})
                yield from self._slice(TRAINER, f"step {step}", started, ended, {"version": record.version, **self._steps.get(step, {})})
                self._trained_until = ended
            case EvalStarted(dataset=dataset, version=version, prompts=prompts):
                yield from self._evaluation("b", dataset, version, record.at, {"prompts": prompts})
            case EvalEnded(dataset=dataset, version=version, mean_reward=mean_reward):
                yield from self._evaluation("e", dataset, version, record.at, {"mean reward": mean_reward})
            case SampleRefused(group=name, reason=reason):
                yield from self._mark(TRAINER, "sample refused", record.at, {"group": name, "reason": reason})
            case CheckpointDurable(steps=steps):
                yield from self._mark(TRAINER, "checkpoint durable", record.at, {"steps": steps})
            case RunFinished():
                yield from self._mark(BUFFER, "run finished", record.at, {})
            case LedgerRepaired(resume=steps):
                yield from self._mark(BUFFER, "repaired", record.at, {"continues from": steps})
            case ValuesChanged(step=step, changed=changed):
                yield from self._mark(TRAINER, "values changed", record.at, {"from step": step, "changed": list(changed)})

    def _group(self, group: GroupRecord, record: LedgerRecord) -> Iterator[TraceEvent]:
        """Yields what a record has made of a group: the slices of what it was in, and its beginning or end."""
        name, step = group.group, {"step": group.step}
        if isinstance(record, GroupsAdmitted):
            self._open[name] = _OpenSlice(PLACES[OUTSTANDING], record.at)
            self._counts[PLACES[OUTSTANDING]] += 1
            yield self._event("b", GROUPS, "group", record.at, id=name, args={"group": name, "version": record.version})
        if (known := self._open.get(name)) is None:  # a held-out prompt
            return
        match record:
            case GroupsScored():
                args = {"group": name, "attempt": group.attempt, "replica": group.replica, "rewards": list(group.rewards)}
                yield from self._phase(name, WAITING, group.started, args)
                yield from self._phase(name, GENERATING, group.ended, {**args, "tokens": sum(group.tokens)})
                yield from self._phase(name, SCORING, record.at, args)
            case GroupRequeued(reason=reason):
                yield from self._phase(name, known.where, record.at, {"reason": reason})
            case BatchFormed() | BatchAmended():
                yield from self._phase(name, known.where, record.at, {"group": name, **step})
            case BatchTrained(started=started, ended=ended):
                yield from self._phase(name, known.where, started, step)
                yield from self._phase(name, TRAINING, ended, step)
            case GroupsDropped() | GroupDead():
                yield from self._phase(name, known.where, record.at, {})
        self._counts[known.where] -= 1
        if (where := PLACES.get(group.status)) is not None:
            self._counts[where] += 1
            known.where = where
        else:
            end = f"trained in step {group.step}" if group.status == TRAINED else f"{group.status}: {group.reason}"
            yield self._event("e", GROUPS, "group", self._open.pop(name).now, id=name, args={"end": end})

    def _evaluation(self, kind: str, dataset: str, version: int, at: float, args: Mapping[str, Any]) -> Iterator[TraceEvent]:
        name = f"{dataset} at version {version}"
        if (kind == "b") == (name in self._evaluating):
            return  # it has begun already, or its begin is not in the ledger
        self._evaluating ^= {name}
        yield self._event(kind, EVALUATIONS, name, at, id=name, args=args)

    def _phase(self, name: str, phase: str, end: float, args: Mapping[str, Any]) -> Iterator[TraceEvent]:
        """Yields the slice of an open group from where its slices have come to."""
        if end > (group := self._open[name]).now:
            yield self._event("b", GROUPS, phase, group.now, id=name, args=args)
            yield self._event("e", GROUPS, phase, end, id=name)
            group.now = end

    # --- events

    def _slice(self, track: str, name: str, start: float, end: float, args: Mapping[str, Any]) -> Iterator[TraceEvent]:
        if end > start:
            yield self._event("X", track, name, start, dur=round((end - start) * 1e6), args=args)

    def _mark(self, track: str, name: str, at: float, args: Mapping[str, Any]) -> Iterator[TraceEvent]:
        yield self._event("i", track, name, at, s="p", args=args)

    def _event(self, kind: str, track: str, name: str, at: float, **fields: Any) -> TraceEvent:
        pid = self._tracks.setdefault(track, len(self._tracks) + 1)
        return {"ph": kind, "pid": pid, "tid": 1, "cat": track, "name": name, "ts": round(at * 1e6), **fields}


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    command.add_argument("-o", "--output", type=Path, help="the file, compressed where it ends in .gz (default: trace.json.gz of the run)")
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(trace(parsed.run, parsed.dir, parsed.output, console)))


async def trace(run: str, directory: Path, output: Path | None, console: Console) -> int:
    """Writes the file, whole or not at all. Raises ConfigError where there is no such run, or the file cannot be written."""
    async with reach(run, directory) as access:
        path = output or access.directory.root / "trace.json.gz"
        try:
            with replacement(path) as file:
                compressed = path.suffix == ".gz"
                count = 0
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5) if compressed else nullcontext(file) as out:
                    out.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
                    async for event in _events(access):
                        out.write((b",\n" if count else b"\n") + json.dumps(event).encode())
                        count += 1
                    out.write(b"\n]}\n")
        except OSError as error:
            raise ConfigError("--output", str(path), f"a file that can be written: {error.strerror or error}") from error
    say(f"{path}: {count} events; open it at https://ui.perfetto.dev")
    return exit_codes.DONE


async def _events(access: Access) -> AsyncIterator[TraceEvent]:
    names, timeline = Subjects(access.run), Timeline()
    told = partial(streams.read, access.bus, names.events_stream, strict=False)
    async for _, live in told(WeightsLive, names.event("weights", "live")):
        for event in timeline.push(live):
            yield event
    async for _, reported in told(ServiceEvent, names.event("service", "*")):
        for event in timeline.service_event(reported):
            yield event
    async for _, step in told(Trained, names.event("trainer", "step")):
        timeline.step(step)
    async for _, record in streams.read(access.bus, names.ledger_stream, LedgerRecord):
        for event in timeline.apply(record):
            yield event
    for event in timeline.end():
        yield event
