"""``EngineClient``: everything the rollout service asks of one engine, and tells it.

The engine's control port loads weights and unpickles on some of its endpoints: it is for this client alone, on this
machine. What is known to kill an engine is refused here, before it is sent, as ``InvalidRequest``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Self

from services.rollout.engine.capabilities import NOT_CHANGED, Capabilities, EngineLoad, parse_load, read_capabilities
from services.rollout.engine.errors import EngineError, EngineUnreachable, InvalidRequest
from services.rollout.engine.generation import (
    Generation,
    GenerationRequest,
    group_body,
    parse_group,
    parse_version,
    wire_rid,
)
from services.rollout.engine.transport import EngineTransport
from shared.errors import DeadlineExceeded
from shared.messages import Sampling

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "in_place", "retract"]
"""What happens to running requests at a pause. ``abort``: they end, with what they have (takes 1 s or more).
``in_place``: they stop where they are and go on with their keys and values, computed by the old weights. ``retract``:
they go back to the queue, and their keys and values are computed anew."""

CONTROL_SECONDS = 30.0
GENERATE_SECONDS = 600.0
WEIGHTS_SECONDS = 120.0
"""Deadlines where the caller gives none: control calls, one group, one bucket or one load from disk."""

ABANDON_SECONDS = 10.0
"""For telling the engine that nobody waits any longer; ``close`` waits for it."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of the dtypes that a bucket may hold, by torch's names."""


class EngineClient:
    """A connection to one engine; make it with ``connect``, in the event loop that uses it.

    Every method takes ``deadline`` in seconds and may raise ``DeadlineExceeded``, ``EngineError`` (with the engine's
    own message) and ``EngineUnreachable``.

    Attributes:
        version: the weight version that the engine serves, as far as this client has set or read it.
        paused: the mode of the present pause, or None.
        half_loaded: the engine was resumed after buckets whose push was never finished. It generates for nobody until a
            whole push has gone through: ``receive_bucket`` with a version, or ``set_weight_version`` after the last.
    """

    def __init__(self, transport: EngineTransport, capabilities: Capabilities, version: int) -> None:
        self._transport, self.capabilities = transport, capabilities
        self.version = version
        self.paused: PauseMode | None = None
        self.half_loaded = False
        self._loading = False  # buckets came, the version that they make did not yet
        self._resumed_half_loaded = 0  # times
        self._late_versions: set[int] = set()  # see generation
        self._groups: set[str] = set()
        self._session_open = False
        self._background: set[asyncio.Task[None]] = set()

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
        try:
            answer = await self._transport.post("/generate", body, deadline, "its requests are being aborted")
        except (DeadlineExceeded, asyncio.CancelledError):
            self._in_background(self.abort([request.rid for request in requests], deadline=ABANDON_SECONDS))
            raise
        where = f"{self.url}/generate"
        if resumed_half_loaded != self._resumed_half_loaded:
            raise EngineError(where, "went on with half-loaded weights while it generated this; it is discarded")
        return parse_group(answer, requests, version, self._late_versions, where)

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
        """Go on generating; does nothing to an engine that is not paused.

        In the middle of a push, what it goes on with is refused to its callers; see ``half_loaded``.
        """
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

    async def init_weights_group(
        self,
        group: str,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        backend: str,
        deadline: float = WEIGHTS_SECONDS,
    ) -> None:
        """Join a process group for weight pushes; returns once all its ranks have joined.

        Args:
            group: its name, unknown to this engine. master_address, master_port: of the trainer's store.
            rank_offset: rank of this engine's first worker. world_size: trainer and all engines' workers.
            backend: ``nccl`` or ``gloo``.
        """
        if backend not in ("nccl", "gloo"):
            raise InvalidRequest(f"weight group {group!r}: backend {backend!r}, not 'nccl' or 'gloo'")
        if not group or group in self._groups:
            raise InvalidRequest(f"weight group {group!r}: needs a name that this engine does not have yet")
        body = {
            "group_name": group,
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "backend": backend,
        }
        then = "the engine waits on for the group's other ranks, and answers nobody meanwhile: restart it"
        await self._transport.post("/init_weights_update_group", body, deadline, then)
        self._groups.add(group)

    async def destroy_weights_group(self, group: str, *, deadline: float = CONTROL_SECONDS) -> None:
        """Leave a process group. Does nothing if this client has not joined it."""
        if group in self._groups:
            self._groups.discard(group)
            body = {"group_name": group}
            await self._transport.post("/destroy_weights_update_group", body, deadline, "restart the engine")

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

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int | None = None,
        flush: bool = False,
        *,
        deadline: float = WEIGHTS_SECONDS,
    ) -> None:
        """Take one bucket of parameters, which rank 0 of ``group`` broadcasts as one uint8 tensor at the same time.

        Args:
            names: as in the Hugging Face checkpoint. dtypes: torch's names. shapes: row-major. The tensors' bytes lie
                one behind the other in this order.
            version: what the engine serves from now on: with the last bucket of a push; None with the others, and with
                all if ``set_weight_version`` follows.
            flush: drop cached prefixes afterwards; only while no request is in the engine.

        Raises:
            InvalidRequest: nothing was sent, so the broadcast must not begin.
            EngineError, DeadlineExceeded: the engine may hold some of the new weights: fence it until a whole push
                has succeeded.
        """
        self._check_bucket(names, dtypes, shapes, group)
        self._check_flush(flush)
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
        }
        if version is not None:
            body["weight_version"] = str(version)
        self._loading = True
        then = "the engine may wait on in the broadcast, half-loaded: stop rank 0 or restart the engine, then push anew"
        await self._transport.post("/update_weights_from_distributed", body, deadline, then)
        if version is not None:
            self._loaded(version)

    async def update_weights_from_disk(self, path: str, version: int, *, flush: bool = True, deadline: float = WEIGHTS_SECONDS) -> None:
        """Load a Hugging Face checkpoint directory that the engine can read, of the same architecture.

        An engine that is not paused finishes its requests first. ``flush`` as in ``receive_bucket``.
        """
        self._check_flush(flush)
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

    def _check_bucket(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str) -> None:
        if group not in self._groups:
            raise InvalidRequest(f"weight group {group!r} was not joined; joined are {sorted(self._groups) or 'none'}")
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequest(f"a bucket of {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
        if self.capabilities.weight_sessions and not self._session_open:
            raise InvalidRequest("a bucket outside a push: this engine wants begin_weight_update first")
        start = 0
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if dtype not in ITEM_BYTES:
                raise InvalidRequest(f"{name}: dtype {dtype!r}, not one of {', '.join(ITEM_BYTES)}")
            if start % ITEM_BYTES[dtype]:  # the engine takes views of the received bytes
                raise InvalidRequest(f"{name}: starts at byte {start}, not a multiple of {dtype}'s size; sort by dtype")
            start += math.prod(shape) * ITEM_BYTES[dtype]

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
