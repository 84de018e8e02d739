"""Creates a run on the bus with its frozen config, and finds it again by its id."""

import contextlib
import re
import time
from functools import partial
from pathlib import Path
from typing import TypeVar

from nats.js.errors import NotFoundError
from pydantic import ValidationError

from shared.bus import streams
from shared.bus.connection import KV_SECONDS, Bus
from shared.bus.registry import ENVIRONMENT, LAUNCHER, Registry
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig, changes, unsound
from shared.runtime import addresses
from shared.runtime.errors import INFRASTRUCTURE, BadInput, BadMessage, ConfigError, raise_problems
from shared.runtime.safe_files import replace_file
from shared.runtime.safe_text import say
from shared.schema import codec
from shared.schema.ledger import BatchFormed, BatchTrained, CheckpointDurable, LedgerRecord, RunFinished, ValuesChanged, group_id
from shared.schema.message import REASON_LENGTH
from shared.schema.messages import BatchGroup, Payload
from shared.schema.service_messages import VALUES_CHANGED, ServiceEvent
from shared.schema.weight_messages import WeightsLive, WeightsSnapshot

Record = TypeVar("Record", bound=LedgerRecord)
_CONFIG, _STORE, _PHASE, _VOCABULARY, _DATA, _SNAPSHOT, _ASKED = "config", "store", "phase", "vocabulary", "data", "snapshot", "asked"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"  # The phases of a run. A failed run continues when it is created again.
ENDS = (FINISHED, FAILED)  # The phases in which a run has ended
UNREADABLE = "unreadable"  # Stands for a phase on the bus that is none of these: the run has not ended, as far as that can be known
FROZEN = "config.json"  # The file in a run's directory with its config as frozen on the bus, for commands that run without the servers
PRIVATE = "config-private.json"  # The file beside it, for its owner alone, with the credentials that the other one leaves out


class NoSuchRun(BadInput):
    """The bus holds no run of that name."""


class UnreadableRun(NoSuchRun):
    """The bus holds a run of that name, but its config, its store's URL or its vocabulary there cannot be read."""


class UnreadableVersion(BadMessage):
    """The live version of the weights cannot be read from the bus. The trainer writes it anew within seconds."""

    fault = INFRASTRUCTURE


async def create(
    bus: Bus, config: RunConfig, store_url: str | None, vocabulary: int | None = None, saved: int = 0, asked: str = ""
) -> ValuesChanged | None:
    """Makes the run's streams and freezes its config; on a resume, updates the fields that may change.

    Returns what has changed of the training's values, which the ledger has recorded.

    Args:
        store_url: the store of payloads, for services without ``REDIS_URL``. A URL with credentials is not recorded, because every service
            could read it, and each has its own account.
        vocabulary: how many token ids the model has, for services that do not see its files. No group is scored without it.
        saved: steps of the newest checkpoint that is seen here, where the ledger may not know it yet.
        asked: digest of the values that were asked for, by which `is_made` knows them.

    Raises ConfigError if a field differs that may not change, or no batch fits a message, Problems for several.
    """
    _refuse_batches(bus, config)
    await streams.create(bus, config)
    bucket = Subjects(config.run.name).config_bucket
    changed = None
    if (before := await refuse_differences(bus, config)) is not None:
        await _refuse_steps(bus, before, config)
        if before.trained != config.trained:
            await _follow_move(bus, before, config)
        changed = await _record_changes(bus, before, config, saved)
    await bus.put(bucket, _CONFIG, config.model_dump_json().encode())
    if store_url is not None:
        stated = "" if addresses.has_credentials(store_url) else store_url
        await bus.put(bucket, _STORE, stated.encode())  # an empty value, too, because it must replace an earlier address
    if vocabulary is not None:
        await bus.put(bucket, _VOCABULARY, str(vocabulary).encode())
    known = await phase(bus, config.run.name)
    if known in (FINISHED, UNREADABLE) and await is_finished(bus, config):  # else it is resumed with more steps
        await set_phase(bus, config.run.name, FINISHED)
    elif known != RUNNING:
        await set_phase(bus, config.run.name, RUNNING)
    await bus.put(bucket, _ASKED, asked.encode())
    return changed


