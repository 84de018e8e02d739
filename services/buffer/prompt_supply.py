"""The prompts of a run in the buffer: opened once, counted in log and gauges, compared with the files that the run began with, and the
results that a source of prompts which adapts hears of.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.buffer.state import BufferState, GroupState
from shared.bus import runs
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data.data_files import paths
from shared.data.data_source import DrawnPrompts, GroupResult, PromptStream, ResultLog
from shared.data.prompts import Prompt, PromptFile, TrainingPrompts, eval_prompts
from shared.data.rollout_files import DEAD, DROPPED, TRAINED
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError, raise_problems
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema.ledger import (
    BatchAmended,
    BatchTrained,
    GroupDead,
    GroupsAdmitted,
    GroupsDropped,
    LedgerRecord,
    eval_group_parts,
    group_number,
)
from shared.service.service_base import Service

BLOCK_BYTES = 1 << 16

# The most blocks of a file that are read: 64 MiB. A longer file is sampled, at equal distances, its first and last block among them.
MOST_BLOCKS = 1024


class DataFingerprint(BaseModel):
    """What a file was. size: bytes. modified_ns: time of its last change. digest: XXH3 of its blocks that were read, in hexadecimal."""

    model_config = ConfigDict(frozen=True)

    size: int
    modified_ns: int
    digest: str

    @property
    def sampled(self) -> bool:
        """Returns whether some of the file's bytes were not read."""
        return self.size > MOST_BLOCKS * BLOCK_BYTES


ACCEPT = "continue with the prompts that are there now: --accept-changed-data"
Fingerprints = dict[str, DataFingerprint]  # Of files, by path
_FINGERPRINTS = TypeAdapter(Fingerprints)


def encode_fingerprints(fingerprints: Fingerprints) -> bytes:
    """Returns them as JSON."""
    return _FINGERPRINTS.dump_json(fingerprints)


def decode_fingerprints(data: bytes | None) -> Fingerprints:
    """Reads what `encode` has written; empty where there is nothing, or what is there is none."""
    try:
        return _FINGERPRINTS.validate_json(data or b"{}")
    except ValidationError:
        return {}


def named_files(config: RunConfig) -> dict[Path, str]:
    """Returns the run's files of prompts, with the field that names each."""
    training = {path: "data.prompt_data" for path in paths(config.data.prompt_data)}
    return {path: view.field for view in eval_views(config) for path in paths(view.files)} | training


def fingerprints(config: RunConfig) -> Fingerprints:
    """Returns what the run's files are now. Raises ConfigError for one that cannot be read."""
    found = {}
    for path, field in named_files(config).items():
        try:
            found[str(path)] = fingerprint(path)
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be read: {error.strerror}") from None
    return found


def fingerprint(path: Path) -> DataFingerprint:
    """Returns what a file is now. Raises OSError."""
    stat, digest = path.stat(), xxhash.xxh3_128()
    with path.open("rb") as file:
        for offset in _offsets(stat.st_size):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
    return DataFingerprint(size=stat.st_size, modified_ns=stat.st_mtime_ns, digest=digest.hexdigest())


