"""Takes finished groups from outside into the run (``POST /groups``): each takes the place of a group that the buffer has admitted.

A group is leased from the queue of tasks as a replica leases it, gets the producer's samples, and is reported as generated. So the buffer's
admission is the back-pressure: without a task there is no room. The producer's id is bound to the run's group before anything is published,
in the store: whoever sends the same group again, here or to another gateway, is answered with the same group of the run, of which the
buffer takes one outcome. A gateway that dies in between leaves a task that another worker may take: then the first of the two counts.
"""

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from blake3 import blake3
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field

from services.gateway.routes import bounded_body
from shared.bus import runs
from shared.bus.bus_errors import StreamFull
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.config.engine_limits import longest_trained
from shared.config.run_config import RunConfig
from shared.data.tokenizer import Tokenizer
from shared.formats.request import TurnRefused
from shared.formats.request_body import AnyObject, RequestFields, read_body
from shared.hooks import reward_values
from shared.hooks.sample_agreement import compared
from shared.runtime.errors import INFRASTRUCTURE, BadMessage, DeadlineExceeded, MyxoError
from shared.runtime.telemetry import declare_metrics
from shared.schema import sample as sample_codec
from shared.schema.digests import reference
from shared.schema.message import LARGEST, MAX_PARTS, MAX_SAMPLES, ROLE, PartName, Reward
from shared.schema.messages import Failed, Generated, Task
from shared.schema.sample import LOG_PROBS, Sample, SampleLimits, fitted, segments_of, turns_of
from shared.schema.versions import is_too_stale
from shared.service.service_base import Service
from shared.store.payload_store import StoreFull

LONGEST = 1 << 22  # Tokens of a sample
Integer = Annotated[int, Field(ge=0, le=LARGEST)]
Integers = Annotated[list[Integer], Field(max_length=LONGEST, fail_fast=True)]
Score = Reward | Annotated[dict[PartName, Reward], Field(max_length=MAX_PARTS)]


Entry = TypeVar("Entry")
Column = Annotated[list[Entry], Field(min_length=1, max_length=MAX_SAMPLES, fail_fast=True)]  # One entry for each sample


class GroupBody(RequestFields):
    """A group. ``id``: the producer's own; ``tokens``: prompt and response; ``masks``: 1 for tokens that are trained, else 0;
    ``sampled``: 1 for tokens that the model itself sampled, by default those that are trained: their text is what verifiers score;
    ``log_probs``: of each token, looked at where it is trained; ``versions``: of the whole group, of each sample, or of each token."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    tokens: Column[Integers]
    masks: Column[Annotated[list[Literal[0, 1]], Field(max_length=LONGEST, fail_fast=True)]]
    sampled: Column[Annotated[list[Literal[0, 1]], Field(max_length=LONGEST, fail_fast=True)]] | None = None
    log_probs: Column[Annotated[list[float], Field(max_length=LONGEST, fail_fast=True)]]
    versions: Integer | Column[Integer] | Column[Integers]
    scores: Column[Score] | None = None
    rollouts: Column[Integer] | None = None
    roles: Column[Annotated[str, Field(pattern=ROLE)]] | None = None
    finish: Column[Literal["stop", "length"]] | None = None
    texts: Column[str] | None = None
    environment: str | None = None
    label: str | None = None
    metadata: AnyObject = {}


@dataclass(frozen=True)
class GroupLimits:
    """Bounds of a run: token ids in [0, vocabulary), versions up to ``live``, ``longest`` tokens a sample, and the rest by its config."""

    config: RunConfig
    vocabulary: int
    live: int
    longest: int


@dataclass(frozen=True)
class FinishedGroup:
    """A group that may be handed in. ``oldest``: the version of its oldest trained token. ``environment``: what scores it. ``samples``:
    under the producer's id."""

    id: str
    oldest: int
    environment: str
    samples: list[Sample]


