"""``EngineClient``: all requests and commands of the rollout service to one engine; its memory and its health.

The engine's endpoints load weights, and some unpickle: they are for this client alone, by a socket in a private directory. What others may
ask of an engine goes through `services.rollout.engine_proxy`. Requests that are known to kill an engine are refused here, before they are
sent, as ``InvalidRequest``.
"""

import asyncio
import base64
import functools
import pickle
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.generation import (
    Generation,
    GenerationRequest,
    group_body,
    parse_group,
    parse_piece,
    parse_version,
    wire_rid,
    without_older_prefix,
)
from services.rollout.engine.receiver_client import ReceiverClient, report_of
from services.rollout.engine.transport import EngineError, EngineTransport, parse_generated_tokens, parse_load, read_capabilities
from services.rollout.request_slots import EngineLoad
from shared.config.engine_limits import Capabilities
from shared.config.speculation import LENGTHS
from shared.runtime.errors import DeadlineExceeded, MyxoError
from shared.runtime.tasks import log_failure
from shared.schema.messages import Sampling
from shared.schema.weight_messages import WeightChannelAddress, WeightsReceived
from shared.transfer.digest import TensorDigest
from shared.transfer.weight_checkpoint import WeightCheckpoint

# The parts that an engine launched with ``--enable-memory-saver`` can release, by SGLang's names.
WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
EVERYTHING = (CACHE, WEIGHTS, GRAPHS)
POLL_INTERVAL_S = 0.05


class EngineMemory:
    """The memory of one engine, as its client knows it. ``running``: how many groups its client waits for."""

    def __init__(self, transport: EngineTransport, running: Callable[[], int]) -> None:
        self._transport, self._running = transport, running
        self.asleep = False
        self.released: frozenset[str] = frozenset()

    async def sleep(self, release: Iterable[str], *, deadline: float) -> None:
        """Ends all requests, each of which returns to its caller with its partial output, and releases memory.

        Does nothing to an engine that is asleep and has released that much. The caller keeps new groups away meanwhile.

        Raises DeadlineExceeded, EngineError, EngineUnreachable: the engine is in an unknown state and must be killed."""
        self.asleep = True
        try:
            async with asyncio.timeout(deadline):
                await self._end_requests(deadline)
                if wanted := [tag for tag in release if tag not in self.released]:
                    next_action = "it may have released some of its memory"
                    await self._transport.post("/release_memory_occupation", {"tags": wanted}, deadline, next_action)
                    self.released |= set(wanted)
        except TimeoutError:
            raise DeadlineExceeded("an idle engine", f"the engine at {self._transport.url}", deadline, "it should be ended") from None

    async def take_back(self, *tags: str, deadline: float) -> None:
        """Takes memory again for the released parts among ``tags``. The weights' memory then has no defined content, unless backed up.
        Raises as `sleep`."""
        if wanted := [tag for tag in tags if tag in self.released]:
            next_action = "it may have taken some of its memory"
            await self._transport.post("/resume_memory_occupation", {"tags": wanted}, deadline, next_action)
            self.released -= set(wanted)

    async def wake(self, *, deadline: float) -> None:
        """Takes all memory again and resumes generation. Raises as `sleep`."""
        await self.take_back(*EVERYTHING, deadline=deadline)
        self.asleep = False
        await self._transport.post("/continue_generation", {"torch_empty_cache": False}, deadline, "the engine may still be paused")

    async def _end_requests(self, deadline: float) -> None:
        """Returns once the engine holds no request: it refuses to flush its cache while it holds any."""
        while self._running():  # a request may still have been in transit
            await self._transport.post("/abort_request", {"abort_all": True}, deadline, "requests may continue")
            await asyncio.sleep(POLL_INTERVAL_S)
        # stops new requests, and ends those that others have sent: agents through a router
        await self._transport.post("/pause_generation", {"mode": "abort"}, deadline, "the engine may be paused or not")
        while True:
            try:
                await self._transport.post("/flush_cache", None, deadline, "nothing was changed")
                return
            except EngineError as error:
                if error.status != HTTPStatus.BAD_REQUEST:
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)


