"""Runs agents outside of the process that feeds the engine: functions in worker processes, many in each; each command in a process of its
own, or in a container.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from services.rollout.agents.agent_command import CommandFailed, run_command
from services.rollout.agents.agent_containers import AgentContainers
from services.rollout.agents.agent_program import AgentProgram, environment_of
from shared.config.eval_views import agents
from shared.config.rollout_section import RolloutSection
from shared.config.run_config import RunConfig
from shared.hooks.loading import agent_paths
from shared.process.worker_pool import CallBlocked, WorkerDied, WorkerFailed, WorkerGone, WorkerPool, worker_environment
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.tasks import awake_timeout

COMMANDS_AT_ONCE = 64
"""Default of `agent_concurrency` where some agents are commands: each is a process."""

FEWEST_WORKERS, MOST_WORKERS = 2, 16
"""Bounds of `agent_workers` where the run does not say how many."""

_MODULE = "services.rollout.agents.agent_worker"


class AgentDisturbed(Exception):
    """An agent's process was ended, and another agent in it was the cause, or (``unknown``) nobody knows which one."""

    def __init__(self, unknown: bool) -> None:
        self.unknown = unknown
        super().__init__("its process was ended by another agent, or nobody knows by whom")


def agent_workers(rollout: RolloutSection) -> int:
    """Returns how many processes a rollout service has for agents."""
    share = len(os.sched_getaffinity(0)) // (2 * rollout.rollout_replicas)
    return rollout.agent_workers or min(MOST_WORKERS, max(FEWEST_WORKERS, share))


class AgentRunner:
    """Runs a run's agents. Processes for functions start with `start`.

    Args:
        instance: the service's. asleep: whether its engine sleeps for a trainer: then no agent's time runs.
    """

    def __init__(self, config: RunConfig, instance: str, asleep: Callable[[], bool]) -> None:
        rollout = config.rollout
        self._asleep = asleep if config.trainer.colocate else None
        self._timeout_s = rollout.agent_timeout
        self._environment = worker_environment(config.reward.worker_environment)
        commands = any(isinstance(agent, list) for agent in agents(config).values())
        self._slots = asyncio.Semaphore(rollout.agent_concurrency or (COMMANDS_AT_ONCE if commands else sys.maxsize))
        named = config.reward.worker_environment
        contained = rollout.agent_image and commands
        where = (config.run.name, instance, config.trainer.colocate)
        self._containers = AgentContainers(rollout, named, *where) if contained else None
        self._pool: WorkerPool | None = None
        if agent_paths(config):
            setup = {"config": config.model_dump_json()}
            self._pool = WorkerPool("the agents", agent_workers(rollout), setup, _MODULE, config.reward.worker_environment, self._asleep)
        self._started: asyncio.Task[None] | None = None

    @property
    def slots(self) -> asyncio.Semaphore:
        """Returns the places of agents that run at once; held by whoever calls `run`."""
        return self._slots

    async def start(self) -> None:
        """Starts the processes, once. Raises ConfigError where an agent cannot be imported, or has no image."""
        if self._containers is not None:
            await self._containers.start()
        if self._pool is not None:
            if self._started is None:
                self._started = asyncio.create_task(self._pool.start())
            await asyncio.shield(self._started)

    async def close(self) -> None:
        """Kills the processes."""
        if self._pool is not None:
            await self._pool.close()

    async def run(self, program: AgentProgram, data: dict[str, Any], base_url: str, api_key: str, *, alone: bool = False) -> object:
        """Returns an agent's result. One that is cancelled is ended with all that it started, as far as it gives way.

        Args:
            alone: in a process that has no other agent.

        Raises HookFailed where it gave none, AgentDisturbed.
        """
        try:
            if program.command:
                async with awake_timeout(self._timeout_s, self._asleep):
                    return await self._commanded(program.command, environment_of(base_url, api_key), data)
            return await self._called(program, {"data": data, "base_url": base_url, "api_key": api_key}, alone)
        except (TimeoutError, DeadlineExceeded):
            raise program.failed(f"it did not end within agent_timeout = {self._timeout_s:g} s") from None
        except (CallBlocked, WorkerDied) as error:
            raise program.failed(str(error), disruptive=True) from None
        except (CommandFailed, WorkerFailed, BadMessage) as error:
            raise program.failed(str(error)) from None

    async def _commanded(self, command: Sequence[str], gateway: dict[str, str], data: dict[str, Any]) -> object:
        if self._containers is not None:
            return await self._containers.run(command, self._environment, gateway, data)
        return await run_command(command, self._environment | gateway, data)

    async def _called(self, program: AgentProgram, given: dict[str, Any], alone: bool) -> object:
        assert self._pool is not None
        request = {"verb": "play", "field": program.field, "path": program.function, "of": program.roles, **given}
        try:
            answer = await self._pool.ask(request, "an agent", program.path, self._timeout_s, once=True, alone=alone)
        except WorkerGone as gone:
            raise AgentDisturbed(unknown=gone.cause is None) from None
        return answer.get("reward")
