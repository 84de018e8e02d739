"""Clients' weights in one engine: whole models take turns, adapters lie side by side."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.rollout.client_adapters import Adapters
from tests.support.run_config import SERVED, run_config


class Engine:
    """It notes what it loads."""

    def __init__(self) -> None:
        self.transport, self.loads = self, list[str]()

    async def update_weights_from_disk(self, path: str, version: int, *, deadline: float) -> None:
        await asyncio.sleep(0)
        self.loads.append(Path(path).name)

    async def post(self, path: str, body: dict[str, str], *rest: Any) -> None:
        await asyncio.sleep(0)
        self.loads.append(f"{path} {Path(body.get('lora_path', '')).name}")


class Clients:
    """Requests that hold weights until they are told to end."""

    def __init__(self, directory: Path, **trainer: Any) -> None:
        config = run_config(directory, trainer=trainer, **SERVED)
        self.root, self.engine, self.adapters = config.trained / "clients" / "sampler_weights", Engine(), Adapters(config)
        self.begun = list[str]()

    def ask(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        end = asyncio.Event()

        async def request() -> None:
            async with self.adapters.serving(self.engine, str(self.root / name) if name != "base" else ""):  # type: ignore[arg-type]
                self.begun.append(name)
                await end.wait()

        return asyncio.create_task(request()), end


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def tried(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_a_model_that_is_waited_for_has_its_turn_before_later_requests_for_the_one_that_is_held(tmp_path: Path) -> None:
    async def test() -> None:
        clients = Clients(tmp_path)
        asked = []
        for name in ("a", "b", "a", "b"):
            asked.append(clients.ask(name))
            await settled()
        assert clients.begun == ["a"]
        asked[0][1].set()
        await settled()
        assert clients.begun == ["a", "b", "b"] and clients.engine.loads == ["a", "b"], "those that wait for one model go together"
        given_up, _ = asked[2]
        given_up.cancel()
        later = clients.ask("b")
        await settled()
        assert clients.begun == ["a", "b", "b", "b"], "no one waits any more"
        for task, end in (asked[1], asked[3], later):
            end.set()
            await task
        assert clients.engine.loads == ["a", "b"]

    tried(test)


def test_base_and_adapters_lie_side_by_side(tmp_path: Path) -> None:
    async def test() -> None:
        clients = Clients(tmp_path, lora_rank=4)
        asked = [clients.ask(name) for name in ("a", "base", "b", "a")]
        await settled()
        assert sorted(clients.begun) == ["a", "a", "b", "base"]
        assert sorted(clients.engine.loads) == ["/load_lora_adapter a", "/load_lora_adapter b"]
        for task, end in asked:
            end.set()
            await task

    tried(test)
