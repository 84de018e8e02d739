"""A replica in a push, from its first request to its last, and what it serves when something fails on the way."""

import asyncio
import itertools

import pytest

from services.rollout import weight_receiver as protocol
from services.rollout.served_version import NO_WEIGHTS
from shared.bus.bus_errors import RequestRefused
from shared.runtime.addresses import LOOPBACK
from shared.schema.messages import Sampling
from shared.schema.weight_messages import WeightsOffer, WeightsReady, WeightsReceive
from tests.integration.engine.bench import Bench, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import LONG
from tests.integration.engine.source import SECONDS, Source
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

GROUPS = itertools.count()


async def draws(desk: Bench, version: int) -> None:
    """Assert that groups are generated, of this version."""
    await desk.task(group=f"g{next(GROUPS):08d}")
    _, samples = await desk.generated()
    assert {segment[2] for one in samples for segment in one.segments} == {version}


async def test_from_offer_to_commit(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    """And once more over the same channel, with a check of what was loaded before it is served."""
    desk = await new_bench()
    source = Source(desk, checkpoint(1).model, 1)
    await source.prepare()
    assert desk.replica.serving, "preparing stopped the replica"
    received = await source.receive()
    assert not desk.replica.serving and received.digest == source.digest and received.differences == {}
    await source.commit(received.digest)
    assert desk.replica.serving and desk.replica.version == 1
    ready = WeightsReady(replica="rollout-1", version=1, digest=source.digest, address=LOOPBACK)
    assert await desk.ask("offer", WeightsOffer(version=2)) == ready

    newer = Source(desk, checkpoint(2).model, 2)
    newer.group.die()
    newer.group = source.group
    received = await newer.receive(2)
    checked = await newer.receive(3, check=True)
    assert checked.differences == {} and checked.digest == received.digest == newer.digest
    await newer.commit(received.digest)
    await draws(desk, 2)
    source.leave()


async def test_a_version_with_another_digest_is_not_served(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    """And a fenced replica takes the next push, in channels of its own."""
    desk = await new_bench()
    source = Source(desk, checkpoint(1).model, 1)
    await source.prepare()
    with pytest.raises(RequestRefused, match="version 2 is to be served, version None is being received"):
        await Source(desk, checkpoint(1).model, 2).commit(source.digest)
    received = await source.receive()
    with pytest.raises(RequestRefused, match=f"has digest 0123, the engine has {received.digest}"):
        await source.commit("0123")
    assert not desk.replica.serving and desk.replica.version == NO_WEIGHTS and desk.service.state == "fenced"
    assert await desk.ask("offer", WeightsOffer(version=1)) == WeightsReady(replica="rollout-1", version=NO_WEIGHTS, address=LOOPBACK)
    with pytest.raises(RequestRefused, match="the engine is in none"):
        await source.receive(2, only=slice(0))
    source.leave()
    again = Source(desk, checkpoint(1).model, 1)
    await again.prepare()
    await again.commit((await again.receive()).digest)
    await draws(desk, 1)
    again.leave()


@pytest.mark.extra
async def test_a_push_that_is_aborted_before_anything_has_come(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    """The channels are never all joined: nothing has changed, and the replica continues. An abort of another push does nothing."""
    desk = await new_bench()
    source = Source(desk, checkpoint(1).model, 1, world_size=3)
    await source.prepare()
    await draws(desk, 0)
    receiving = asyncio.create_task(source.receive(only=slice(0)))
    await until(lambda: desk.client.paused, "the engine at receiving", 60)
    await source.abort(version=0)
    assert not receiving.done()
    await source.abort()
    with pytest.raises(RequestRefused, match="called off"):
        await receiving
    assert desk.replica.serving and desk.replica.version == 0
    await draws(desk, 0)
    source.leave()


async def test_a_source_that_dies_between_buckets(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await new_bench()
    source = Source(desk, checkpoint(1).model, 1)
    await source.prepare()
    assert await desk.in_decode("g00000100", 32, sampling=Sampling(temperature=1.0, max_new_tokens=LONG, stop_token_ids=[]))
    with pytest.raises(RequestRefused, match=f"the source of channel {source.group.name}"):
        await source.receive(only=slice(2), then=lambda group: group.die())
    assert not desk.replica.serving and desk.service.state == "fenced"
    again = Source(desk, checkpoint(1).model, 1)
    await again.prepare()
    await again.commit((await again.receive()).digest)
    group, samples = await desk.generated()
    assert group.group == "g00000100"
    versions = [{segment[2] for segment in one.segments} for one in samples]
    assert {1} in versions and {0, 1} not in versions, "what the half-loaded engine drew was not discarded"
    assert {one.finish for one, of in zip(samples, versions, strict=True) if of == {0}} <= {"stop"}, "these had ended before the push"
    await draws(desk, 1)
    again.leave()


@pytest.mark.extra
async def test_a_trainer_that_falls_silent_before_its_commit(
    new_bench: NewBench, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "EXPIRY_MARGIN", -SECONDS + 5)
    desk = await new_bench()
    source = Source(desk, checkpoint(1).model, 1)
    await source.prepare()
    await source.receive()
    assert desk.service.state == "updating"
    await until(lambda: desk.service.state == "fenced", "the fence", 60)
    with pytest.raises(RequestRefused, match="version None is being received"):
        await source.commit(source.digest)
    source.leave()


async def test_pushes_that_do_not_fit(new_bench: NewBench, checkpoint: Checkpoints) -> None:
    desk = await new_bench()
    await desk.serve(5)
    source = Source(desk, checkpoint(1).model, 4)
    with pytest.raises(RequestRefused, match="version 4 is to be pushed, this replica serves 5"):
        await source.prepare()
    with pytest.raises(RequestRefused, match="version 4 was sent, this replica serves 5"):
        await source.receive(only=slice(0))
    with pytest.raises(RequestRefused, match=r"version 6 comes over channels \['unheard-of'\]; the engine is in none"):
        await desk.ask("receive", WeightsReceive(version=6, push=1, channels=["unheard-of"], deadline=SECONDS))
    assert desk.replica.serving and desk.replica.version == 5
    source.leave()