def parse_group(body: bytes, limits: GroupLimits, decode: Callable[[NDArray[np.int32]], str], special: Sequence[str] = ()) -> FinishedGroup:
    """Returns the group in a body of JSON. Raises TurnRefused, which names the field. ``decode``: tokens to text, special tokens left out.
    ``special``: the texts of these, which a producer's texts may have."""
    asked, _ = read_body(GroupBody, body)
    count = len(asked.tokens)
    for name in ("masks", "sampled", "log_probs", "versions", "scores", "rollouts", "roles", "finish", "texts"):
        column = getattr(asked, name)
        if isinstance(column, list) and len(column) != count:
            raise _wrong(name, f"{len(column)} entries for {count} samples")
    tokens = [np.asarray(row, np.int32) for row in asked.tokens]
    masks = [np.asarray(row, np.uint8) for row in asked.masks]
    for index, (row, mask) in enumerate(zip(tokens, masks, strict=True)):
        _check_sample(asked, index, row, mask, limits.vocabulary)
    versions = [_versions(asked, index, mask) for index, mask in enumerate(masks)]
    oldest = _check_versions(versions, masks, limits)
    _check_rollouts(asked, limits.config)
    environment = _environment(asked, limits.config)
    for index, score in enumerate([] if limits.config.reward.group_rm else asked.scores or []):
        try:
            reward_values.read(score, limits.config.reward.reward_key)
        except ValueError as error:
            raise _wrong(f"scores[{index}]", str(error)) from None

    samples = [_sample(asked, index, *arrays, decode, special) for index, arrays in enumerate(zip(tokens, masks, versions, strict=True))]
    try:
        for sample in samples:
            sample.check(SampleLimits(limits.vocabulary, limits.live))
            sample.meta()
        samples = fitted(samples, limits.longest, limits.config.rollout.overlong_samples)
    except BadMessage as error:
        raise _wrong("tokens", str(error)) from None
    return FinishedGroup(asked.id, oldest, environment, samples)


def _check_sample(asked: GroupBody, index: int, tokens: NDArray[np.int32], mask: NDArray[np.uint8], vocabulary: int) -> None:
    for name in ("masks", "sampled", "log_probs", "versions"):
        column = getattr(asked, name)
        if isinstance(column, list) and isinstance(row := column[index], list) and len(row) != len(tokens):
            raise _wrong(f"{name}[{index}]", f"{len(row)} entries for {len(tokens)} tokens")
    if (beyond := tokens >= vocabulary).any():
        position = int(beyond.argmax())
        raise _wrong(f"tokens[{index}][{position}]", f"{tokens[position]} is not in [0, {vocabulary})")
    if not mask.any():
        raise _wrong(f"masks[{index}]", "no token is trained")
    if mask[0]:
        raise _wrong(f"masks[{index}][0]", "the first token cannot be trained: nothing comes before it")
    least, most = LOG_PROBS
    log_probs = np.asarray(asked.log_probs[index], np.float64)
    if (wrong := mask.astype(bool) & ~((log_probs >= least) & (log_probs <= most))).any():
        position = int(wrong.argmax())
        raise _wrong(
            f"log_probs[{index}][{position}]", f"{log_probs[position]:g} of a trained token; expected a number from {least:g} to 0"
        )


def _versions(asked: GroupBody, index: int, mask: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Returns the versions of a sample's tokens, int32 [T]: where none is trained that of the last trained token before, or the first."""
    given = asked.versions if isinstance(asked.versions, int) else asked.versions[index]
    if isinstance(given, int):
        return np.full(len(mask), given, np.int32)
    trained = np.where(mask, np.arange(len(mask)), mask.argmax())
    return np.asarray(given, np.int32)[np.maximum.accumulate(trained)]


def _check_versions(versions: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.uint8]], limits: GroupLimits) -> int:
    """Returns the oldest version of the trained tokens. Raises TurnRefused for one that there is not yet, and for a group that is stale."""
    newest = max(int(row.max()) for row in versions)
    if newest > limits.live:
        raise _wrong("versions", f"version {newest}; the newest that is served is {limits.live}")
    trained = [row[mask.astype(bool)] for row, mask in zip(versions, masks, strict=True)]
    oldest, rollout = min(int(row.min()) for row in trained), limits.config.rollout
    bound = limits.live - rollout.max_staleness
    lost = is_too_stale(oldest, limits.live, rollout.max_staleness, rollout.staleness_policy)
    if lost or max(int(row.max()) for row in trained) < bound:
        message = f"its oldest trained token is of version {oldest}; the run trains none before {bound} any more"
        raise TurnRefused(409, message, field="versions", code="stale_group")
    return oldest


