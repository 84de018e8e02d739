"""``EngineClient``: everything the rollout service asks of one engine, and tells it.

The engine's control port loads weights and unpickles on some of its endpoints: it is for this client alone, on this
machine. What is known to kill an engine is refused here, before it is sent, as ``InvalidRequest``.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from services.rollout.engine.capabilities import NOT_CHANGED, Capabilities, EngineLoad, parse_load, read_capabilities
from services.rollout.engine.drawn_count import DrawnCount
from services.rollout.engine.engine_errors import EngineError, EngineUnreachable, InvalidRequest
from services.rollout.engine.engine_memory import EngineMemory
from services.rollout.engine.generation import (
    Generation,
    GenerationRequest,
    group_body,
    parse_group,
    parse_version,
    wire_rid,
)
from services.rollout.engine.launch_command import RECEIVER_LOADER
from services.rollout.engine.receiver_client import ReceiverClient, ReceiveReport, ReceiverError, WeightsState
from services.rollout.engine.transport import EngineTransport
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.failures import log_failure
from shared.schema.messages import Sampling, WeightChannelAddress
from shared.transfer.digest import TensorDigest

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "in_place", "retract"]
"""What happens to running requests at a pause. ``abort``: they end, with what they have (takes 1 s or more).
``in_place``: they stop where they are and go on with their keys and values, computed by the old weights. ``retract``:
they go back to the queue, and their keys and values are computed anew."""

CONTROL_SECONDS = 30.0
GENERATE_SECONDS = 600.0
WEIGHTS_SECONDS = 120.0
"""Deadlines where the caller gives none: control calls, one group, one push or one load from disk."""

ABANDON_SECONDS = 10.0
"""For telling the engine that nobody waits any longer; ``close`` waits for it."""

LOADER_MARGIN = 10.0
"""Seconds beyond a push's deadline for the schedulers to come back from it."""

NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""What the endpoint that calls the loader wants for each rank. Written here, read by the engine: nothing received is unpickled."""


class EngineClient:
    """A connection to one engine; make it with ``connect``, in the event loop that uses it.

    Every method takes ``deadline`` in seconds and may raise ``DeadlineExceeded``, ``EngineError`` (with the engine's
    own message) and ``EngineUnreachable``.

    Attributes:
        version: the weight version that the engine serves, as far as this client has set or read it.
        paused: the mode of the present pause, or None.
        occupation: its memory, given back and taken again. drawn: how many tokens it has drawn.
        half_loaded: the engine was resumed after weights whose push was never finished. It generates for nobody until a
            whole push has gone through: ``receive``, then ``set_weight_version``.
    """

    def __init__(self, transport: EngineTransport, capabilities: Capabilities, version: int) -> None:
        self._transport, self.capabilities = transport, capabilities
        self.version = version
        self.paused: PauseMode | None = None
        self.half_loaded = self._session_open = False
        self._loading = False  # weights came, or may have; the version that they make did not yet
        self._resumed_half_loaded = 0  # times
        self._late_versions: set[int] = set()  # see generation
        self._receivers: ReceiverClient | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._generating = 0
        self.occupation = EngineMemory(transport, lambda: self._generating)
        self.drawn = DrawnCount(transport, capabilities.overlaps)

    @classmethod
    async def connect(
        cls, url: str, *, admin_key: str | None = None, vocab_size: int | None = None, deadline: float = CONTROL_SECONDS
    ) -> Self:
        """Connect to a ready engine and read what it can do.

        Args:
            admin_key: the engine's, where it was launched with one. vocab_size: needed if the engine's model directory cannot be read here.
        """
        transport = EngineTransport(url, admin_key)
        try:
            capabilities = await read_capabilities(transport, vocab_size, deadline)
            model = await transport.get("/model_info", deadline, NOT_CHANGED)
            # "default" is what an engine says that was launched without a version: the weights it was given, so 0.
            named = model.get("weight_version")
            version = 0 if named == "default" else parse_version(named, transport.url)
            client = cls(transport, capabilities, version)
            if named == "default":
                await client.set_weight_version(version, deadline=deadline)
        except BaseException:
            await transport.close()
            raise
        return client

    @property
    def url(self) -> str:
        """The engine's address."""
        return self._transport.url

    @property
    def late_versions(self) -> frozenset[int]:
        """Versions whose first token of a request may still be the one before's; see `services.rollout.engine.generation`."""
        return frozenset(self._late_versions)

    async def close(self) -> None:
        """Wait for what runs in the background (each has its deadline) and close the connections."""
        if self._background:
            await asyncio.wait(self._background)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------- generation

    async def generate_group(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        deadline: float = GENERATE_SECONDS,
    ) -> list[Generation]:
        """Generate a group's samples in one call, until the last has ended.

        Prefixes are shared among requests that were sent under the same weight version only, so no request reuses keys
        and values of another version's weights. If the call is cancelled or its deadline passes, the engine is told to
        abort these requests.

        Args:
            requests: one per sample, usually of the same prompt.

        Returns:
            One ``Generation`` per request, in order.

        Raises:
            InvalidRequest: nothing was sent.
            EngineError: also if the engine was resumed half-loaded in the meantime; what it drew is of no version.
        """
        if self.half_loaded:
            raise InvalidRequest(f"the engine at {self.url} holds half-loaded weights; push to it before generating")
        version, resumed_half_loaded = self.version, self._resumed_half_loaded
        body = group_body(requests, sampling, self.capabilities.limits, cache_key=f"v{version}")
        self._generating += 1
        try:
            answer = await self._transport.post("/generate", body, deadline, "its requests are being aborted")
        except (DeadlineExceeded, asyncio.CancelledError):
            self._in_background(self.abort([request.rid for request in requests], deadline=ABANDON_SECONDS))
            raise
        finally:
            self._generating -= 1
        where = f"{self.url}/generate"
        if resumed_half_loaded != self._resumed_half_loaded:
            raise EngineError(where, "went on with half-loaded weights while it generated this; it is discarded")
        return self.drawn.noted(parse_group(answer, requests, version, self._late_versions, where))

    async def abort(self, rids: Sequence[str], *, deadline: float = CONTROL_SECONDS) -> None:
        """End these requests; each comes back to its caller with what it has. Unknown ids are ignored."""
        bodies = [{"rid": wire_rid(rid)} for rid in rids]
        then = "requests may go on to their ends"
        await asyncio.gather(*(self._transport.post("/abort_request", body, deadline, then) for body in bodies))

    async def abort_all(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """End all requests; each comes back to its caller with what it has."""
        await self._transport.post("/abort_request", {"abort_all": True}, deadline, "requests may go on to their ends")

    # ---------------------------------------------------------------------------------------------------- control

    async def server_info(self, *, deadline: float = CONTROL_SECONDS) -> dict[str, Any]:
        """The engine's settings and state, as it tells them: some 600 keys. Its scheduler has to answer."""
        return await self._transport.get("/server_info", deadline, NOT_CHANGED)

    async def load(self, *, deadline: float = CONTROL_SECONDS) -> EngineLoad:
        """How busy the engine is. Its scheduler need not answer, so this works in the middle of a push too."""
        return parse_load(await self._transport.get("/v1/loads?include=core", deadline, NOT_CHANGED))

    async def served_version(self, *, deadline: float = CONTROL_SECONDS) -> int:
        """The weight version that the engine itself names; also corrects ``version``."""
        model = await self._transport.get("/model_info", deadline, NOT_CHANGED)
        self.version = parse_version(model["weight_version"], self.url)
        return self.version

    async def health(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Return if the engine's scheduler takes its turns: it answers between two steps, also while paused.

        Not SGLang's ``/health``: that one waits for a token, which a paused engine cannot give, and an engine that it
        failed for counts itself as broken from then on.
        """
        await self.server_info(deadline=deadline)

    async def pause(self, mode: PauseMode, *, deadline: float = CONTROL_SECONDS) -> None:
        """Stop generating. New requests wait in the engine until ``resume``; see ``PauseMode`` for the running ones."""
        then = "the engine may be paused or not; resume it or restart it"
        await self._transport.post("/pause_generation", {"mode": mode}, deadline, then)
        self.paused = mode

    async def resume(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Go on generating; does nothing to an engine that is not paused, nor to one that is asleep: see `EngineMemory.wake`.

        In the middle of a push, what it goes on with is refused to its callers; see ``half_loaded``.
        """
        if self.occupation.asleep:
            return
        if self._loading:
            self.half_loaded = True
            self._resumed_half_loaded += 1
        body = {"torch_empty_cache": False}
        await self._transport.post("/continue_generation", body, deadline, "the engine may still be paused")
        self.paused = None

    async def flush_cache(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Drop all cached prefixes. Raises EngineError (400) while requests run or, before 0.5.21, wait."""
        await self._transport.post("/flush_cache", None, deadline, NOT_CHANGED)

    # ---------------------------------------------------------------------------------------------------- weights

    async def open_receiver(self, directory: Path, *, deadline: float = CONTROL_SECONDS) -> None:
        """Have every rank listen for orders in ``directory``; once, while nothing runs in the engine.

        Args:
            directory: ``EngineProcess.receiver``.
        """
        if self.capabilities.weight_sessions:
            await self.begin_weight_update(deadline=deadline)
        await self._call_loader(deadline)
        if self.capabilities.weight_sessions:
            await self.end_weight_update(deadline=deadline)
        receivers = ReceiverClient(directory, self.capabilities.ranks)
        await receivers.wait_open(deadline)
        self._receivers = receivers

    async def join_channels(
        self, channels: Sequence[WeightChannelAddress], rank: int, *, timeout: float = WEIGHTS_SECONDS, deadline: float = CONTROL_SECONDS
    ) -> None:
        """Have the engine leave the channels that it is in and join these. It goes on generating; ``receive`` waits for them.

        Args:
            rank: of the engine's first process, in all channels. timeout: seconds for joining.
        """
        fields = [channel.model_dump(mode="json") for channel in channels]
        await self.receivers.ask({"verb": "join", "channels": fields, "rank": rank, "timeout": timeout}, deadline)

    async def leave_channels(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Have the engine leave all channels."""
        await self.receivers.ask({"verb": "leave"}, deadline)

    async def abort_receive(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """End a ``receive`` that goes on, and channels that are still being joined. The engine answers as before."""
        await self.receivers.abort(deadline)

    async def weights_state(self, *, deadline: float = CONTROL_SECONDS) -> WeightsState:
        """What the engine itself knows of its weights."""
        answers = await self.receivers.ask({"verb": "state"}, deadline)
        return WeightsState.of(answers)

    async def adopt(self, version: int, tensors: Mapping[str, TensorDigest], *, deadline: float = CONTROL_SECONDS) -> str:
        """Tell the engine what was loaded into it by other means, and has been checked: all its tensors. None: nothing is known.

        Returns the version's digest.
        """
        fields = {name: [known.dtype, list(known.shape), known.digest] for name, known in tensors.items()}
        answers = await self.receivers.ask({"verb": "adopt", "version": version, "tensors": fields}, deadline)
        return str(answers[0]["digest"])

    async def receive(
        self, version: int, push: int, channels: Sequence[str], *, check: bool = False, deadline: float = WEIGHTS_SECONDS
    ) -> ReceiveReport:
        """Take all buckets of a push from channels that were joined, or are being joined. The engine must be paused, or idle.

        Args:
            push: the number under which the channels' stores have its manifests. check: compare with what the engine holds, load nothing.

        Raises:
            InvalidRequest: nothing was sent.
            ReceiverError, DeadlineExceeded: ``touched`` says whether the engine may hold some of the new weights: fence it then, until a
                whole push has succeeded.
        """
        if self.capabilities.weight_sessions and not self._session_open:
            raise InvalidRequest("a push without begin_weight_update, which this engine wants first")
        order = {"verb": "receive", "version": version, "push": push, "channels": list(channels), "check": check}
        answers = await self.load_by(order, deadline=deadline, loads=not check)
        return ReceiveReport.of(answers, self.url)

    async def load_by(self, order: dict[str, Any], *, deadline: float, loads: bool = True) -> list[dict[str, Any]]:
        """Have every rank's scheduler do an order of its receiver; the answers by rank. The engine must be paused, or idle.

        Args:
            loads: the order changes weights: until a version is set, the engine is half-loaded.

        Raises ReceiverError, DeadlineExceeded.
        """
        before = self._loading
        self._loading = before or loads
        try:
            return await self.receivers.have_done(order, deadline, lambda: self._call_loader(deadline + LOADER_MARGIN))
        except ReceiverError as error:
            self._loading = before or (loads and error.touched)
            raise
        except DeadlineExceeded:  # the order was not taken, so not begun
            self._loading = before
            raise

    @property
    def receivers(self) -> ReceiverClient:
        """To the engine's receivers. Raises InvalidRequest before ``open_receiver``."""
        if self._receivers is None:
            raise InvalidRequest(f"the engine at {self.url} has no receiver of weights; open_receiver comes first")
        return self._receivers

    async def _call_loader(self, deadline: float) -> None:
        body = {
            "serialized_named_tensors": [NO_TENSORS] * self.capabilities.ranks,
            "load_format": RECEIVER_LOADER,
            "flush_cache": False,
        }
        await self._transport.post("/update_weights_from_tensor", body, deadline, "its receivers go on to their own deadline")

    async def begin_weight_update(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Open a push. A push that failed is closed first: its tensors stay, so the next has to send all of them.

        Engines before 0.5.21 have no such step: nothing happens then.
        """
        if self.capabilities.weight_sessions:
            if self._session_open:
                await self.end_weight_update(deadline=deadline)
            await self._transport.post("/begin_weight_update", {"selector": "all"}, deadline, "end the push or restart")
            self._session_open = True

    async def end_weight_update(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Close a push. Nothing happens where ``begin_weight_update`` does nothing, or was not called."""
        if self._session_open:
            await self._transport.post("/end_weight_update", {}, deadline, "the engine may serve unfinished weights")
            self._session_open = False

    async def update_weights_from_disk(self, path: str, version: int, *, flush: bool = True, deadline: float = WEIGHTS_SECONDS) -> None:
        """Load a Hugging Face checkpoint directory that the engine can read, of the same architecture.

        An engine that is not paused finishes its requests first. What the receiver knew of the weights is forgotten: see ``adopt``.

        Args:
            flush: drop cached prefixes afterwards; only while no request is in the engine.
        """
        self._check_flush(flush)
        if self._receivers is not None:
            await self.adopt(-1, {}, deadline=min(deadline, CONTROL_SECONDS))
        self._loading = True
        body = {"model_path": path, "weight_version": str(version), "flush_cache": flush}
        then = "the engine may be half-loaded: restart it, or load anew"
        await self._transport.post("/update_weights_from_disk", body, deadline, then)
        self._loaded(version)

    async def set_weight_version(self, version: int, *, deadline: float = CONTROL_SECONDS) -> None:
        """Say that the engine holds the whole of this version. Running requests' next tokens count for it."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._transport.post("/update_weight_version", body, deadline, "the engine may name the old version")
        self._loaded(version)

    # ------------------------------------------------------------------------------------------------------ guards

    def _check_flush(self, flush: bool) -> None:
        """A flush that fails after a load is an assertion in the engine's scheduler, and the engine's end."""
        retracted_stay = self.paused == "retract" and not self.capabilities.weight_sessions
        if flush and (self.paused == "in_place" or retracted_stay):
            raise InvalidRequest(
                f"flush while paused {self.paused}: SGLang {self.capabilities.release} dies of it if it has a request; "
                "load without flush (requests of the new version share no prefixes with the old one's)"
            )

    def _loaded(self, version: int) -> None:
        if self.paused == "in_place" and self.capabilities.overlaps and version != self.version:
            self._late_versions.add(version)
        self.version, self._loading, self.half_loaded = version, False, False

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def logged() -> None:
            try:
                await work
            except (DeadlineExceeded, EngineUnreachable) as error:  # the caller has its own error already
                log.warning("could not abort abandoned requests: %s", error)

        task = asyncio.create_task(logged())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        log_failure(task, "ending abandoned requests")
