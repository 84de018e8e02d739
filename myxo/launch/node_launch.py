"""`myxo up` on a node other than the first: its part of trainer, critic and engines alone, until the run has ended."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import structlog
from redis.exceptions import RedisError
from rich.console import Console

from myxo.launch.launcher import LEAVE_SECONDS, POLL_SECONDS, SAVE_SECONDS, STOP_SECONDS, TICK_SECONDS, TRAINER_STOP_SECONDS, publish_events
from myxo.launch.service_plan import ServiceSpec, at_ports, run_service
from myxo.launch.supervisor import FrozenServices, StopReason, Supervisor
from myxo.run.run_access import ANSWER_SECONDS, GivenServers
from myxo.run.run_directory import RunDirectory
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.connection import Bus
from shared.bus.registry import ENGINE_NODE, NODE, Registry
from shared.bus.subjects import Subjects
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.model.final_exports import missing_exports
from shared.runtime import exit_codes
from shared.runtime.addresses import NODE_RANK, RANK_VARIABLES, node_rank
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.runtime.safe_text import say
from shared.store.payload_store import Store


def _nodes(config: RunConfig) -> int:
    """Returns how many nodes the run's trainer or one of its engines has."""
    trainer, engines = config.trainer, 1 if config.debug.trains_only else config.rollout.nodes_per_engine
    return max(trainer.nodes("actor"), trainer.nodes("critic") if config.algorithm.has_critic else 1, engines)


def is_first_node(config: RunConfig, rank: int | None) -> bool:
    """Returns whether all services start on this machine but those of further nodes. ``rank``: as `settle_node_rank` takes it."""
    with contextlib.suppress(ConfigError, AttributeError):  # reported as the rank is settled, or by the checks
        rank = node_rank(nodes, of="the run") if rank is None and (nodes := _nodes(config)) > 1 else rank
    return not rank


def settle_node_rank(config: RunConfig, given: GivenServers, rank: int | None) -> int:
    """Returns the rank of the node that this machine is, and puts it into the environment of the services to start.

    ``rank``: that of ``--node-rank``; None: the environment names it, where the trainer has several nodes. Raises ConfigError.
    """
    if (nodes := _nodes(config)) == 1:
        if rank:
            raise ConfigError("--node-rank", rank, "0; trainer and engines have one node each (trainer.actor_num_nodes, --sglang-nnodes)")
        return 0
    for variable, url in (("NATS_URL", given.nats_url), ("REDIS_URL", given.redis_url)):
        if url is None:
            expected = f"required in the environment: a server that all {nodes} nodes reach, not one of `myxo up`'s own"
            raise ConfigError(variable, None, expected)
    if rank is not None:
        os.environ[NODE_RANK] = str(rank)
    elif not any(os.environ.get(variable) for variable in RANK_VARIABLES):
        raise ConfigError("--node-rank", None, f"0 to {nodes - 1}, on each of the {nodes} nodes another one")
    os.environ[NODE_RANK] = str(settled := node_rank(nodes, of="the run"))
    return settled


def node_plan(config: RunConfig, nats_url: str, rank: int) -> list[ServiceSpec]:
    """Returns the services of a node other than the first: its part of each role, and of each engine, that has so many.

    Raises ConfigError where it has too few GPUs for them.
    """
    trainer, rollout = config.trainer, config.rollout
    roles = {"actor": "trainer", "critic": "critic"} if config.algorithm.has_critic else {"actor": "trainer"}
    specs, free, on_gpus = [], iter(devices.visible_gpus()), devices.resolve(trainer.train_device) == "cuda"
    for role, service in roles.items():
        if rank >= trainer.nodes(role):
            continue
        instance, share, own = f"{service}-node-{rank}", trainer.ranks_per_node(role), dict[str, str]()
        if (trainer.colocate or len(roles) > 1 or rollout.nodes_per_engine > rank) and on_gpus:
            own[devices.VISIBLE] = _next_gpus(free, share, f"trainer.{role}_num_gpus_per_node", rank)
        specs.append(run_service(config, nats_url, service, instance, own, service=NODE))
    if trainer.colocate:  # engines share the GPUs of the node's part of the trainer
        shared = devices.visible_gpus()[: trainer.ranks_per_node("actor")]
        for place, (index, part) in enumerate(devices.colocated_engines(config, rank)):
            own = {devices.VISIBLE: ",".join(devices.shared_gpus(config, shared, place))} if on_gpus else {}
            engine, further = f"rollout-{index}", {"service": ENGINE_NODE, "name": f"rollout-{index}-node-{part}"} if part else {}
            specs.append(run_service(config, nats_url, "rollout", engine, {**own, NODE_RANK: str(part)}, **further))
        return at_ports(specs)
    for index in range(rollout.rollout_replicas if rank < rollout.nodes_per_engine else 0):
        engine, share, own = f"rollout-{index}", rollout.rollout_num_gpus_per_engine // rollout.nodes_per_engine, {}
        if devices.resolve(rollout.rollout_device) == "cuda":
            own[devices.VISIBLE] = _next_gpus(free, share, "rollout.rollout_num_gpus_per_engine", rank)
        specs.append(run_service(config, nats_url, "rollout", engine, own, service=ENGINE_NODE, name=f"{engine}-node-{rank}"))
    return at_ports(specs)


def _next_gpus(free: Iterator[str], share: int, field: str, rank: int) -> str:
    """Returns the next GPUs of this machine, as CUDA_VISIBLE_DEVICES names them. Raises ConfigError where it has too few."""
    found = list(itertools.islice(free, share))
    if len(found) < share:
        left = f"{len(found)} of them at most: node {rank} has no more of the {len(devices.visible_gpus())} that it shows"
        raise ConfigError(field, share, left)
    return ",".join(found)


