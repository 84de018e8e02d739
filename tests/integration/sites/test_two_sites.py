"""A whole run with its replicas at another site, over a link with the internet's delay and losses: what breaks there costs time alone.

Hub and site share the object store and the servers' ports, or one HTTPS port alone; real services on both sides, with a scripted engine and
optimizer step.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from myxo.run.run_access import vocabulary
from shared.accounts import certificates
from shared.accounts.permissions import ROLES
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config import config_reading
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port
from shared.store.s3 import KEY_VARIABLE, SECRET_VARIABLE
from tests.chaos.fast.fast_config import FastShape, sections, write_model, write_toml
from tests.chaos.ledger_check import LedgerCheck, LedgerFindings, ledger_messages
from tests.support.guarded_servers import GuardedServers
from tests.support.lossy_link import Internet, LossyLink, lossy_link
from tests.support.object_store import TRAINER, RunningObjectStore, running_object_store
from tests.support.service_process import ROOT
from tests.support.waiting import until

RUN, SHAPE, SECONDS = "sites", FastShape(steps=14, groups=2, staleness=2, eval_interval=4), 300.0
INBOX = Subjects(RUN).inbox("operator")


class Hub:
    """The run's own site."""

    def __init__(self, directory: Path, servers: GuardedServers) -> None:
        self._directory, self._servers = directory, servers

    def started(self) -> list[ChildProcess]:
        """Starts its services."""
        modules = {"buffer": "services.buffer", "reward": "services.reward", "trainer": "tests.chaos.fast.scripted_trainer"}
        keys = {KEY_VARIABLE: TRAINER.key, SECRET_VARIABLE: TRAINER.secret, "MYXO_CHAOS_STEP_SECONDS": "0.3", "PYTHONPATH": str(ROOT)}
        started = []
        for role, module in modules.items():
            environment = {**os.environ, **keys, **self._servers.environment(role), "MYXO_INSTANCE": role}
            started.append(ChildProcess(role, [sys.executable, "-m", module], self.log(role), environment))
        return started

    def log(self, instance: str) -> Path:
        return self._directory / f"{instance}.log"

    async def ledger(self) -> LedgerFindings:
        check = LedgerCheck(SHAPE.staleness, SHAPE.groups)
        for sequence, data in await ledger_messages(self._servers.nats_url("operator"), RUN, INBOX):
            check.take(sequence, data)
        return check.end()

    async def trained(self, steps: int) -> None:
        async def enough() -> bool:
            return (await self.ledger()).steps >= steps

        await until(enough, f"step {steps}", SECONDS, 1.0)


class TwoSites(Hub):
    """The processes of both sites. ``replicas``: of the other site, by instance."""

    def __init__(self, directory: Path, link: LossyLink, servers: GuardedServers, store: RunningObjectStore, temporary: str) -> None:
        super().__init__(directory, servers)
        self.link, self.store, self._temporary = link, store, temporary
        self.replicas: dict[str, ChildProcess] = {}
        self.spool = directory / "spool" / RUN

    def join(self, instance: str, skew: float = 0.0, cache: str = "cache") -> None:
        own = {"MYXO_INSTANCE": instance, "MYXO_TEST_CLOCK_SKEW": str(skew), "TMPDIR": self._temporary}
        site = {"MYXO_SITE_CACHE": str(self._directory / cache), "MYXO_SAMPLE_SPOOL": str(self._directory / "spool")}
        environment = {**self._servers.environment("rollout"), **own, **site}
        self.replicas[instance] = self.link.start(self.log(instance), environment, "-m", "tests.support.site_replica")

    def said(self, words: str) -> bool:
        return any(words in self.log(instance).read_text(errors="replace") for instance in self.replicas)

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


