"""Commands to receivers in plain processes' place: threads that own a small model each, and a source in this one."""

import asyncio
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.rollout.engine import receiver_client
from services.rollout.engine.receiver.command_session import CommandSession
from services.rollout.engine.receiver.receiver import Receiver
from services.rollout.engine.receiver_client import NotBegun, ReceiverClient, ReceiverError
from shared.runtime.errors import DeadlineExceeded
from shared.transfer import digest
from shared.transfer.weight_channel import TransferDeadline
from tests.support.engine_process import serve
from tests.support.weights_group import WeightsGroup, known_of, manifest_of

RANKS = 2
SECONDS = 60.0


class Model(nn.Module):
    """One rank's rows of a matrix, and a vector that it cannot load where it is ``broken``: which it says once that returns true."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.loads = rank, 0
        self.broken: Callable[[], bool] | None = None
        self.matrix = nn.Parameter(torch.zeros(3, 5), requires_grad=False)
        self.vector = nn.Parameter(torch.zeros(7), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "vector" and self.broken is not None:
                TransferDeadline(SECONDS).until(self.broken, "the moment to fail", "the test")
                raise RuntimeError("no room for a vector")
            self.get_parameter(name).copy_(tensor.narrow(0, 3 * self.rank, 3) if name == "matrix" else tensor)


class Ranks:
    """The receivers of one engine; ``wake`` has each do its next command, as SGLang would."""

    def __init__(self, directory: Path, threads: list[threading.Thread]) -> None:
        self.models = [Model(rank) for rank in range(RANKS)]
        self.sessions = [CommandSession(directory, Receiver(model, model.rank, "cpu")) for model in self.models]
        self.receivers = ReceiverClient(directory, RANKS)
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=serve, args=(session, self.stopping), daemon=True) for session in self.sessions]
        for thread in self.threads:
            thread.start()

    async def wake(self) -> None:
        """Nothing: `serve` looks by itself."""

    async def receive(self, group: WeightsGroup, push: int = 1, seconds: float = SECONDS, **changes: Any) -> list[dict[str, Any]]:
        command = {"verb": "receive", "version": push, "push": push, "channels": [group.name], **changes}
        return await self.receivers.have_done(command, seconds, self.wake)

    async def join(self, group: WeightsGroup) -> None:
        channel = group.address.model_dump(mode="json")
        await self.receivers.ask({"verb": "join", "channels": [channel], "rank": 1, "timeout": SECONDS}, SECONDS)
        await asyncio.to_thread(group.join, SECONDS)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a command is never begun, its caller does not wait for ranks that will not answer as long as it would for real ones."""
    monkeypatch.setattr(receiver_client, "ABORT_SECONDS", 1.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="myxo-") as path:  # pytest's own are too long for sockets
        yield Path(path)


@pytest.fixture
def ranks(directory: Path) -> Iterator[Ranks]:
    made = Ranks(directory, [])
    asyncio.run(made.receivers.wait_open(SECONDS))
    yield made
    made.stopping.set()
    for thread in made.threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def tensors(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(6, 5, generator=random), "vector": torch.randn(7, generator=random)}


def send(group: WeightsGroup, push: int, given: dict[str, Tensor]) -> tuple[str, threading.Thread]:
    """The version's digest, and who sends."""
    manifest = manifest_of(given, bucket_bytes=256)
    group.announce(push, manifest, SECONDS)
    sending = threading.Thread(target=group.push, args=(manifest, given), daemon=True)
    sending.start()
    return digest.version_digest(known_of(manifest, given)), sending


async def test_each_rank_takes_its_part(ranks: Ranks) -> None:
    """And is asked once: the second push goes by the plan of the first."""
    group = WeightsGroup("tp", 1 + RANKS)
    await ranks.join(group)
    for push in (1, 2, 3):
        given = tensors(push)
        wanted, sending = send(group, push, given)
        answers = await ranks.receive(group, push)
        sending.join(SECONDS)
        assert [answer["digest"] for answer in answers] == [wanted] * RANKS
        for rank, model in enumerate(ranks.models):
            assert torch.equal(model.matrix, given["matrix"][3 * rank : 3 * rank + 3]) and torch.equal(model.vector, given["vector"])
            assert model.loads == 2  # once a bucket
    states = await ranks.receivers.ask({"verb": "state"}, SECONDS)
    assert [(state["version"], state["digest"], state["channels"]) for state in states] == [(3, wanted, ["tp"])] * RANKS
    group.die()


