"""An engine dies while it receives a push: its replica is fenced once, and what is left of that push does not touch its next engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.served_version import ServedVersion
from services.rollout.weight_receiver import WeightsReceiver
from shared.bus.subjects import Subjects
from shared.schema.messages import Message
from shared.schema.weight_messages import WeightChannelAddress, WeightsPrepare, WeightsReceive
from tests.support.run_config import run_config

CHANNEL = WeightChannelAddress(kind="group", name="c", address="127.0.0.1", port=1, secret="ab" * 16, backend="gloo", world_size=2)

Handler = Callable[[Message], Awaitable[Message]]


class Engine:
    """Takes every command, but a push ends with an error, after ``meanwhile``. ``asked``: the commands."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile, self.asked = meanwhile, list[str]()
        self.memory = self

    async def receive(self, *_: Any, **__: Any) -> None:
        self._meanwhile()
        raise ReceiverError("the engine", "connection reset by peer", touched=True)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def ask(*_: Any, **__: Any) -> None:
            self.asked.append(name)

        return ask


class RecordedReplica:
    """A replica's state, without its engine's process."""

    def __init__(self, engine: Engine) -> None:
        self.served, self.client, self.update_lock = ServedVersion(), engine, asyncio.Lock()
        self.fences, self.further_nodes = list[str](), list[str]()
        self.served.engine_started()

    @property
    def incarnation(self) -> int:
        return self.served.incarnation

    def show(self) -> None:
        pass

    async def fence(self, reason: str) -> None:
        self.fences.append(reason)
        self.served.fence()

    def replace(self, engine: Engine) -> None:
        """What a replica does when its engine has died, up to the next one's start."""
        self.served.engine_died()
        self.client = engine
        self.served.engine_started()


@pytest.mark.parametrize("died", [True, False])
async def test_the_push_of_a_dead_engine_ends_with_it(died: bool, tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {}

    async def serve(subject: str, _: type, handler: Handler) -> None:
        handlers[subject.rpartition(".")[2]] = handler

    following = Engine()
    engine = Engine(lambda: replica.replace(following) if died else None)
    replica: Any = RecordedReplica(engine)
    service: Any = SimpleNamespace(
        bus=SimpleNamespace(serve=serve),
        config=run_config(tmp_path),
        instance="rollout-1",
        spawn=asyncio.create_task,
        subjects=Subjects("run"),
        traces=SimpleNamespace(on=False),
    )
    await WeightsReceiver(service, replica).listen()
    await handlers["prepare"](WeightsPrepare(version=4, channels=[CHANNEL], rank=1, deadline=30))
    with pytest.raises(ReceiverError, match="connection reset"):
        await handlers["receive"](WeightsReceive(version=4, push=1, channels=["c"], deadline=30))
    assert not replica.served.serving and not replica.update_lock.locked()
    if died:  # `Replica.keep_engine` has fenced the dead one
        assert replica.fences == [] and following.asked == [] and not replica.served.touched
    else:
        [fence] = replica.fences
        assert fence.startswith("the push of version 4 failed") and "resume" in engine.asked