def one_port(
    stack: contextlib.ExitStack, directory: Path, link: LossyLink, servers: GuardedServers, store: RunningObjectStore, port: int
) -> str:
    """Puts all servers, which listen on loopback alone, behind one HTTPS port, and ports of the site's loopback before that. Returns the
    bucket's URL."""
    chain = certificates.make({"hub": [link.hub]})
    files = {"certificate": chain.servers["hub"].certificate, "key": chain.servers["hub"].key, "authority": chain.authority}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    for role in ROLES:
        (servers.accounts / role / "ca.pem").write_bytes(chain.authority)
    words = ["-m", "myxo", "link", "--nats", str(servers.deployment.nats), "--redis", str(servers.deployment.redis)]
    serve = ["--serve", f"{link.hub}:{port}", "--objects", store.url.split("/")[2]]
    serve += ["--certificate", str(directory / "certificate"), "--key", str(directory / "key")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYXO_CA_FILE": str(directory / "authority")}
    log = directory / "link-hub.log"
    hub = ChildProcess("link at the hub", [sys.executable, *words, *serve], log, environment)
    stack.callback(hub.kill)
    end = time.monotonic() + SECONDS
    while "https://" not in log.read_text():
        assert hub.running and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    site = link.start(directory / "link-site.log", environment, *words, "--hub", f"https://{link.hub}:{port}")
    stack.callback(site.kill)
    return f"https://{link.hub}:{port}/{store.url.rpartition('/')[2]}"


@pytest.mark.extra(each=True)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seconds", "https"), [(8.0, True), (60.0, False)])
async def test_nothing_is_lost_doubled_or_too_old(seconds: float, https: bool, tmp_path: Path) -> None:
    port = free_port() if https else 0
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(lossy_link(Internet(port=port)))
        host = "127.0.0.1" if https else link.hub
        store = stack.enter_context(running_object_store(tmp_path / "objects", host))
        servers = GuardedServers(tmp_path / "servers", RUN, host=host)
        servers.nats.start()
        servers.valkey.start()
        url = one_port(stack, tmp_path, link, servers, store, port) if https else store.url
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="sites-"))  # sockets lie below it: it must be short
        sites, model = TwoSites(tmp_path, link, servers, store, temporary), write_model(tmp_path / "model")
        values = sections(tmp_path, model, SHAPE)
        values["run"]["name"] = RUN
        values["weights"] = {"update_weight_transport": "s3", "update_weight_mode": "delta", "object_store_url": url}
        values["weights"] |= {"object_store_allow_http": not https, "push_timeout": 60.0}
        values["bus"] |= {"registry_ttl": 5.0}
        started: list[ChildProcess] = []
        try:
            write_toml(tmp_path, values)
            config = config_reading.load(tmp_path / "run.toml")
            operator = await Bus.connect(servers.nats_url("operator"), "test", inbox=INBOX)
            await runs.create(operator, config, servers.redis_url("operator"), vocabulary(config))
            started = sites.started()
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

            await until(finished, "the run's end", SECONDS, 1.0)
            found = await sites.ledger()
            assert (found.problems, found.steps) == ([], SHAPE.steps)
            assert not [end for end in found.ends.values() if end.startswith("dead")]
            await operator.close()
        finally:
            for process in [*started, *sites.replicas.values()]:
                process.kill()
            servers.nats.stop()
            servers.valkey.stop()


@pytest.mark.extra
@pytest.mark.timeout(1800)
async def test_a_hundred_replicas_join_and_leave(tmp_path: Path) -> None:
    count, at_once = 100, 20
    with running_object_store(tmp_path / "objects", "127.0.0.1") as store, tempfile.TemporaryDirectory(prefix="sites-") as temporary:
        servers = GuardedServers(tmp_path / "servers", RUN, host="127.0.0.1")
        servers.nats.start()
        servers.valkey.start()
        values = sections(tmp_path, write_model(tmp_path / "model"), replace(SHAPE, steps=100_000, eval_interval=100_000))
        values["run"]["name"] = RUN
        values["weights"] = {"update_weight_transport": "s3", "update_weight_mode": "delta", "object_store_url": store.url}
        values["weights"] |= {"object_store_allow_http": True, "push_timeout": 60.0}
        values["bus"] |= {"registry_ttl": 30.0, "lease_duration": 20.0, "ack_wait": 40.0}
        write_toml(tmp_path, values)
        config = config_reading.load(tmp_path / "run.toml")
        operator = await Bus.connect(servers.nats_url("operator"), "test", inbox=INBOX)
        await runs.create(operator, config, servers.redis_url("operator"), vocabulary(config))
        hub = Hub(tmp_path, servers)
        started = hub.started()
        environment = {**os.environ, **servers.environment("rollout"), "PYTHONPATH": str(ROOT), "TMPDIR": temporary}
        words = [sys.executable, "-m", "tests.support.site_crowd", str(tmp_path), str(count), str(at_once)]
        with (tmp_path / "crowd.log").open("wb") as log:
            crowd = subprocess.Popen(words, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:

            async def left() -> bool:
                assert crowd.poll() is None, (tmp_path / "crowd.log").read_text()[-2000:]
                return (tmp_path / "crowd.json").exists()

            await until(left, f"{count} replicas", 1500.0)
            now = (await hub.ledger()).steps
            await hub.trained(now + 3)  # with what those who left had in hand
            assert crowd.stdin is not None
            crowd.stdin.close()
            assert await asyncio.to_thread(crowd.wait, 120) == 0
            found = await hub.ledger()
            assert found.problems == [] and now > count // at_once
            assert not [end for end in found.ends.values() if end.startswith("dead")]
            await operator.close()
        finally:
            crowd.kill()
            for process in started:
                process.kill()
            servers.nats.stop()
            servers.valkey.stop()