class NodeLaunch:
    """One launch on one node. ``given``: the servers of all nodes, which `settle_node_rank` has asked for."""

    def __init__(self, config: RunConfig, directory: RunDirectory, given: GivenServers, rank: int, console: Console) -> None:
        self._config, self._directory, self._rank, self._console = config, directory, rank, console
        self._nats_url, self._redis_url = given.nats_url or "", given.redis_url or ""
        self._signals: list[signal.Signals] = []
        self._away, self._steps = float("-inf"), 0
        self._phase: str | None = runs.RUNNING
        self._frozen = FrozenServices(config.bus)
        self._log = structlog.get_logger()

    async def run(self) -> int:
        """Runs until the run has ended or this node is asked to stop. Returns the exit code. Raises ConfigError, DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._signals.append, signum)
        run = self._config.run.name
        name, inbox = f"{run}/node-{self._rank}", Subjects(run).inbox("operator")
        bus, store = await Bus.connect(self._nats_url, name, inbox=inbox), Store(self._redis_url)
        async with contextlib.aclosing(bus), contextlib.aclosing(store):
            if not await self._run_is_there(bus):
                return 128 + self._signals[0]
            frozen = await runs.refuse_differences(bus, self._config) or self._config  # the first node may have counted engines by its GPUs
            self._config = self._config.with_fields(rollout={"rollout_replicas": frozen.rollout.rollout_replicas})
            specs = node_plan(self._config, self._nats_url, self._rank)
            supervisor = Supervisor(specs, self._directory.log, excused=lambda since: self._away >= since)
            self._console.print(f"Node {self._rank}: {', '.join(spec.instance for spec in specs)} started.", soft_wrap=True)
            try:
                stopped = await self._until_end(bus, store, supervisor)
                if self._phase == runs.FINISHED and stopped is None:
                    await self._wait(supervisor.running, LEAVE_SECONDS)
            finally:
                supervisor.terminate()
                await self._wait(supervisor.running, SAVE_SECONDS if self._signals else TRAINER_STOP_SECONDS + STOP_SECONDS)
                supervisor.kill()
            if stopped is not None:
                say(f"myxo: {stopped.lines[-1] if stopped.bad_input and stopped.lines else stopped.reason}")
                return exit_codes.BAD_INPUT if stopped.bad_input else exit_codes.RUN_FAILED
            if self._signals:
                return 128 + self._signals[0]
            return exit_codes.DONE if self._phase == runs.FINISHED else exit_codes.RUN_FAILED

    async def _run_is_there(self, bus: Bus) -> bool:
        """Waits until the run is on the bus, with something to do: final weights, too. Returns False where this node was asked to stop."""
        run, patience = self._config.run.name, self._config.trainer.node_timeout
        end = time.monotonic() + patience
        self._console.print(f"Node {self._rank} of run {run} waits for the first node.", soft_wrap=True)
        while not self._signals:
            with contextlib.suppress(runs.NoSuchRun):
                lacks = bool(missing_exports(self._config)) and await runs.is_finished(bus, self._config)
                if await runs.load(bus, run) and (lacks or await runs.phase(bus, run) == runs.RUNNING):
                    return True
            if time.monotonic() > end:
                raise DeadlineExceeded(f"run {run}", "node 0 (`myxo up` there)", patience, "this node stops")
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def _until_end(self, bus: Bus, store: Store, supervisor: Supervisor) -> StopReason | None:
        """Waits until the run has ended, and trainers of a finished one have left; while final weights are missing, a dead one is started
        again. Returns the reason where one is given up."""
        end, stopped = float("inf"), None
        while not self._signals and self._phase != runs.FAILED and time.monotonic() < end:
            await self._look(bus, store, supervisor)
            finished = self._phase == runs.FINISHED
            at_work = not finished or bool(missing_exports(self._config))
            if at_work:
                stopped = supervisor.tick(time.monotonic(), self._steps, finished=finished)
            if stopped or (finished and supervisor.trainers_left()):
                break
            if finished:
                limit = time.monotonic() + self._config.trainer.collective_timeout * at_work + LEAVE_SECONDS
                end = limit if supervisor.restarted else min(end, limit)
            await asyncio.sleep(POLL_SECONDS)
        return stopped

    async def _look(self, bus: Bus, store: Store, supervisor: Supervisor) -> None:
        """Notes the run's phase and its trained steps; while the bus is away, they are as before."""
        run = self._config.run.name
        try:
            await store.ping(deadline=ANSWER_SECONDS)
        except (RedisError, *BUS_ERRORS) as error:
            self._note_away(error)
        try:
            registry = Registry(bus, run)
            statuses = [status for kind in (NODE, ENGINE_NODE, "rollout") for status in await registry.alive(kind)]
            supervisor.note_ready(statuses)
            self._frozen.listen(supervisor, statuses)
            await publish_events(bus, run, supervisor.restarted)
            self._phase, self._steps = await runs.phase(bus, run), await runs.trained_steps(bus, run)
        except BUS_ERRORS as error:
            self._frozen.heartbeats.pause()
            self._note_away(error)

    def _note_away(self, error: BaseException) -> None:
        self._away = time.monotonic()
        self._log.warning("servers_away", error=str(error) or type(error).__name__)

    async def _wait(self, awaited: Callable[[], bool], seconds: float) -> None:
        signals, end = len(self._signals), time.monotonic() + seconds
        while awaited() and time.monotonic() < end and len(self._signals) == signals:
            await asyncio.sleep(TICK_SECONDS)
