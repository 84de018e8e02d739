"""Statuses of services are there while they are renewed, and gone soon after."""

import time
from pathlib import Path

import pytest

from shared.bus import streams
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.schema.service_messages import ServiceStatus
from tests.support.run_config import run_config
from tests.support.waiting import until

TTL = 1.0


@pytest.fixture
async def registry(bus: Bus, run_name: str, tmp_path: Path) -> Registry:
    await streams.create(bus, run_config(tmp_path, run={"name": run_name}))
    return Registry(bus, run_name)


def status(service: str, instance: str, **fields: object) -> ServiceStatus:
    return ServiceStatus(service=service, instance=instance, host="h", pid=1, http="127.0.0.1:1", state="ready", at=time.time(), **fields)


async def test_statuses_are_seen_by_kind_with_what_they_say(registry: Registry) -> None:
    await registry.renew(status("rollout", "r-1", version=3, gauges={"tokens_per_s": 5.0}))
    await registry.renew(status("rollout", "r-2"))
    await registry.renew(status("buffer", "b-1"))
    assert sorted(one.instance for one in await registry.alive()) == ["b-1", "r-1", "r-2"]
    assert [one.instance for one in await registry.alive("rollout")] == ["r-1", "r-2"]
    [first, _] = await registry.alive("rollout")
    assert (first.version, first.gauges) == (3, {"tokens_per_s": 5.0})
    assert await registry.alive("trainer") == []


async def test_who_leaves_is_gone_at_once(registry: Registry) -> None:
    await registry.renew(status("rollout", "r-1"))
    await registry.leave(status("rollout", "r-1"))
    assert await registry.alive() == []
    await registry.renew(status("rollout", "r-1"))
    assert len(await registry.alive()) == 1


async def test_a_status_of_another_schema_is_not_one_to_work_with(registry: Registry, bus: Bus, run_name: str) -> None:
    await bus.put(Subjects(run_name).services_bucket, "rollout.future", b"\x81\xa6schema\x63")
    await registry.renew(status("rollout", "r-1"))
    assert [one.instance for one in await registry.alive()] == ["r-1"]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("rollout.r-2", ("rollout", "r-1")),  # another replica of the same account
        ("rollout.r-2", ("trainer", "trainer-1")),
        ("rollout.r.2", ("rollout.r", "2")),
    ],
)
async def test_a_status_that_does_not_belong_to_its_key_is_ignored_and_counted(
    key: str, named: tuple[str, str], registry: Registry, bus: Bus, run_name: str
) -> None:
    found: list[str] = []
    registry = Registry(bus, run_name, lambda: found.append(key))
    bucket = Subjects(run_name).services_bucket
    await registry.renew(status("rollout", "r-1"))
    await bus.put(bucket, key, status(*named, gauges={"onloaded": 1.0}).encode())
    for _ in range(2):
        assert [(one.service, one.instance, one.gauges) for one in await registry.alive()] == [("rollout", "r-1", {})]
        assert [one.instance for one in await registry.alive("rollout")] == ["r-1"]
        assert await registry.alive("trainer") == []
    assert found == [key]  # once, not at every look

    await bus.put(bucket, key, status(*key.split(".", 1)).encode())
    assert len(await registry.alive("rollout")) == 2
    await bus.put(bucket, key, status(*named).encode())
    assert len(await registry.alive("rollout")) == 1
    assert found == [key, key]


async def test_who_stops_renewing_is_gone_after_the_ttl_and_who_renews_stays(bus: Bus, run_name: str, tmp_path: Path) -> None:
    await streams.create(bus, run_config(tmp_path, run={"name": run_name}, bus={"registry_ttl": TTL}))
    registry = Registry(bus, run_name)
    await registry.renew(status("rollout", "silent"))
    start = time.monotonic()

    async def only_the_living() -> bool:
        await registry.renew(status("rollout", "living"))
        return [one.instance for one in await registry.alive()] == ["living"]

    await until(only_the_living, "the end of the silent status", pause=TTL / 20)
    assert time.monotonic() - start >= TTL * 0.9