def _refuse_batches(bus: Bus, config: RunConfig) -> None:
    """Raises ConfigError where the references of a batch are over the server's limit even if its groups take as little as they can."""
    rollout, size = config.rollout, config.rollout.rollout_batch_size
    group = BatchGroup(group=group_id(0), payload=Payload(keys=["k"], bytes=0), rewards=[0.0] * rollout.fewest_rollouts)
    if rollout.num_rollout and size > (most := bus.message_limit // len(codec.pack(group.model_dump()))):
        why = f"at most {most} with n_samples_per_prompt = {rollout.n_samples_per_prompt}: a batch's references are one message"
        raise ConfigError("rollout.rollout_batch_size", size, f"{why}, and the NATS server's max_payload is {bus.connection.max_payload}")


async def is_made(bus: Bus, run: str, asked: str) -> bool:
    """Returns whether the newest `create` of a run was asked for the same values, and it has not failed since."""
    return await bus.get(Subjects(run).config_bucket, _ASKED) == asked.encode() and await phase(bus, run) in (RUNNING, FINISHED)


async def _refuse_steps(bus: Bus, before: RunConfig, config: RunConfig) -> None:
    """Raises ConfigError where a run would end before what it has trained or formed a batch for, or continue after a last version of fewer
    steps than others, or another end is asked for than that of a buffer at work."""
    done, asked, interval = await trained_steps(bus, config.run.name), config.rollout.num_rollout, config.weights.update_weights_interval
    formed = await last_record(bus, config.run.name, BatchFormed)
    why = f"{done} or more: so many steps are trained" if asked < done else ""
    if not why and formed is not None and asked <= formed.step and asked < before.rollout.num_rollout:
        why = f"{formed.step + 1} or more: so many batches are formed"
    if before.rollout.num_rollout <= done < asked and done % interval and not config.debug.debug_rollout_only:
        why = f"{done}: with update_weights_interval = {interval} its last version would get more steps under the same number"
    if why:
        why += f"; `myxo up CONFIG --from {config.run.name} --name NAME` begins another run from its weights"
    elif asked != before.rollout.num_rollout:
        why = await at_work(bus, config, "buffer")
    if why:
        raise ConfigError("rollout.num_rollout", asked, why)


async def at_work(bus: Bus, config: RunConfig, service: str | None = None) -> str:
    """Returns what is said where services are at work, or one kind is, which read a config once; empty where none are."""
    alive = [status.instance for status in await Registry(bus, config.run.name).alive(service) if status.service != ENVIRONMENT]
    killed = f"one that was killed is forgotten after bus.registry_ttl = {config.bus.registry_ttl:g} s"
    return f"stop {', '.join(alive)} first; {killed}" if alive else ""


async def _record_changes(bus: Bus, before: RunConfig, config: RunConfig, saved: int) -> ValuesChanged | None:
    """Writes into the ledger, ahead of the config, which values of the training change; and an event, for the marks on curves."""
    if not (values := changes(before.shown(), config.shown(), "recorded")):
        return None
    names, durable = Subjects(config.run.name), await last_record(bus, config.run.name, CheckpointDurable)
    step, trained = max(saved, durable.steps if durable is not None else 0), await trained_steps(bus, config.run.name)
    why = await at_work(bus, config)
    if not why and trained > step:  # a resumed trainer makes the versions between them again, and they may not be others
        why = f"{trained} steps are trained, and the newest checkpoint here is of {step}: continue with the old value to the next one, "
        why += f"or begin another run from it by `myxo up CONFIG --from {config.run.name} --name NAME`"
    if why:
        raise_problems([ConfigError(field, value, why) for field, _, value in (item.partition(": ") for item in values)])
    record = ValuesChanged(step=step, changed=tuple(values), at=time.time())
    await append(bus, config.run.name, record)
    event = ServiceEvent(service=LAUNCHER, instance=LAUNCHER, what=VALUES_CHANGED, detail=record.words(), at=record.at)
    await bus.publish(names.event("service", VALUES_CHANGED), event)
    return record


async def append(bus: Bus, run: str, record: LedgerRecord) -> None:
    """Writes a record at the end of the ledger of a run whose buffer is not at work."""
    names = Subjects(run)
    last = await streams.last_sequence(bus, names.ledger_stream)
    message_id = f"{names.ledger_stream}.{last + 1}.{record.at}"
    await bus.publish(names.ledger(record.event()), record.encode(), msg_id=message_id, after=(names.ledger_stream, last))


async def refuse_differences(bus: Bus, config: RunConfig) -> RunConfig | None:
    """Returns the config with which the run is on the bus, else its directory's copy where it cannot be read; None where it is not there.

    Raises as `create` does if it differs and may not.
    """
    existing = await bus.get(Subjects(config.run.name).config_bucket, _CONFIG)
    if existing is None:
        return None
    try:
        known = _config(config.run.name, existing)
    except UnreadableRun as error:
        known = copy_instead(config.run.root, error)
    raise_problems(differences(known, config))
    if known.run.dir != config.run.dir and not (config.run.root / FROZEN).is_file():
        expected = f"{known.run.dir}, where the files of run {config.run.name} lie; `myxo move` takes them elsewhere"
        raise ConfigError("run.dir", str(config.run.dir), expected)
    return known


async def _follow_move(bus: Bus, before: RunConfig, config: RunConfig) -> None:
    """Has the newest snapshot of the weights found where the run's files lie now."""
    bucket = Subjects(config.run.name).weights_bucket
    value = await bus.get(bucket, _SNAPSHOT)
    try:
        snapshot = WeightsSnapshot.decode(value) if value is not None else None
    except BadMessage as error:
        return say(f"the newest snapshot of the weights cannot be read from the bus ({error}): the trainer writes another")
    if snapshot is not None and (path := Path(snapshot.path)).is_relative_to(before.trained):
        moved = snapshot.model_copy(update={"path": str(config.trained / path.relative_to(before.trained))})
        await bus.put(bucket, _SNAPSHOT, moved.encode())


def differences(frozen: RunConfig, config: RunConfig) -> list[ConfigError]:
    """Returns a refusal for each field that differs from a run's frozen config and may not change; one alone for another run's config."""
    if frozen.run.name != config.run.name:
        return [ConfigError("run.name", config.run.name, files_of_another(config.run.root, frozen))]
    bare = [one.shown().model_dump_json().replace("://…@", "://") for one in (frozen, config)]  # as earlier releases wrote URLs
    (old, new), run = map(RunConfig.model_validate_json, bare), config.run.name
    ways = f"use --fresh to start it anew, or another run.name; `myxo up CONFIG --from {run} --name NAME` begins one from its weights"
    together = old.trained == old.run.root and new.trained == new.run.root  # checkpoints lie in the run's directory, and move with it
    fixed = [change for change in changes(old, new) if not (together and change.startswith("trainer.save: "))]
    why = {change: f"run {run} exists with another value" for change in fixed}
    why |= {change: reason for change in changes(old, new, "recorded") if (reason := unsound(old, new, change.partition(": ")[0]))}
    parted = ((*change.partition(": "), reason) for change, reason in why.items())
    return [ConfigError(field, values, f"{reason}; {ways}") for field, _, values, reason in parted]


def files_of_another(directory: Path, frozen: RunConfig) -> str:
    """Returns what to say of a directory with the files of a run of another name, as of one that was copied."""
    return f"{directory} holds the files of run {frozen.run.name}, and a run goes by its name; `myxo move` takes one to another directory"


async def load(bus: Bus, run: str) -> RunConfig:
    """Returns the run's frozen config. Raises NoSuchRun, UnreadableRun."""
    if not await streams.exists(bus, run):
        raise NoSuchRun(f"no run {run!r} on the bus; `myxo up CONFIG` makes one")
    return _config(run, await bus.get(Subjects(run).config_bucket, _CONFIG))


def _config(run: str, value: bytes | None) -> RunConfig:
    if value is None:
        raise UnreadableRun(f"run {run!r} has no config on the bus yet")
    try:
        config = RunConfig.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _unreadable(run, _CONFIG, f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}") from error
    if config.run.name != run:
        raise _unreadable(run, _CONFIG, f"it is that of run {config.run.name!r}")
    return config


def _unreadable(run: str, key: str, reason: str) -> UnreadableRun:
    what = f"the {key} of run {run!r} on the bus cannot be read (KV {Subjects(run).config_bucket}/{key}: {reason})"
    return UnreadableRun(f"{what}; `myxo up CONFIG` writes it anew by the copy in the run's directory, or with --fresh")


def copy_instead(directory: Path, error: UnreadableRun) -> RunConfig:
    """Returns the config in a run's directory in the place of the bus's, and says so on the standard error. Raises ``error`` if none."""
    if (copy := frozen(directory)) is None:
        raise error
    say(f"{error}; until then {directory / FROZEN} stands for it")
    return copy


def frozen(directory: Path) -> RunConfig | None:
    """Returns the config in a run's directory, whole where this user may read it; None if there is none, or one of other fields."""
    found = list[RunConfig]()
    for name in (FROZEN, PRIVATE):
        with contextlib.suppress(OSError, ValueError):
            found.append(RunConfig.model_validate_json((directory / name).read_text()))
    whole = [config for config in found[1:] if config.shown() == found[0]]  # else another release has written the other one since
    return next(iter([*whole, *found]), None)


def freeze(directory: Path, config: RunConfig) -> Path:
    """Stores a run's config in its directory: without credentials, and for its owner whole. Returns the path of the whole one."""
    whole, shown = directory / PRIVATE, config.shown()
    if shown is config:
        whole.unlink(missing_ok=True)
    else:
        replace_file(whole, config.model_dump_json().encode(), mode=0o600)
    replace_file(directory / FROZEN, f"{shown.model_dump_json(indent=2)}\n".encode())
    return directory / FROZEN if shown is config else whole


async def store_url(bus: Bus, run: str) -> str | None:
    """Returns the URL of the run's store, as recorded when it was created; None if it was not, or (which is said) if that is no URL."""
    value = await bus.get(Subjects(run).config_bucket, _STORE)
    if value and not re.fullmatch(rb"(rediss?|unix)://[!-~]+", value):
        say(str(_unreadable(run, _STORE, "expected redis://, rediss:// or unix:// and an address")))
        return None
    return value.decode() if value else None


async def vocabulary(bus: Bus, run: str) -> int:
    """Returns how many token ids the run's model has. Raises NoSuchRun where that was not said when the run was made, UnreadableRun."""
    value = await bus.get(Subjects(run).config_bucket, _VOCABULARY)
    if value is None:
        raise NoSuchRun(f"run {run!r} is on the bus without its model's vocabulary; `myxo up CONFIG` or `myxo submit CONFIG` writes it")
    if not re.fullmatch(rb"[1-9][0-9]{0,8}", value):
        raise _unreadable(run, _VOCABULARY, "expected a number of token ids")
    return int(value)


async def data(bus: Bus, run: str) -> bytes | None:
    """Returns what the buffer has noted of the run's prompt files; None where it has not yet."""
    return await bus.get(Subjects(run).config_bucket, _DATA)


async def set_data(bus: Bus, run: str, value: bytes) -> None:
    """Notes what the run's prompt files are."""
    await bus.put(Subjects(run).config_bucket, _DATA, value)


async def live_version(bus: Bus, run: str) -> int:
    """Returns the newest weight version that was announced as served; -1 before the first. Raises UnreadableVersion."""
    bucket = Subjects(run).weights_bucket
    value = await bus.get(bucket, "live")
    try:
        return -1 if value is None else WeightsLive.decode(value).version
    except BadMessage as error:
        raise UnreadableVersion(f"the live version of run {run!r} cannot be read from the bus (KV {bucket}/live: {error})") from error


async def phase(bus: Bus, run: str) -> str | None:
    """Returns `RUNNING`, `FINISHED`, `FAILED`, `UNREADABLE`, or None before the run exists."""
    return (await phase_and_reason(bus, run))[0]


async def phase_and_reason(bus: Bus, run: str, deadline: float = 15.0) -> tuple[str | None, str]:
    """Returns the phase, and the reason of a run that is `FAILED`."""
    value = await bus.get(Subjects(run).config_bucket, _PHASE, deadline=deadline)
    phase, _, reason = (value or b"").decode(errors="replace").partition("\n")
    if phase not in (RUNNING, *ENDS):
        return None if value is None else UNREADABLE, ""
    return phase, reason[:REASON_LENGTH]


async def set_phase(bus: Bus, run: str, value: str, reason: str = "") -> None:
    """Writes the phase; ``reason``: why a run is `FAILED`, in one line."""
    await bus.put(Subjects(run).config_bucket, _PHASE, f"{value}\n{reason}".rstrip("\n").encode(errors="backslashreplace"))


async def last_record(bus: Bus, run: str, kind: type[Record]) -> Record | None:
    """Returns the newest ledger record of a kind; None if there is none, or no such run."""
    names = Subjects(run)
    attempt = partial(bus.js.get_last_msg, names.ledger_stream, names.ledger(kind.event()))
    try:
        last = await bus.retry(attempt, "the newest record", f"$JS.API.STREAM.MSG.GET.{names.ledger_stream}", deadline=KV_SECONDS)
    except NotFoundError:
        return None
    assert last.data is not None  # every ledger record has a body
    return kind.decode(last.data)


async def is_finished(bus: Bus, config: RunConfig) -> bool:
    """Returns whether the run's ledger says that it has done all steps of the config."""
    finished = await last_record(bus, config.run.name, RunFinished)
    return finished is not None and finished.steps >= config.rollout.num_rollout


async def trained_steps(bus: Bus, run: str) -> int:
    """Returns how many training steps the run's ledger holds."""
    trained = await last_record(bus, run, BatchTrained)
    return trained.step + 1 if trained is not None else 0
