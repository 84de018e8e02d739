"""A whole run with its replicas at another site, over a link with the internet's delay and losses: what breaks there costs time alone.

Hub and site share the object store and the servers' ports; real services on both sides, with a scripted engine and optimizer step.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from myxo.run.run_access import vocabulary
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config import config_reading
from shared.process.child_process import ChildProcess
from shared.store.s3 import KEY_VARIABLE, SECRET_VARIABLE
from tests.chaos.fast.fast_config import FastShape, sections, write_model, write_toml
from tests.chaos.ledger_check import LedgerCheck, LedgerFindings, ledger_messages
from tests.support.guarded_servers import GuardedServers
from tests.support.lossy_link import LossyLink, lossy_link
from tests.support.object_store import TRAINER, RunningObjectStore, running_object_store
from tests.support.service_process import ROOT
from tests.support.waiting import until

RUN, SHAPE, SECONDS = "sites", FastShape(steps=14, groups=2, staleness=2, eval_interval=4), 120.0
INBOX = Subjects(RUN).inbox("operator")


class TwoSites:
    """The processes of both sites. ``replicas``: of the site, by instance."""

    def __init__(self, directory: Path, link: LossyLink, servers: GuardedServers, store: RunningObjectStore) -> None:
        self._directory, self.link, self._servers, self.store = directory, link, servers, store
        self.replicas: dict[str, ChildProcess] = {}
        self.spool = directory / "spool" / RUN

    def hub(self) -> list[ChildProcess]:
        """Starts its services."""
        modules = {"buffer": "services.buffer", "reward": "services.reward", "trainer": "tests.chaos.fast.scripted_trainer"}
        keys = {KEY_VARIABLE: TRAINER.key, SECRET_VARIABLE: TRAINER.secret, "MYXO_CHAOS_STEP_SECONDS": "0.3", "PYTHONPATH": str(ROOT)}
        started = []
        for role, module in modules.items():
            environment = {**os.environ, **keys, **self._servers.environment(role), "MYXO_INSTANCE": role}
            started.append(ChildProcess(role, [sys.executable, "-m", module], self.log(role), environment))
        return started

    def join(self, instance: str, skew: float = 0.0, cache: str = "cache") -> None:
        own = {"MYXO_INSTANCE": instance, "MYXO_TEST_CLOCK_SKEW": str(skew), "TMPDIR": str(self._directory)}
        site = {"MYXO_SITE_CACHE": str(self._directory / cache), "MYXO_SAMPLE_SPOOL": str(self._directory / "spool")}
        environment = {**self._servers.environment("rollout"), **own, **site}
        self.replicas[instance] = self.link.start(self.log(instance), environment, "-m", "tests.support.site_replica")

    def log(self, instance: str) -> Path:
        return self._directory / f"{instance}.log"

    def said(self, words: str) -> bool:
        return any(words in self.log(instance).read_text(errors="replace") for instance in self.replicas)

    async def ledger(self) -> LedgerFindings:
        check = LedgerCheck(SHAPE.staleness, SHAPE.groups)
        for sequence, data in await ledger_messages(self._servers.nats_url("operator"), RUN, INBOX):
            check.take(sequence, data)
        return check.end()

    async def trained(self, steps: int) -> None:
        async def enough() -> bool:
            return (await self.ledger()).steps >= steps

        await until(enough, f"step {steps}", SECONDS)

    async def cut_with_a_group_on_its_way(self) -> Path:
        """Cuts the link while a finished group waits for the hub's answer; returns its file."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await asyncio.sleep(0.002)
            if not (found := sorted(self.spool.glob("*.spool"))):
                continue
            self.link.cut(True)
            await asyncio.sleep(1.0)
            if left := [path for path in found if path.exists()]:
                return left[0]
            self.link.cut(False)
        raise AssertionError("no group was on its way when the link was cut")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [8.0, pytest.param(60.0, marks=pytest.mark.extra)])
async def test_nothing_is_lost_doubled_or_too_old(seconds: float, tmp_path: Path) -> None:
    with lossy_link() as link, running_object_store(tmp_path / "objects", link.hub) as store:
        servers = GuardedServers(tmp_path / "servers", RUN, host=link.hub)
        servers.nats.start()
        servers.valkey.start()
        sites, model = TwoSites(tmp_path, link, servers, store), write_model(tmp_path / "model")
        values = sections(tmp_path, model, SHAPE)
        values["run"]["name"] = RUN
        values["weights"] = {"update_weight_transport": "s3", "update_weight_mode": "delta", "object_store_url": store.url}
        values["weights"] |= {"object_store_allow_http": True, "push_timeout": 60.0}
        values["bus"] |= {"registry_ttl": 5.0}
        started: list[ChildProcess] = []
        try:
            write_toml(tmp_path, values)
            config = config_reading.load(tmp_path / "run.toml")
            operator = await Bus.connect(servers.nats_url("operator"), "test", inbox=INBOX)
            await runs.create(operator, config, servers.redis_url("operator"), vocabulary(config))
            started = sites.hub()
            sites.join("rollout-0", skew=120.0)
            sites.join("rollout-1", skew=-120.0)
            await sites.trained(2)

            path = await sites.cut_with_a_group_on_its_way()
            for replica in sites.replicas.values():  # the machines go while the link is away
                replica.kill()
            await asyncio.sleep(seconds)
            assert path.exists()
            sites.join("rollout-2", skew=120.0)
            sites.join("rollout-3", skew=-120.0)
            link.cut(False)
            await sites.trained((await sites.ledger()).steps + 2)
            assert sites.said("spooled_group_found") or sites.said("group_too_old_at_source")

            store.kill()
            await asyncio.sleep(3.0)
            store.start()
            client = store.client(RUN)
            for name in client.listed():
                client.put(name, b"damaged", 30.0)
            sites.join("rollout-4", cache="another")
            sites.replicas["rollout-2"].terminate()
            assert await asyncio.to_thread(sites.replicas["rollout-2"].wait, 30) == 0

            async def finished() -> bool:
                return (await sites.ledger()).finished

            await until(finished, "the run's end", SECONDS)
            found = await sites.ledger()
            assert (found.problems, found.steps) == ([], SHAPE.steps)
            assert not [end for end in found.ends.values() if end.startswith("dead")]
            await operator.close()
        finally:
            for process in [*started, *sites.replicas.values()]:
                process.kill()
            servers.nats.stop()
            servers.valkey.stop()