def _check_rollouts(asked: GroupBody, config: RunConfig) -> None:
    rollouts = asked.rollouts or list(range(len(asked.tokens)))
    found, most, fewest = len(set(rollouts)), config.rollout.n_samples_per_prompt, config.rollout.fewest_rollouts
    if not fewest <= found <= most:
        expected = f"{most}" if fewest == most else f"{fewest} to {most}"
        raise _wrong("rollouts" if asked.rollouts else "tokens", f"samples of {found} rollouts; a group of this run has {expected}")
    if max(rollouts) >= most:
        raise _wrong("rollouts", f"rollout {max(rollouts)}; they are counted from 0 to {most - 1}")


def _environment(asked: GroupBody, config: RunConfig) -> str:
    names = config.reward.environment_names()
    if asked.environment is not None:
        if asked.environment not in names:
            raise _wrong("environment", f"the run has no such environment; it has {', '.join(names)}")
        if asked.scores is None and (named := asked.metadata.get("rm_type")) and config.reward.environment_of(named) != asked.environment:
            raise _wrong("metadata", f"rm_type = {str(named)[:80]!r} names another than environment = {asked.environment}")
        return asked.environment
    if asked.scores is None:
        raise _wrong("scores", "required where no environment is named that scores the group")
    own = config.reward.environment_of(None)
    return own if own in names else names[0]


def _sample(
    asked: GroupBody,
    index: int,
    tokens: NDArray[np.int32],
    mask: NDArray[np.uint8],
    versions: NDArray[np.int32],
    decode: Callable[[NDArray[np.int32]], str],
    special: Sequence[str],
) -> Sample:
    """Returns a sample: what comes before the first trained token is its prompt."""
    begin = int(mask.argmax())
    own, decoded = mask != 0 if asked.sampled is None else np.asarray(asked.sampled[index], np.bool_), decode(tokens[begin:])
    text = asked.texts[index] if asked.texts else decoded
    blank = re.compile("|".join([r"\s", *map(re.escape, special)]))
    stated = asked.sampled is None and blank.sub("", text) != blank.sub("", decoded)  # what is scored is the producer's statement
    return Sample(
        group=asked.id,
        index=index,
        prompt=tokens[:begin],
        response=tokens[begin:],
        log_probs=np.asarray(asked.log_probs[index][begin:], np.float32),
        mask=mask[begin:],
        segments=segments_of(versions[begin:]),
        finish=asked.finish[index] if asked.finish else "stop",
        text=text,
        prompt_text=decode(tokens[:begin]),
        label=asked.label,
        metadata={**asked.metadata, "ingested": asked.id},
        rollout=asked.rollouts[index] if asked.rollouts else index,
        role=asked.roles[index] if asked.roles else "",
        given_reward=None if asked.scores is None else asked.scores[index],
        turns=[] if stated else turns_of(own[begin:], tokens[begin:], decode),
    )


def _wrong(field: str, message: str) -> TurnRefused:
    return TurnRefused(400, message, field=field, code="invalid_value")


declare_metrics("groups_ingested_total | groups | [made elsewhere](ingest.md) and taken in")

BINDING_SECONDS = 7 * 24 * 3600  # For as long the producer's id of a group is known
PUBLISH_SECONDS = 30.0
REPORTED = b"1"  # What stands in the place of a group's message once that was sent

CLAIM_SECONDS = 180  # For as long only who has claimed a task says what becomes of it: longer than a group takes to be published
OWNED_SECONDS = 60.0  # For as long a task waits whose group's producer has not come again

RETRY_S = 2.0  # After how many seconds a producer may try again that finds no room