class AcceptedDrafts:
    """Counts what verifying drafts has brought under the newest version, by the length of the response.

    Attributes: ``counts``: most tokens of the response, infinite for the longest, → tokens, verifications, accepted and drafted tokens."""

    def __init__(self) -> None:
        self._version = -1
        self.counts: dict[float, NDArray[np.int64]] = {}

    def note(self, tokens: int, found: Generation) -> None:
        """Counts a request that has ended with so many ``tokens``; nothing where no drafts were verified."""
        if not found.verifications or not found.spans or (version := found.spans[-1].version) < self._version:
            return
        if version > self._version:
            self._version, self.counts = version, {}
        length = next(most for most in LENGTHS if tokens <= most)
        row = self.counts.setdefault(length, np.zeros(4, np.int64))
        row += (tokens, found.verifications, found.accepted, found.drafted)


# The treatment of running requests at a pause. ``abort``: they end with their partial output (takes 1 s or more). ``in_place``: they stop
# where they are and continue with their keys and values, computed by the old weights. ``retract``: they go back to the queue, and their
# keys and values are computed anew.
PauseMode = Literal["abort", "in_place", "retract"]

# The function that an engine calls, in each of its schedulers, to receive weights.
RECEIVER_LOADER = "services.rollout.engine.receiver.loader.load"

# Deadlines where the caller gives none: for control calls, for one group, for one push or one load from disk.
CONTROL_SECONDS = 30.0
GENERATE_SECONDS = 600.0
WEIGHTS_SECONDS = 120.0
ABANDON_SECONDS = 10.0  # the deadline for telling the engine that requests were abandoned; ``close`` waits for it
LOADER_MARGIN = 10.0  # seconds beyond a push's deadline for the schedulers to return from it

# The value that the loader's endpoint requires for each rank. It is made here and read by the engine: nothing received is unpickled.
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()