async def test_a_rank_that_fails_ends_the_others(ranks: Ranks) -> None:
    """One cannot load, the other waits for more: both end at once, and know nothing of what they hold."""
    group = WeightsGroup("tp-broken", 1 + RANKS)
    await ranks.join(group)
    other = ranks.sessions[0]._held  # called off unbegun it would stay in the channel
    ranks.models[1].broken = lambda: any(command.answer.running() for command in list(other))
    given = tensors(1)
    manifest = manifest_of(given | {"more": torch.zeros(90)}, bucket_bytes=256)
    group.announce(1, manifest, SECONDS)
    sending = threading.Thread(target=group.push, args=(manifest, given, slice(2)), daemon=True)
    sending.start()
    with pytest.raises(ReceiverError, match="rank 1: RuntimeError: no room for a vector") as failed:
        await ranks.receive(group, seconds=600)
    assert failed.value.touched
    sending.join(SECONDS)
    end = time.monotonic() + SECONDS
    states = await ranks.receivers.ask({"verb": "state"}, SECONDS)
    while any(state["channels"] for state in states):  # the rank that did not fail is told, and nobody waits for it
        assert time.monotonic() < end, states
        states = await ranks.receivers.ask({"verb": "state"}, SECONDS)
    assert [(state["version"], state["digest"]) for state in states] == [(-1, "")] * RANKS
    group.die()


async def test_a_push_that_its_source_gives_up(ranks: Ranks) -> None:
    group = WeightsGroup("tp-aborted", 1 + RANKS)
    await ranks.join(group)
    group.store.set("aborted", "the optimizer was in the way")
    with pytest.raises(ReceiverError, match="has given up: the optimizer was in the way") as given_up:
        await ranks.receive(group)
    assert not given_up.value.touched
    group.die()


async def test_commands_that_nobody_does(directory: Path) -> None:
    """A session whose model's thread is never asked: an command waits, and is gone when it is called off."""
    session = CommandSession(directory, Receiver(Model(0), 0, "cpu"))
    session.open()
    receivers = ReceiverClient(directory, 1)
    command = {"verb": "receive", "version": 1, "push": 1, "channels": []}
    woken = asyncio.Event()

    async def wake() -> None:
        woken.set()

    asking = asyncio.create_task(receivers.have_done(command, SECONDS, wake))
    await asyncio.wait_for(woken.wait(), SECONDS)
    await receivers.abort()
    with pytest.raises(ReceiverError, match="rank 0: called off before it began") as off:
        await asking
    assert not off.value.touched

    async def fail() -> None:
        raise ReceiverError("the endpoint", "the engine is dead", touched=False)

    with pytest.raises(ReceiverError, match="the engine is dead") as dead:
        await receivers.have_done(command, SECONDS, fail)
    assert not dead.value.touched
    session.close()


async def test_a_rank_that_does_not_begin_is_named_and_does_nothing_later(directory: Path) -> None:
    session = CommandSession(directory, Receiver(Model(0), 0, "cpu"))
    session.open()
    receivers = ReceiverClient(directory, 1)
    command = {"verb": "receive", "version": 1, "push": 1, "channels": ["x"]}
    words = r"from ranks \[0\] of the engine, whose schedulers do not run within 0.5 s; this engine is left out"
    with pytest.raises(NotBegun, match=words) as late:
        await receivers.have_done(command, SECONDS, wake_nobody, begin=0.5)
    assert not late.value.touched
    assert session.work(), "the command is still in the queue"
    assert (await receivers.ask({"verb": "state"}, SECONDS))[0]["channels"] == []
    session.close()