@dataclass(frozen=True)
class Binding:
    """The group of the run that a producer's group became. ``digest``: of the producer's body."""

    group: str
    attempt: int
    digest: str


class GroupIntake:
    """The endpoint for groups of one gateway."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self._service, self._config, self._tokenizer = service, service.config, tokenizer
        self._queue = WorkQueue(service.bus, task_consumer(service.run, service.config.bus, TRAIN), Task, service.report, service.instance)
        self._in_hand: set[str] = set()  # the producers' ids
        self._special, self._doubted = tokenizer.special_tokens, set[str]()
        self._taking = 0
        self._vocabulary, self._longest = 0, longest_trained(service.config)

    async def described(self) -> dict[str, object]:
        """Returns what a producer has to know of the run."""
        limits, rollout = await self._limits(), self._config.rollout
        return {
            "run": self._service.run,
            "version": limits.live,
            "max_staleness": rollout.max_staleness,
            "rollouts": rollout.n_samples_per_prompt,
            "min_rollouts": rollout.fewest_rollouts,
            "vocabulary": limits.vocabulary,
            "longest_sample": limits.longest,
            "environments": self._config.reward.environment_names(),
        }

    async def take(self, read: Callable[[], Awaitable[bytes]]) -> dict[str, object]:
        """Hands a group in. Returns what became of it: its id in the run, and whether it was there before. Raises TurnRefused. ``read``:
        reads the body; it is not read where there is no room for it."""
        self._check_stopping()
        if self._service.held_back or self._taking >= self._config.ingest.ingest_concurrency:
            raise _no_room(self._service.held_back or f"{self._taking} groups are in hand")
        self._taking += 1
        try:
            body = await read()
            group = await asyncio.to_thread(parse_group, body, await self._limits(), self._tokenizer.decode, self._special)
            await asyncio.to_thread(self._doubt, group)
            if group.id in self._in_hand:
                raise _in_hand(group.id)
            self._in_hand.add(group.id)
            try:
                return await self._handed_in(group, blake3(body).hexdigest(16))
            finally:
                self._in_hand.discard(group.id)
        except (StoreFull, StreamFull) as error:
            raise _no_room(str(error)) from None
        except DeadlineExceeded as error:
            raise TurnRefused(503, str(error), code="unavailable", retry_after_s=RETRY_S) from None
        finally:
            self._taking -= 1

    def _doubt(self, group: FinishedGroup) -> None:
        for sample in group.samples:
            _, _, doubts = compared(sample, None, (), self._tokenizer.decode, self._special)
            for field in doubts.keys() - self._doubted:
                self._doubted.add(field)
                self._service.log.warning("sample_doubtful", group=group.id, sample=sample.index, field=field, error=doubts[field])

    def _check_stopping(self) -> None:
        """Raises TurnRefused once this gateway is asked to stop: it waits for no task any more."""
        if self._service.stopping.is_set():
            raise TurnRefused(503, "this gateway stops; another continues", code="gateway_stopping", retry_after_s=RETRY_S)

    async def _handed_in(self, group: FinishedGroup, digest: str) -> dict[str, object]:
        number, known = await self._bound(group.id)
        if known is not None:
            if known.digest != digest:
                raise TurnRefused(409, f"another group came as {group.id}, and became {known.group}", field="id", code="id_taken")
            if await self._owner(group.id, known) == group.id and (
                await self._is_in(known)  # else no one knows whether it was published
                or await self._published(group.id, known, await asyncio.to_thread(self._report, group, known))
            ):
                return {"id": group.id, "group": known.group, "repeated": True}
        while True:
            lease = await self._task()
            async with lease.held():
                binding, key = Binding(lease.message.group, lease.message.attempt, digest), self._key(group.id, number)
                try:
                    report = await asyncio.to_thread(self._report, group, binding)
                    wanted = ("SET", key, json.dumps(vars(binding)), "NX", "EX", BINDING_SECONDS)
                    await self._service.store.commands("the binding of a group", [wanted])
                    if await self._binding(key) != binding:
                        raise _in_hand(group.id)
                except TurnRefused:
                    await lease.hand_back()
                    raise
                # else its gateway could not end it: it was delivered once more
                if await self._owner(group.id, binding) != group.id or not await self._published(group.id, binding, report):
                    await (lease.ack() if await self._is_in(binding) else lease.hand_back(delay=OWNED_SECONDS))
                    number += 1
                    continue
            await lease.ack()
            return {"id": group.id, "group": binding.group, "repeated": False}

    async def _give_up(self, lease: MessageLease[Task]) -> None:
        """Ends a task that came too often, unless its group is in. It is for no group then: that one's producer gets another task."""
        task, key = lease.message, self._owner_key(lease.message)
        if not await self._is_in(task):
            if not lease.last and await self._claimed(key, ""):  # its producer came a moment ago
                return await lease.hand_back(delay=CLAIM_SECONDS)
            await self._service.store.commands("the end of a task", [("SET", key, "", "EX", BINDING_SECONDS)])
            reason = f"given up after {lease.deliveries - 1} deliveries"
            failed = Failed(group=task.group, attempt=task.attempt, reason=reason, by=self._service.instance, fault=INFRASTRUCTURE)
            await self._service.report(failed, PUBLISH_SECONDS)
        await lease.ack()

    def _owner_key(self, task: Task | Binding) -> str:
        return f"{self._service.subjects.ingest_key(task.group)}:attempt-{task.attempt}"

    async def _owner(self, name: str, binding: Binding) -> str:
        """Returns the producers' id of the group that a task is for: the first one that was bound to it; nothing where it is given up."""
        key = self._owner_key(binding)
        wanted = [("SET", key, name, "NX", "EX", BINDING_SECONDS), ("GET", key)]
        owner = str((await self._service.store.commands("the group of a task", wanted))[1].decode())
        return await self._claimed(key, name) if owner == name else owner

    async def _claimed(self, key: str, name: str) -> str:
        """Returns who may say what becomes of a task now: its producer, which is about to publish, or nobody, which gives it up. ``name``,
        unless the other one came first, within `CLAIM_SECONDS`."""
        wanted = [("SET", f"{key}:claim", name, "NX", "EX", CLAIM_SECONDS), ("GET", f"{key}:claim")]
        _, claim = await self._service.store.commands("who ends a task", wanted)
        return name if claim is None else str(claim.decode())

    async def _is_in(self, task: Task | Binding) -> bool:
        """Returns whether the group of a task is in the run. It comes in here where a gateway may have died before it reported the group,
        or before it noted that it had: bus and buffer know a repeated report."""
        key, service = f"{self._owner_key(task)}:in", self._service
        [noted] = await service.store.commands("whether a group is in", [("GET", key)])
        if noted is not None and noted != REPORTED:
            message = Generated.decode(noted)
            await service.report(message, PUBLISH_SECONDS, msg_id=message.payload.keys[0])
            await service.store.commands("that a group is in", [("SET", key, REPORTED, "EX", BINDING_SECONDS)])
            service.metrics.add("groups_ingested")
            service.log.info("group_ingested", group=message.group, attempt=message.attempt, samples=len(message.samples))
        return noted is not None

    async def _task(self) -> MessageLease[Task]:
        """Returns the lease of a task whose place a group takes. Raises TurnRefused where the run admits none in time."""
        patience = self._config.ingest.ingest_wait
        end = time.monotonic() + patience
        while (seconds := end - time.monotonic()) > 0:
            self._check_stopping()
            for lease in await self._queue.fetch(1, min(seconds, 1.0)):
                if not lease.exhausted:
                    return lease
                await self._give_up(lease)
        if await runs.phase(self._service.bus, self._service.run) in runs.ENDS:
            raise TurnRefused(410, "the run has ended", code="run_ended")
        raise _no_room(f"the run admitted none within {patience:g} s")

    def _report(self, group: FinishedGroup, binding: Binding) -> tuple[dict[str, bytes], bytes]:
        """Returns a group's blobs, and the message that reports them."""
        names, now, part_of = self._service.subjects, time.time(), uuid.uuid4().hex
        samples = [replace(sample, group=binding.group) for sample in group.samples]
        encoded = sample_codec.encode(samples, self._config.store.blob_bytes)
        blobs = {names.payload_key(binding.group, binding.attempt, part, part_of): blob for part, blob in enumerate(encoded)}
        try:
            message = Generated(
                group=binding.group,
                attempt=binding.attempt,
                payload=reference(self._service.run, blobs, [sample.length for sample in samples]),
                samples=[sample.meta() for sample in samples],
                rollouts=sample_codec.rollouts(samples),
                replica=self._service.instance,
                environment=group.environment,
                started=now,
                ended=now,
            ).encode()
            if len(message) > (most := self._service.bus.message_limit):
                raise BadMessage(f"the report of its samples has {len(message)} bytes, which is over the bus's limit of {most}")
            return blobs, message
        except BadMessage as error:
            raise TurnRefused(413, str(error), field="tokens", code="too_large") from None

    async def _published(self, name: str, binding: Binding, report: tuple[dict[str, bytes], bytes]) -> bool:
        """Returns whether it is in: for longer than a claim holds it may wait for room, and its task may be given up meanwhile."""
        blobs, message = report
        await self._service.store.write(blobs)
        if await self._owner(name, binding) != name:
            return False
        noted = ("SET", f"{self._owner_key(binding)}:in", message, "NX", "EX", BINDING_SECONDS)
        await self._service.store.commands("how a group is reported", [noted])
        return await self._is_in(binding)

    async def _bound(self, name: str) -> tuple[int, Binding | None]:
        """Returns how many bindings a producers' id has had, and the newest: each is made once, by the first gateway."""
        number, known = 0, None
        while (found := await self._binding(self._key(name, number))) is not None:
            number, known = number + 1, found
        return number, known

    def _key(self, name: str, number: int) -> str:
        return self._service.subjects.ingest_key(name) + (f":binding-{number}" if number else "")

    async def _binding(self, key: str) -> Binding | None:
        [found] = await self._service.store.commands("the binding of a group", [("GET", key)])
        return None if found is None else Binding(**json.loads(found))

    async def _limits(self) -> GroupLimits:
        service = self._service
        if not self._vocabulary:
            self._vocabulary = await runs.vocabulary(service.bus, service.run)
        live = await runs.live_version(service.bus, service.run)
        if live < 0:
            raise TurnRefused(503, "the run serves no weights yet", code="unavailable", retry_after_s=RETRY_S)
        return GroupLimits(self._config, self._vocabulary, live, self._longest)


