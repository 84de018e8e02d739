"""Clients' weights in a replica's engine: adapters side by side over the base, or whole models one after the other."""

import asyncio
import contextlib
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.transport import EngineError, InvalidRequest
from shared.config.run_config import RunConfig
from shared.model.families import read_architecture
from shared.model.trainable_parameters import Lora

LOAD_SECONDS = 120.0


def adapter_flags(config: RunConfig, device: str) -> dict[str, Any]:
    """Returns the engine's flags where clients' weights are served; none in a run of its own weights."""
    if not config.tinker.tinker_endpoint:
        return {}
    flags: dict[str, Any] = {"enable-deterministic-inference": True} if device == "cpu" else {}
    if (lora := Lora.of(config.trainer)) is None:
        return flags
    # "all" would have the engine compute adapters of embeddings and of the output layer, too, which clients have not
    targets, most = lora.matrices(read_architecture(config.model.hf_checkpoint)), config.tinker.tinker_adapters
    flags |= {"lora-backend": "torch_native"} if device == "cpu" else {}
    return {**flags, "enable-lora": True, "max-lora-rank": lora.rank, "lora-target-modules": targets, "max-loras-per-batch": most}


class Adapters:
    """The weights that one replica's engine has loaded."""

    _engine: EngineClient | None

    def __init__(self, config: RunConfig) -> None:
        self._root, self._base = config.trained / "clients" / "sampler_weights", str(config.model.hf_checkpoint)
        self._most, self._engine = 4 * config.tinker.tinker_adapters, None
        self._loaded, self._changed = OrderedDict[str, str](), asyncio.Condition()
        self._used, self._waiting = Counter[str](), Counter[str]()  # requests by what they use, and by the whole model that they wait for
        self._whole, self._lora = self._base, config.trainer.lora_rank is not None

    @contextlib.asynccontextmanager
    async def serving(self, engine: EngineClient, weights: str) -> AsyncIterator[str | None]:
        """Has the engine serve some weights while the body runs; yields the adapter's name there, None for whole models.

        ``weights``: a directory; empty: the base. Raises InvalidRequest for one that is not a client's, EngineError.
        """
        path = str(Path(weights).resolve()) if weights else self._base
        if weights and not (Path(path).is_relative_to(self._root.resolve()) and Path(path).is_dir()):
            raise InvalidRequest(f"weights {weights!r}: expected a directory in {self._root}; it is removed when they expire")
        async with self._changed:
            await self._loading(engine, path, adapter=bool(weights) and self._lora)
            self._used[path] += 1
        try:
            yield self._loaded.get(path)
        finally:
            async with self._changed:
                self._used -= Counter([path])
                self._changed.notify_all()

    async def _loading(self, engine: EngineClient, path: str, *, adapter: bool) -> None:
        """Loads weights where they are not; must hold the condition."""
        if engine is not self._engine:  # a new engine has the base alone
            self._loaded.clear()
            self._engine, self._whole = engine, self._base
        loaded, used = self._loaded, self._used
        if adapter:
            await self._changed.wait_for(lambda: path in loaded or len(loaded) < self._most or loaded.keys() - used.keys())
            if path in loaded:
                return loaded.move_to_end(path)
            if len(loaded) >= self._most:
                await self._post(engine, "unload", lora_name=loaded.pop(next(one for one in loaded if one not in used)))
            name = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
            try:
                await self._post(engine, "load", lora_name=name, lora_path=path)
            except EngineError:  # it may have it by a request that was given up in the midst of this, and refuses a second one of the name
                with contextlib.suppress(EngineError):
                    await self._post(engine, "unload", lora_name=name)
                await self._post(engine, "load", lora_name=name, lora_path=path)
            loaded[path] = name
            return
        self._waiting[path] += 1
        try:  # those that wait for one model go together, in the order in which the first of them came
            await self._changed.wait_for(lambda: next(iter(self._waiting)) == path and (path == self._whole or not used.keys() - {path}))
            if path != self._whole:
                self._whole = ""  # unknown where this is given up in the midst
                await engine.update_weights_from_disk(path, 0, deadline=LOAD_SECONDS)
                self._whole = path
        finally:
            self._waiting -= Counter([path])
            self._changed.notify_all()

    async def _post(self, engine: EngineClient, verb: str, **body: str) -> None:
        await engine.transport.post(f"/{verb}_lora_adapter", body, LOAD_SECONDS, "the request is given up")