def _offsets(size: int) -> Iterator[int]:
    blocks = -(-size // BLOCK_BYTES)
    read = min(blocks, MOST_BLOCKS)
    yield from (number * (blocks - 1) // max(1, read - 1) * BLOCK_BYTES for number in range(read))


def changed_files(known: Fingerprints, found: Fingerprints, fields: Mapping[Path, str]) -> list[ConfigError]:
    """Returns a refusal for each file that is another than it was. A new time alone is no change: files are copied."""
    return [
        ConfigError(fields[Path(path)], path, f"{difference} since the run began; put it back, or {ACCEPT}")
        for path, now in found.items()
        if path in known and (difference := _difference(known[path], now))
    ]


def touched_files(known: Fingerprints, found: Fingerprints) -> list[str]:
    """Returns the files too long to be read whole that were written since, though no difference was seen."""
    return [path for path, now in found.items() if path in known and now.sampled and known[path].modified_ns != now.modified_ns]


async def check_data(service: Service, found: Fingerprints, accepted: Callable[[], Awaitable[None]], *, begun: bool) -> None:
    """Raises Problems where a file of prompts is another than when the run began, and that is not accepted; notes what the files are.
    ``accepted``: awaited before that where it is, and training prompts have changed."""
    noted = await runs.data(service.bus, service.run) if begun else None
    known = decode_fingerprints(noted)
    if noted and not known:
        service.log.error("data_unreadable", next_action="the files of prompts count as unchanged, and are noted anew")
    problems = changed_files(known, found, named_files(service.config))
    if not service.config.data.accept_changed_data:
        raise_problems(problems)
    for problem in problems:
        service.log.warning("changed_data_accepted", field=problem.field, file=problem.value)
    if any(problem.field == "data.prompt_data" for problem in problems):
        await accepted()
    if written := touched_files(known, found):
        service.log.warning("data_written_since", files=written, detail="sampled parts are as they were; the rest was not read")
    if found != known:
        await runs.set_data(service.bus, service.run, encode_fingerprints(found))


def _difference(then: DataFingerprint, now: DataFingerprint) -> str:
    if then.size != now.size:
        return f"has changed from {then.size:,} to {now.size:,} bytes"
    return "" if then.digest == now.digest else "has changed, though not in length,"


def follow_results(log: ResultLog, state: BufferState, record: LedgerRecord) -> None:
    """Puts what a record says into the log. ``state``: before the record is applied."""
    if isinstance(record, GroupsAdmitted):
        log.admit(record.first)
    else:
        log.add(prompt_results(state, record))


def prompt_results(state: BufferState, record: LedgerRecord) -> list[GroupResult]:
    """Returns the results of the groups that a record ends, in the record's order. ``state``: before the record is applied."""
    match record:
        case BatchTrained(step=step):
            return _results(state.batches[step].groups, TRAINED)
        case BatchAmended(step=step, added=names) if step < state.trained_steps:
            return _results([state.groups[name] for name in names], TRAINED)
        case GroupsDropped(groups=names, reason=reason):
            return _results([state.groups[name] for name in names], DROPPED, reason)
        case GroupDead(group=name, reason=reason) if (batched := state.groups[name].step) is None or batched >= state.trained_steps:
            return _results([state.groups[name]], DEAD, reason)
        case _:
            return []


def _results(groups: Iterable[GroupState], fate: str, reason: str = "") -> list[GroupResult]:
    return [GroupResult(group.number, fate, tuple(group.scored.rewards) if group.scored else (), reason) for group in groups]


declare_metrics("""
    prompts{of} | prompts | of each set, those left out aside
    prompts_left_out{of,reason} | prompts | that the run leaves out, by why | where there are such
    prompt_results | prompts | whose results the run remembers | where the order of prompts depends on their results
""")

TRAINING = "training"


@dataclass(frozen=True)
class PromptSupply:
    """Training prompts, None where nothing is trained, and the sets of held-out ones by name. ``stop_ids``: ids that end a response.
    ``fingerprints``: what their files were when they were opened. ``most_pictures``: of a prompt; 0 where prompts are text."""

    training: PromptStream | None
    heldout: dict[str, PromptFile]
    stop_ids: list[int]
    fingerprints: Fingerprints
    most_pictures: int = 0

    @property
    def drawn(self) -> bool:
        """Returns whether training prompts come from a source of the user's, which may take long."""
        return isinstance(self.training, DrawnPrompts)

    def of_group(self, name: str) -> Prompt | None:
        """Returns the prompt of a group; None for one that was held out before and is not any more. Raises ConfigError."""
        parts = eval_group_parts(name)
        if parts is None:
            return None if self.training is None else self.training.at(group_number(name))
        prompts = self.heldout.get(parts[0], ())
        return prompts[parts[2]] if parts[2] < len(prompts) else None

    def follow(self, state: BufferState, record: LedgerRecord) -> None:
        """Takes note of what a record, about to be folded into the state, holds for a source that hears results."""
        if isinstance(self.training, DrawnPrompts) and self.training.observes:
            follow_results(self.training.results, state, record)
            if isinstance(record, GroupsAdmitted):
                self.training.follow()

    def sets(self) -> dict[str, PromptStream | PromptFile]:
        """Returns the run's sets of prompts, by name."""
        training = {} if self.training is None else {TRAINING: self.training}
        return {**training, **{f"eval/{name}": prompts for name, prompts in self.heldout.items()}}

    def gauge(self, metrics: Metrics) -> None:
        """Sets ``prompts`` and ``prompts_left_out``."""
        if isinstance(self.training, DrawnPrompts) and self.training.observes:
            metrics.set("prompt_results", len(self.training.results))
        for name, prompts in self.sets().items():
            metrics.set("prompts", len(prompts), of=name)
            for reason, count in prompts.left_out.items():
                metrics.set("prompts_left_out", count, of=name, reason=reason)


async def open_prompts(service: Service) -> PromptSupply:
    """Opens the run's prompts, in a thread: long files take seconds, and minutes where some of their prompts are left out.

    Raises ConfigError.
    """

    def report(error: ConfigError) -> None:
        service.log.error("source_not_told", error=str(error))

    supply = await asyncio.to_thread(_open, service.config, report)
    for name, prompts in supply.sets().items():
        first = None if prompts.first_left_out is None else str(prompts.first_left_out)
        service.log.info("prompts", of=name, count=len(prompts), left_out=prompts.left_out, first_left_out=first)
    supply.gauge(service.metrics)
    return supply


def _open(config: RunConfig, report: Callable[[ConfigError], None]) -> PromptSupply:
    tokenizer = Tokenizer(config.model.hf_checkpoint)
    training: PromptStream | None = None
    if config.has_steps:
        training = TrainingPrompts(config, tokenizer) if config.data.data_source is None else DrawnPrompts(config, tokenizer, report)
    heldout = {view.name: eval_prompts(view, tokenizer) for view in eval_views(config)}
    most = 0 if config.data.multimodal_keys is None else config.data.max_pictures
    return PromptSupply(training, heldout, tokenizer.stop_ids, fingerprints(config), most)
