"""An external engine: a stock SGLang server that somebody else runs (`rollout.external_engines`), used by one replica.

It is awaited and watched, but neither started nor ended. A version is verified here, in a directory of this service's, and loaded by what
SGLang's API offers: `update_weights_from_disk`, or a weight group. What is known afterwards is the engine's own answer, and the name of the
version, which it repeats in each later one.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from services.rollout.engine.engine_client import ABANDON_SECONDS, CONTROL_SECONDS, GENERATE_SECONDS, WEIGHTS_SECONDS, EngineClient
from services.rollout.engine.engine_process import CUDA_VARIABLES
from services.rollout.engine.generation import Generation, GenerationRequest, first_tokens
from services.rollout.engine.transport import EngineError, EngineTransport
from services.rollout.served_version import NO_WEIGHTS
from shared.config import devices
from shared.config.engine_limits import Capabilities
from shared.config.external_server import FIELD, EngineAway, ExternalServer
from shared.config.run_config import RunConfig
from shared.process.child_process import ChildProcess
from shared.runtime.addresses import address_towards
from shared.runtime.errors import ConfigError, DeadlineExceeded, MyxoError
from shared.schema.messages import Sampling
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.manifest import Manifest
from shared.transfer.weight_checkpoint import WeightCheckpoint

RETRY_SECONDS = 2.0  # the interval at which an external engine that is away is asked for
WATCH_SECONDS = 5.0  # the deadline for its answers while it is watched: one that is only late is `until_hung`'s matter
TRY_SECONDS = 30.0  # the deadline for its first token
HALF_LOADED = "the engine may be half-loaded"
# of weights in an answer; texts within it have their quotes escaped
NAMES = re.compile(rb'"(?:weight_)?version":\s*(?!null)("[^"]*"|[^\s,}\]]+)')
MARK = "@"  # between version and mark in the name by which an external engine knows its weights
ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True}
NEEDED = ("id", "finish_reason", "completion_tokens", "output_token_logprobs", "weight_version")  # in the meta_info of its answers


class ExternalEngine:
    """An engine that somebody else runs. It is used as `EngineProcess` is.

    ``report``: is awaited with each new reason why it cannot be used, and whether that is so for longer than the deadline already.
    Attributes: ``can``: its capabilities, once it is ready. ``expected``: the name of its weights that it has to report; empty: any."""

    def __init__(self, config: RunConfig, url: str, report: Callable[[str, bool], Awaitable[None]]) -> None:
        self.config, self.server, self._report = config, ExternalServer(config, url), report
        self.can: Capabilities | None = None
        self.pid, self.expected, self._given_up = 0, "", ""

    async def ready(self, deadline: float) -> float:
        """Returns the seconds until it was there, with the run's model, and has generated a token. It is awaited for as long as it takes;
        what is wrong with it is reported, and once more after each ``deadline``."""
        began, reported, late = time.monotonic(), "", 0
        while True:
            try:
                can = await asyncio.to_thread(self.server.describe)
                self.can = replace(can, token_versions=await asyncio.to_thread(self._try))
                return time.monotonic() - began
            except (EngineAway, ConfigError) as error:
                times = int((time.monotonic() - began) / deadline)
                if str(error) != reported or times > late:
                    await self._report(str(error), times > late)
                reported, late = str(error), times
            await asyncio.sleep(RETRY_SECONDS)

    def _try(self) -> bool:
        """Returns whether an answer names the version of each token. Raises ConfigError where it lacks what samples need."""
        self.server.ask("/continue_generation", {})  # whoever had it before may have paused it
        answer = self.server.ask("/generate", ONE_TOKEN, TRY_SECONDS)
        meta = answer["meta_info"] if isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict) else {}
        if missing := [name for name in NEEDED if name not in meta]:
            raise ConfigError(FIELD, self.server.url, f"the meta_info of its answers lacks {', '.join(missing)}")
        return "weight_versions" in meta

    async def client(self) -> "ExternalClient":
        """Returns a connection to it, once it is ready."""
        return ExternalClient(self)

    def fault(self) -> str:
        """Returns in words why it cannot be used any more; empty while it can."""
        expected = self.expected
        if self._given_up:
            return self._given_up
        try:
            found = self.server.described("model_info", WATCH_SECONDS).get("weight_version")
        except (EngineAway, ConfigError) as error:
            return "" if isinstance(error, EngineAway) and error.late else f"is away: {error}"
        if expected and expected == self.expected and found != expected:
            return f"has weights of version {found!r}, not {expected!r}: it was started anew, or somebody else has changed them"
        return ""

    def stop(self, _grace_s: float) -> None:
        """Gives it up; it runs on."""
        self._given_up = self._given_up or "was given up"


class WeightSender(ChildProcess):
    """A process that sends one version in a weight group; it imports torch before it is told which one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "shared.transfer.group_channel"]
        super().__init__("the sender of weights", command, None, CUDA_VARIABLES | os.environ)  # as SGLang's own defaults

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Returns the port at which its group meets. Raises MyxoError where the process has ended."""
        assert self.stdin is not None and self.stdout is not None  # pipes
        with contextlib.suppress(OSError):
            self.stdin.write(json.dumps(settings).encode() + b"\n")
            self.stdin.flush()
            if answer := self.stdout.readline():
                return int(answer)
        raise MyxoError("the sender of weights has ended; why is in this service's log")


class _Group(NamedTuple):
    name: str
    sender: WeightSender
    manifest: Manifest


class ExternalClient(EngineClient):
    """A connection to an external engine that is ready.

    The engine is told each version with a mark of this client's, and has to name it in every answer: weights that others load, or that it
    had when it was started, are not taken for the run's."""

    def __init__(self, engine: ExternalEngine) -> None:
        assert engine.can is not None  # it is ready
        super().__init__(EngineTransport(engine.server.url, engine.server.key), engine.can, NO_WEIGHTS, Path(os.devnull))
        self._engine, self._weights = engine, engine.config.weights
        self._by_disk = self._weights.update_weight_transport == "disk"
        self._group: _Group | None = None
        self._sender = None if self._by_disk else WeightSender()  # of the next version

    async def close(self) -> None:
        try:
            await self._leave_group(ABANDON_SECONDS)
            for step in (self.end_weight_update, self.resume):  # what was cut short would leave it paused for others
                with contextlib.suppress(MyxoError):
                    await step(deadline=ABANDON_SECONDS)
            if self._sender is not None:
                await asyncio.to_thread(self._sender.stop, 0)
        finally:
            await super().close()

    async def freeze_gc(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Does nothing: it is not ours."""

    async def open_receivers(self, *, deadline: float = CONTROL_SECONDS) -> None:
        """Ends what another client has left in the engine; it has no receivers."""
        await self.abort_all(deadline=deadline)
        with contextlib.suppress(EngineError):  # refused where no push is open, and by releases that have none
            await self.transport.post("/end_weight_update", {}, deadline, "the next update is refused")

    async def adopt(self, version: int, tensors: Mapping[str, TensorDigest], *, deadline: float = CONTROL_SECONDS) -> str:
        """Returns the digest of what was sent: a stock engine reports none of what it holds."""
        return version_digest(tensors) if tensors else ""

    async def generate_group(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, deadline: float = GENERATE_SECONDS
    ) -> list[Generation]:
        """As `EngineClient.generate_group`. An aborted request comes back without its last token, after which a stock engine has not looked
        whether it ends there."""
        found = await super().generate_group(requests, sampling, deadline=deadline)
        for index, one in enumerate(found):
            if one.finish == "abort" and len(one.tokens):
                found[index] = replace(first_tokens(one, len(one.tokens) - 1), finish="abort")
        return found

    def _checked(self, answer: Any) -> Any:
        for one in answer if isinstance(answer, list) else [answer]:
            if isinstance(meta := one.get("meta_info") if isinstance(one, dict) else None, dict):
                if (name := meta.get("weight_version")) is not None:  # one that was aborted before it ran may have none
                    meta["weight_version"] = self._number(name)
                spans = meta.get("weight_versions")
                for span in filter(lambda span: isinstance(span, dict), spans if isinstance(spans, list) else ()):
                    span["version"] = self._number(span.get("version"))
        return answer

    def check_text(self, data: bytes) -> None:
        for name in NAMES.findall(data):
            self._number(name.decode(errors="replace").strip('"'))

    def _number(self, name: Any) -> str:
        number, _, mark = str(name).partition(MARK)
        if mark != self._mark:
            reason = f"answered by weights of version {name!r}, which this replica has not loaded"
            raise EngineError(f"{self.url}/generate", f"{reason}: it was started anew, or somebody else has changed them")
        return number

    # --- weights

    async def prepare_load(self, checkpoint: WeightCheckpoint, *, deadline: float = WEIGHTS_SECONDS) -> None:
        """Forms the group over which the checkpoint will be sent; by disk there is nothing to prepare."""
        if self._by_disk:
            return
        await self._leave_group(deadline)
        if (backend := self._weights.external_group_backend) == "auto":
            backend = "nccl" if self.capabilities.device == "cuda" and devices.gpus() else "gloo"
        place: dict[str, Any] = {"master_address": address_towards(urlsplit(self.url).hostname or ""), "backend": backend}
        place |= {"world_size": 1 + self.capabilities.ranks, "group_name": f"myxo-{checkpoint.version}-{secrets.token_hex(4)}"}
        sender, self._sender = self._sender or WeightSender(), WeightSender()
        self._group = _Group(str(place["group_name"]), sender, checkpoint.manifest(self._weights.update_weight_buffer_size))
        try:
            async with asyncio.timeout(deadline):
                port = await asyncio.to_thread(sender.begin, {**place, "checkpoint": str(checkpoint.path), "seconds": deadline})
            joining = {**place, "master_port": port, "rank_offset": 1}
            await self.transport.post("/init_weights_update_group", joining, deadline, "the version is tried again")
        except (MyxoError, TimeoutError) as error:
            await self._leave_group(CONTROL_SECONDS)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("a port", "the sender of weights", deadline, "the version is tried again") from None
            raise

    async def update_weights_from_disk(self, path: str, version: int, *, deadline: float = WEIGHTS_SECONDS) -> None:
        """Has the engine load what `prepare_load` was given: from the directory, by the path that it has there, or over the group."""
        self._engine.expected, name = "", {"weight_version": f"{version}{MARK}{self._mark}"}
        if self._group is None:
            here, there = self._weights.update_weight_disk_dir, self._weights.update_weight_engine_dir
            if here is not None and there is not None and Path(path).is_relative_to(here.absolute()):
                path = str(there / Path(path).relative_to(here.absolute()))
            body = {"model_path": path, "load_format": "auto", "flush_cache": False}
            await self.transport.post("/update_weights_from_disk", body | name, deadline, HALF_LOADED)
        else:
            await self._send(self._group, name, time.monotonic() + deadline)
        with contextlib.suppress(EngineError):  # refused where requests are paused in place: those that come share no prefix with them
            await self.transport.post("/flush_cache", None, CONTROL_SECONDS, "old prefixes may stay")
        self._loaded(version)

    async def _send(self, group: _Group, name: dict[str, str], end: float) -> None:
        await self.begin_weight_update(deadline=CONTROL_SECONDS)
        for bucket in group.manifest.buckets:
            names, dtypes, shapes = zip(*((slot.name, slot.dtype, slot.shape) for slot in bucket.slots), strict=True)
            body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group.name, "flush_cache": False}
            last = name if bucket is group.manifest.buckets[-1] else {}
            left = max(1.0, end - time.monotonic())
            await self.transport.post("/update_weights_from_distributed", {**body, **last}, left, HALF_LOADED)
        await self.end_weight_update(deadline=CONTROL_SECONDS)
        await self._leave_group(CONTROL_SECONDS)

    async def set_weight_version(self, version: int, *, deadline: float = CONTROL_SECONDS) -> None:
        """Names the engine's weights, where they do not have that name, and asks it back. Raises EngineError where it has another."""
        name = f"{version}{MARK}{self._mark}"
        if await self._named(deadline) != name:
            body = {"new_version": name, "abort_all_requests": False}
            await self.transport.post("/update_weight_version", body, deadline, "the engine may name other weights")
            if (found := await self._named(deadline)) != name:
                raise EngineError(self.url, f"reports weights of version {found!r} after it was given {name!r}")
        self._engine.expected = name
        self._loaded(version)

    async def _named(self, deadline: float) -> Any:
        return (await asyncio.to_thread(self._engine.server.described, "model_info", deadline)).get("weight_version")

    async def _leave_group(self, deadline: float) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(MyxoError):
                await self.transport.post("/destroy_weights_update_group", {"group_name": group.name}, deadline, "the group may stay")
            await asyncio.to_thread(group.sender.stop, 0)
