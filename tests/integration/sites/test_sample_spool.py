"""Groups that wait on disk for the link: handed in once, by whoever gets the task again, or dropped at the source."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.rollout import task_outcomes
from services.rollout.task_outcomes import SPOOL_VARIABLE, SampleSpool, TaskOutcomes
from shared.bus import runs
from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import ConfigError
from shared.schema.messages import Generated, Interrupted, Sampling, Task
from shared.schema.sample import Sample
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import Service
from tests.chaos.link_proxy import EVERYBODY, LinkProxy, LinkState
from tests.support.run_config import run_config
from tests.support.valid_messages import example
from tests.support.waiting import until

SECONDS = 60.0
PROMPT = {"prompt": "1+1=", "prompt_tokens": np.arange(4, dtype=np.int32), "n": 2, "sampling": Sampling(temperature=1.0, max_new_tokens=8)}
TASK = Task(group="g0", attempt=0, environment="math", min_version=0, **PROMPT)
LEASE = SimpleNamespace(message=TASK, published=17)  # what the outcomes read of a lease


def samples() -> list[Sample]:
    fields = {"group": "g0", "prompt": TASK.prompt_tokens, "response": [*range(5)], "log_probs": -1.0, "segments": [(0, 5, 3)]}
    return [example(Sample, **fields, index=at, text="2", prompt_text="1+1=") for at in range(2)]


class Site:
    """``link``: of its store. ``outcomes``: makes a replica's."""

    def __init__(self, link: LinkProxy, service: Callable[[str], Awaitable[Service]], spool: Path) -> None:
        self.link, self._service, self.spool = link, service, spool

    def cut(self, cut: bool) -> None:
        self.link.set(LinkState({EVERYBODY} if cut else set()))

    async def outcomes(self, instance: str) -> TaskOutcomes:
        return TaskOutcomes(await self._service(instance))

    @property
    def files(self) -> list[Path]:
        return sorted(self.spool.glob("*/*.spool"))


@pytest.fixture
async def site(
    nats: EmbeddedNats, valkey: EmbeddedValkey, bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path / "spool"))
    monkeypatch.setattr(task_outcomes, "LINK_SECONDS", 1.0)
    config = run_config(tmp_path, run={"name": run_name}, rollout={"max_staleness": 1})
    await runs.create(bus, config, valkey.url)
    link = LinkProxy(str(tmp_path / "v.sock"), str(valkey.address))
    await link.open()
    made: list[Service] = []

    async def service(instance: str) -> Service:
        bus = await Bus.connect(nats.url, instance)
        made.append(Service("rollout", instance, run_name, bus, config, f"unix://{tmp_path / 'v.sock'}"))
        return made[-1]

    yield Site(link, service, tmp_path / "spool")
    for one in made:
        await one.store.close()
        await one.bus.close()
    link.close()


async def test_a_group_outlives_its_replica_and_is_sent_once_by_another(site: Site) -> None:
    first = await site.outcomes("rollout-0")
    assert await first.spooled(LEASE) is None
    site.cut(True)
    sending = asyncio.create_task(first.generated(TASK, samples(), 1.0, 2.0))
    await until(lambda: first._service.held_back, "the wait for the link, by which no task is taken", SECONDS)
    assert site.files
    sending.cancel()  # its machine is gone
    await asyncio.wait([sending])
    assert not first._service.held_back
    second = await site.outcomes("rollout-1")
    found = asyncio.create_task(second.spooled(LEASE))
    await asyncio.sleep(2.5)
    assert not found.done() and site.files
    site.cut(False)
    message = await asyncio.wait_for(found, SECONDS)
    assert isinstance(message, Generated) and message.replica == "rollout-0"
    assert len(await second._service.store.read(message.payload)) == len(message.payload.keys)
    await second.publish(TASK, message, 1.0)
    stream = await second._service.bus.js.stream_info(second._service.subjects.generated_stream)
    assert stream.state.messages == 1 and not site.files
    assert await second.spooled(SimpleNamespace(message=TASK, published=18)) is None


@pytest.mark.extra
async def test_what_is_too_old_after_a_cut_is_not_sent_and_what_is_torn_is_not_read(site: Site) -> None:
    outcomes = await site.outcomes("rollout-0")
    service = outcomes._service
    await outcomes.spooled(LEASE)
    site.cut(True)
    sending = asyncio.create_task(outcomes.generated(TASK, samples(), 1.0, 2.0))
    await until(lambda: site.files, "a file", SECONDS)
    [path] = site.files
    content = path.read_bytes()
    live = WeightsLive(version=5, bytes=0, seconds=0.0, replicas=["rollout-0"], at=1.0)
    await service.bus.put(service.subjects.weights_bucket, "live", live.encode())
    message = await asyncio.wait_for(sending, SECONDS)  # while the store is away: nothing is sent
    assert isinstance(message, Interrupted) and message.stale and message.payload is None
    site.cut(False)
    await outcomes.publish(TASK, message, 1.0)
    assert not site.files
    for torn in (content[:-1], content.replace(b"rollout-0", b"rollout-1")[:-3] + b"abc", b"", b"\x90"):
        path.write_bytes(torn)
        assert await outcomes.spooled(LEASE) is None and not site.files, torn[:8]


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for given in (str(tmp_path / "file"), "relative"):
        monkeypatch.setenv(SPOOL_VARIABLE, given)
        with pytest.raises(ConfigError, match=f"{SPOOL_VARIABLE}.*an absolute path of a directory"):
            SampleSpool.of(run_config(tmp_path))