async def test_a_rank_that_begins_as_it_is_called_off_may_hold_other_weights(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica would serve them under the version before."""
    model, group = Model(0), WeightsGroup("late", 2)
    session = CommandSession(directory, Receiver(model, 0, "cpu"))
    session.open()
    receivers = ReceiverClient(directory, 1)
    channel = group.address.model_dump(mode="json")
    await receivers.ask({"verb": "join", "channels": [channel], "rank": 1, "timeout": SECONDS}, SECONDS)
    await asyncio.to_thread(group.join, SECONDS)
    send(group, 1, tensors(1))
    in_time = receivers.abort

    async def abort(deadline: float) -> None:
        await asyncio.to_thread(session.work)
        await in_time(deadline)

    monkeypatch.setattr(receivers, "abort", abort)
    command = {"verb": "receive", "version": 1, "push": 1, "channels": [group.name]}
    with pytest.raises(NotBegun) as late:
        await receivers.have_done(command, SECONDS, wake_nobody, begin=2.0)
    assert model.loads and late.value.touched
    session.close()


async def test_a_command_that_was_called_off_unwoken_does_not_take_the_wake_of_the_next(directory: Path) -> None:
    """Neither while a wake may still come for it, which then ends with it."""
    session = CommandSession(directory, Receiver(Model(0), 0, "cpu"))
    session.open()
    receivers, late, wakes = ReceiverClient(directory, 1), asyncio.Event(), list[bool]()
    command = {"verb": "receive", "version": 1, "push": 1, "channels": ["x"]}

    async def not_paused() -> None:
        raise ReceiverError("the endpoint", "the engine does not pause")

    async def wake() -> None:
        wakes.append(await asyncio.to_thread(session.work))

    async def wake_late() -> None:
        await late.wait()
        await wake()

    with pytest.raises(ReceiverError, match="does not pause"):
        await receivers.have_done(command, SECONDS, wake, ready=not_paused)
    with pytest.raises(ReceiverError, match="this engine has joined none"):
        await receivers.have_done(command, SECONDS, wake)
    with pytest.raises(NotBegun):
        await receivers.have_done(command, SECONDS, wake_late, begin=2.0)
    following = asyncio.create_task(receivers.have_done(command, SECONDS, wake, ready=late.wait))
    await asyncio.sleep(0)
    late.set()
    with pytest.raises(ReceiverError, match="this engine has joined none"):
        await following
    assert wakes == [True, True, True], "each command had a wake, and each wake a command"
    await receivers.close()
    session.close()


async def test_a_wake_that_has_come_and_is_not_answered_yet_is_not_waited_for(directory: Path) -> None:
    """Its command failed, the next one was called off unwoken: the one after that has its wake for itself."""
    session = CommandSession(directory, Receiver(Model(0), 0, "cpu"))
    session.open()
    receivers, answered = ReceiverClient(directory, 1), asyncio.Event()
    command = {"verb": "receive", "version": 1, "push": 1, "channels": ["x"]}

    async def wake() -> None:
        assert await asyncio.to_thread(session.work)

    async def wake_unanswered() -> None:
        await wake()
        await answered.wait()

    async def not_paused() -> None:
        raise ReceiverError("the endpoint", "the engine does not pause")

    with pytest.raises(ReceiverError, match="this engine has joined none"):
        await receivers.have_done(command, SECONDS, wake_unanswered)
    with pytest.raises(ReceiverError, match="does not pause"):
        await receivers.have_done(command, SECONDS, wake, ready=not_paused)
    with pytest.raises(ReceiverError, match="this engine has joined none"):
        await receivers.have_done(command, SECONDS, wake, begin=5.0)
    answered.set()
    await receivers.close()
    session.close()


async def test_getting_ready_waits_for_the_command_before_and_not_for_its_own(directory: Path) -> None:
    """An engine whose push has failed closes it while the next push's command is queued already: neither may wait for the other."""
    session = CommandSession(directory, Receiver(Model(0), 0, "cpu"))
    session.open()
    receivers, answered = ReceiverClient(directory, 1), asyncio.Event()
    command = {"verb": "receive", "version": 1, "push": 1, "channels": ["x"]}

    async def wake() -> None:
        assert await asyncio.to_thread(session.work)

    async def settle_once_queued() -> None:
        while not session._queue:
            await asyncio.sleep(0.01)
        for _ in range(3):  # by then the client has read that it is
            await receivers.ask({"verb": "state"}, SECONDS)
        await receivers.settled()

    for _ in range(2):
        with pytest.raises(ReceiverError, match="this engine has joined none"):
            await receivers.have_done(command, SECONDS, wake, ready=settle_once_queued)

    session.receiver.prepare = session.receiver.finish = lambda *_, **__: {}  # type: ignore[method-assign, assignment, return-value]

    async def wake_unanswered() -> None:
        await wake()
        await answered.wait()

    await receivers.have_done(command, SECONDS, wake_unanswered)
    following = asyncio.create_task(receivers.have_done(command, SECONDS, wake, ready=settle_once_queued))
    done, _ = await asyncio.wait([following], timeout=0.2)
    assert not done, "the wake of the command before is still on its way"
    answered.set()
    assert (await following)[0]["ok"]
    await receivers.close()
    session.close()


async def wake_nobody() -> None:
    """What an engine whose scheduler hangs does when it is asked to load."""


async def test_what_is_no_command(ranks: Ranks, directory: Path) -> None:
    with pytest.raises(ReceiverError, match="command 'dance': not one of abort, adopt, .*join, leave, "):
        await ranks.receivers.ask({"verb": "dance"}, SECONDS)
    with pytest.raises(ReceiverError, match=r"rank \d: KeyError: 'version'"):
        await ranks.receivers.ask({"verb": "adopt"}, SECONDS)
    with pytest.raises(ReceiverError, match=r"rank \d: channels .* are to be received from; this engine has joined none"):
        await ranks.receivers.have_done({"verb": "receive", "version": 1, "push": 1, "channels": ["x"]}, SECONDS, ranks.wake)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(ranks.sessions[0].path))
        stranger.sendall(b"\x80\x04]\x94.\n")
        answer = json.loads(stranger.makefile().readline())
    assert not answer["ok"] and not answer["touched"]
    await ranks.receivers.ask({"verb": "state"}, SECONDS)


async def test_ranks_that_do_not_listen(ranks: Ranks, directory: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"ranks \[2\] of the engine"):
        await ReceiverClient(directory, RANKS + 1).wait_open(0.2)
    with pytest.raises(ReceiverError, match="rank 2 cannot be reached"):
        await ReceiverClient(directory, RANKS + 1).ask({"verb": "state"}, SECONDS)