def _no_room(reason: str) -> TurnRefused:
    return TurnRefused(429, f"there is no room for a group: {reason}", code="no_room", retry_after_s=RETRY_S)


def _in_hand(name: str) -> TurnRefused:
    return TurnRefused(409, f"group {name} is in hand already", field="id", code="in_hand", retry_after_s=RETRY_S)


def add_ingest_routes(app: FastAPI, intake: GroupIntake, key: str, most_bytes: int) -> None:
    """Adds the routes for groups from outside to a gateway's. ``most_bytes``: of a body."""
    digest = sha256(key.encode()).digest()

    async def describe(request: Request) -> JSONResponse:
        return await _response_to(request, digest, intake.described)

    async def take(request: Request) -> JSONResponse:
        return await _response_to(request, digest, lambda: intake.take(lambda: bounded_body(request, most_bytes)))

    app.add_api_route("/groups", describe, methods=["GET"])
    app.add_api_route("/groups", take, methods=["POST"])


async def _response_to(request: Request, digest: bytes, answer: Callable[[], Awaitable[Any]]) -> JSONResponse:
    try:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sha256(given.strip().encode()).digest(), digest):  # in constant time
            raise TurnRefused(401, "expected the key of those who hand groups in, as Authorization: Bearer KEY", code="invalid_api_key")
        return JSONResponse(await answer())
    except TurnRefused as refused:
        error = refused
    except MyxoError as away:
        error = TurnRefused(503, str(away), code="unavailable", retry_after_s=RETRY_S)
    return JSONResponse(error.body("openai"), error.status, headers=dict(error.headers))