class EngineClient(AbstractAsyncContextManager["EngineClient"]):
    """A connection to one engine; make it with ``connect``, in the event loop that uses it.

    Every method takes ``deadline`` in seconds and may raise ``DeadlineExceeded``, ``EngineError`` (with the engine's own message) and
    ``EngineUnreachable``.

    Attributes:
        url: the engine's address, for messages. transport: sends requests that this class has no method for.
        version: the weight version that it serves, as far as this client has set or read it.
        late_versions: those whose first token of a request may still be the previous one's; see `services.rollout.engine.generation`.
        paused: the mode of the present pause, or None.
        generating: groups that the engine generates for this client now. retracting_pauses: how often all running requests were put back
            into the queue by a pause; each of them counts that as a retraction, like one for want of memory.
        load: the engine's load when its generated tokens were read the last time; None before, and of an engine that does not tell it.
        accepted: drafts that it accepted, where it speculates.
        memory: releases the engine's memory and takes it again. receivers: the parts of the engine's ranks that receive weights.
    """

    def __init__(self, transport: EngineTransport, capabilities: Capabilities, version: int, receiver: Path) -> None:
        self.transport, self.capabilities = transport, capabilities
        self.url, self.version = transport.url, version
        self.paused: PauseMode | None = None
        self.load: EngineLoad | None = None
        self.accepted = AcceptedDrafts()
        self.late_versions: set[int] = set()
        self._mark = secrets.token_hex(3)
        self.generating = self.retracting_pauses = self._retractions = self._loads = 0
        self.memory = EngineMemory(transport, lambda: self.generating)
        self.receivers = ReceiverClient(receiver, capabilities.ranks)
        self._session_open = False
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, receiver: Path, *, deadline: float = CONTROL_SECONDS, by: Callable[[Path], EngineTransport] = EngineTransport
    ) -> Self:
        """Connects to a ready engine and reads what it can do. ``receiver``: `EngineProcess.receiver`. ``by``: makes the way there."""
        transport = by(receiver)
        try:
            capabilities = await read_capabilities(transport, deadline)
            model = await transport.get("/model_info", deadline)
            return cls(transport, capabilities, parse_version(model.get("weight_version"), transport.url), receiver)
        except BaseException:
            await transport.close()
            raise

    async def close(self) -> None:
        """Waits for the background tasks (each has its deadline) and closes the connections."""
        if self._background:
            await asyncio.wait(self._background)
        await self.receivers.close()
        await self.transport.close()

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    # --- generation

    @property
    def cache_key(self) -> str:
        """Returns the key under which requests share prefixes now. Each load of weights has its own, also one of the same version: while
        the load before it failed, requests may have computed with some of its weights. No other engine, or run, has the same, with
        which SGLang can share a store of prefixes."""
        return f"{self._mark}.v{self.version}.{self._loads}"

    async def generate_group(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, deadline: float = GENERATE_SECONDS
    ) -> list[Generation]:
        """Generates a group's samples in one call, until the last has ended, and returns one ``Generation`` for each request, in order.

        Prefixes are shared among requests that were sent under the same weight version only, so no request reuses keys and values of
        another version's weights; one that waited while weights were changed, and did, comes back as aborted, without a token. If the call
        is cancelled or its deadline passes, the engine is told to abort these requests.

        Raises InvalidRequest: nothing was sent."""
        version = self.version
        body = group_body(requests, sampling, self.capabilities, self.cache_key)
        self.generating += 1
        try:
            answer = await self.transport.post("/generate", body, deadline, "its requests are being aborted")
        except (DeadlineExceeded, asyncio.CancelledError):
            self._abandon(requests)
            raise
        finally:
            self.generating -= 1
        generations = parse_group(self._checked(answer), requests, version, self.late_versions, f"{self.url}/generate")
        self._retractions += sum(generation.retractions for generation in generations)
        for generation in generations:
            self.accepted.note(len(generation.tokens), generation)
        return [without_older_prefix(generation, version, self.transport.pairs) for generation in generations]

    async def generate_live(
        self, request: GenerationRequest, sampling: Sampling, *, deadline: float = GENERATE_SECONDS
    ) -> AsyncGenerator[Generation]:
        """Yields a request's tokens as they are generated: each piece continues where the one before ended, and all but the last are
        ``abort``. Otherwise as `generate_group`. A caller that does not take all pieces closes the generator: the engine then aborts the
        request."""
        version, where, seen, ended = self.version, f"{self.url}/generate", 0, False
        body = group_body([request], sampling, self.capabilities, self.cache_key)
        each = ("rid", "input_ids", "sampling_params", "image_data", "audio_data", "video_data")
        single = {name: value[0] if name in each else value for name, value in body.items()}
        self.generating += 1
        try:
            async with asyncio.timeout(deadline), self.transport.events("/generate", single | {"stream": True}) as answers:
                async for answer in answers:
                    piece = parse_piece(self._checked(answer), request, seen, version, self.late_versions, where)
                    fresh = piece if seen else without_older_prefix(piece, version, self.transport.pairs)
                    ended, seen = answer["meta_info"]["finish_reason"] is not None, seen + len(piece.tokens)
                    if ended:
                        self._retractions += piece.retractions
                        self.accepted.note(seen, piece)
                    yield fresh
                    if ended or fresh is not piece:
                        return
            raise EngineError(where, f"broke its answer off after {seen} tokens")
        except TimeoutError:
            raise DeadlineExceeded("the answer to POST /generate", f"the engine at {self.url}", deadline, "it is being aborted") from None
        finally:
            self.generating -= 1
            if not ended:
                self._abandon([request])

    def _checked(self, answer: Any) -> Any:
        """Returns an answer of ``/generate`` with versions that are integers. Raises EngineError for one by other weights."""
        return answer

    def check_text(self, data: bytes) -> None:
        """Raises EngineError for an answer, or a whole event of a streamed one, by other weights."""

    async def abort(self, rids: Sequence[str], *, deadline: float = CONTROL_SECONDS) -> None:
        """Ends these requests; each returns to its caller with its partial output. Unknown ids are ignored."""
        await asyncio.gather(*(self._abort({"rid": wire_rid(rid)}, deadline) for rid in rids))

    async def abort_all(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Ends all requests; each returns to its caller with its partial output."""
        await self._abort({"abort_all": True}, deadline)

    async def _abort(self, body: dict[str, Any], deadline: float) -> None:
        await self.transport.post("/abort_request", body, deadline, "requests may continue to their ends")

    def _abandon(self, requests: Sequence[GenerationRequest]) -> None:
        """Has the engine abort requests whose caller has left. A failure is not raised, since the caller has its own error already."""
        for request in requests:
            self.abandon(wire_rid(request.rid))

    def abandon(self, prefix: str) -> None:
        """Has the engine abort, beside everything else, all requests whose ids on the wire begin so."""
        task = asyncio.create_task(self._abort({"rid": prefix}, ABANDON_SECONDS))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        log_failure(task, "ending abandoned requests")

    async def generated_tokens(self, *, deadline: float = CONTROL_SECONDS) -> int | None:
        """Returns how many tokens the engine has generated for all clients since it started; None where it does not count them. A retracted
        sample generates its next token in a prefill again, which the engine does not count."""
        try:
            page = await self.transport.get("/metrics", deadline)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:  # launched without --enable-metrics
                return None
            raise
        self.load = parse_load(str(page))
        generated = parse_generated_tokens(str(page), self.capabilities.overlaps)
        return None if generated is None else generated + self._retractions

    # --- control

    async def pause(self, mode: PauseMode, *, deadline: float = CONTROL_SECONDS) -> None:
        """Pauses generation. New requests wait in the engine until ``resume``; see ``PauseMode`` for the running ones."""
        next_action = "the engine may be paused or not; resume it or restart it"
        await self.transport.post("/pause_generation", {"mode": mode}, deadline, next_action)
        self.paused = mode
        self.retracting_pauses += mode == "retract"

    async def resume(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Resumes generation; does nothing to an engine that is not paused, nor to one that is asleep: see `EngineMemory.wake`."""
        if self.memory.asleep:
            return
        body = {"torch_empty_cache": False}
        await self.transport.post("/continue_generation", body, deadline, "the engine may still be paused")
        self.paused = None

    async def probe(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Returns once the engine's processes have answered each other: it generates a token where it is idle. It must not be paused."""
        await self.transport.get("/health_generate", deadline)

    async def freeze_gc(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Excludes what the engine's processes have loaded from garbage collection, as SGLang's server has them do once it has started."""
        await self.transport.post("/freeze_gc", None, deadline, "nothing was changed")

    # --- weights

    async def open_receivers(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Has every rank listen for commands; once, while nothing runs in the engine."""
        await self.begin_weight_update(deadline=deadline)
        await self._call_loader(deadline)
        await self.end_weight_update(deadline=deadline)
        await self.receivers.wait_open(deadline)

    async def join_channels(
        self,
        channels: Sequence[WeightChannelAddress],
        rank: int,
        machines: Mapping[str, int] = {},
        *,
        timeout: float = WEIGHTS_SECONDS,
        deadline: float = CONTROL_SECONDS,
    ) -> None:
        """Has the engine leave the channels that it is in and join these. It continues to generate; ``receive`` waits for them. ``rank``:
        the rank of the engine's first process in all channels. ``machines``: see `WeightsPrepare`. ``timeout``: seconds for joining."""
        fields = {"channels": [channel.model_dump(mode="json") for channel in channels], "rank": rank, "timeout": timeout}
        if machines:
            fields |= {"machines": list(machines.items()), "ranks": self.receivers.ranks // len(machines)}
        await self.receivers.ask({"verb": "join", **fields}, deadline)

    async def leave_channels(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Has the engine leave all channels."""
        await self.receivers.ask({"verb": "leave"}, deadline)

    async def adopt(self, version: int, tensors: Mapping[str, TensorDigest], *, deadline: float = CONTROL_SECONDS) -> str:
        """Records all tensors that were loaded into it by other means and have been checked; without any, its weights are unknown.
        Returns the version's digest."""
        answers = await self.receivers.ask({"verb": "adopt", "version": version, "tensors": tensors}, deadline)
        return str(answers[0]["digest"])

    async def receive(
        self,
        version: int,
        push: int,
        channels: Sequence[str],
        *,
        check: bool = False,
        deadline: float = WEIGHTS_SECONDS,
        begin: float | None = None,
        manifests: Mapping[str, str] | None = None,
        pause: Callable[[], Awaitable[object]] | None = None,
    ) -> WeightsReceived:
        """Receives all buckets of a push from channels that were joined, or are being joined. The engine must be paused, or idle.

        ``push``: the index of its manifests in the channels' stores. ``check``: compare with the engine's weights and load nothing.
        ``begin``: seconds for the engine's schedulers to begin; None: as long as for all of it. ``manifests``: channel → the id of its
        manifest, as far as it is known. ``pause``: pauses the engine, while the transfer begins; nothing is loaded before. Raises
        ReceiverError, NotBegun, DeadlineExceeded: ``touched`` says whether the engine may hold some of the new weights: fence it then,
        until a whole push has succeeded."""
        command = {"verb": "receive", "version": version, "push": push, "channels": list(channels), "check": check}
        command["manifests"] = dict(manifests or {})
        wake = functools.partial(self._call_loader, deadline + LOADER_MARGIN)
        return report_of(await self.receivers.have_done(command, deadline, wake, begin, pause), self.url)

    async def _call_loader(self, deadline: float) -> None:
        tensors = [NO_TENSORS] * self.capabilities.ranks
        # the loader itself gives a draft what is its own; some of SGLang's workers of drafts fail here
        body = {"serialized_named_tensors": tensors, "load_format": RECEIVER_LOADER, "flush_cache": False, "disable_draft_model": True}
        await self.transport.post("/update_weights_from_tensor", body, deadline, "its receivers continue to their own deadline")

    async def begin_weight_update(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Opens a push. A failed push is closed first; its tensors stay loaded, so the next push has to send all of them. Engines before
        0.5.21 have no such step: nothing happens then."""
        if self.capabilities.weight_sessions:
            if self._session_open:
                await self.end_weight_update(deadline=deadline)
            await self.transport.post("/begin_weight_update", {"selector": "all"}, deadline, "end the push or restart")
            self._session_open = True

    async def end_weight_update(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Closes a push, once the loader's call has returned. Nothing else happens where ``begin_weight_update`` does nothing, or was not
        called."""
        await self.receivers.settled()
        if self._session_open:
            await self.transport.post("/end_weight_update", {}, deadline, "the engine may serve unfinished weights")
            self._session_open = False

    async def prepare_load(self, checkpoint: WeightCheckpoint, *, deadline: float = WEIGHTS_SECONDS) -> None:
        """Prepares `update_weights_from_disk` of this checkpoint, while the engine generates."""

    async def update_weights_from_disk(self, path: str, version: int, *, deadline: float = WEIGHTS_SECONDS) -> None:
        """Loads a Hugging Face checkpoint directory that the engine can read, of the same architecture.

        An engine that is not paused finishes its requests first. The receiver forgets its record of the weights: see ``adopt``. Cached
        prefixes stay, since requests of the new version share none with the old one's, and a flush would kill an engine that is paused with
        requests in it."""
        await self.adopt(-1, {}, deadline=min(deadline, CONTROL_SECONDS))
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        next_action = "the engine may be half-loaded: restart it, or load anew"
        await self.transport.post("/update_weights_from_disk", body, deadline, next_action)
        self._loaded(version)

    async def set_weight_version(self, version: int, *, deadline: float = CONTROL_SECONDS) -> None:
        """Informs the engine that it holds the whole of this version. The next tokens of running requests count for it."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.transport.post("/update_weight_version", body, deadline, "the engine may name the old version")
        self._loaded(version)

    def _loaded(self, version: int) -> None:
        if self.paused == "in_place" and self.capabilities.overlaps and version != self.version:
            self.late_versions.add(version)
        self.version, self._loads = version, self._loads + 1


# The interval and the deadline of a probe: SGLang itself gives its processes 20 s to answer each other.
PROBE_INTERVAL_S = 10.0
PROBE_SECONDS = 30.0

# The time for which an engine may answer no probe, and on a CPU the part of the run's patience, if that is longer: one forward pass of a
# long prompt through a large model takes minutes there.
HUNG_SECONDS, HUNG_PART = 60.0, 0.25


async def until_hung(client: EngineClient, can_be_asked: Callable[[], object], seconds: float) -> str:
    """Probes an engine, and returns why once it counts as hung.

    ``seconds``: for which it may answer no probe. ``can_be_asked``: returns what the engine serves, and nothing (or something false) while
    it generates for no one; a probe counts only if that was the same before and after it."""
    silent_since: float | None = None
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        before, began = can_be_asked(), time.monotonic()
        try:
            if before:
                await client.probe(deadline=PROBE_SECONDS)
            silent_since = None
        except MyxoError as error:
            silent_since = None if can_be_asked() != before else began if silent_since is None else silent_since
            if silent_since is not None and (silent := time.monotonic() - silent_since) >= seconds:
                return f"it has answered no probe for {silent:.0f} s, though its processes are there: {error}"
