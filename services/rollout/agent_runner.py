"""Runs agents outside of the process that feeds the engine: functions in worker processes, many in each; each command in a process of its
own, or in a container by the command line of docker or podman.

A container can write to ``/tmp`` alone, in memory; it has no capabilities, gets no privileges, runs as `nobody`, and is on one network. It
is removed when its agent ends, at its deadline, and when it is cancelled. Where the service itself is killed, its successor removes what it
left; and where none comes, each container ends by itself a while after its deadline.

`AgentProgram`, the data that an agent gets of a task, and the rewards in its result are pure.
"""

import asyncio
import base64
import hashlib
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from shared.agents.agent_options import CommandFailed, environment_of, run_command
from shared.config.eval_views import agents, eval_view
from shared.config.rollout_section import RolloutSection
from shared.config.run_config import RunConfig
from shared.hooks import HookFailed, reward_values
from shared.hooks.loading import agent_paths
from shared.process.worker_pool import CallBlocked, WorkerDied, WorkerFailed, WorkerGone, WorkerPool, worker_environment
from shared.rewards.reference import Reference
from shared.runtime.errors import BadMessage, DeadlineExceeded
from shared.runtime.host import HARDENED, RuntimeFailed, check_containers, client_environment, remove_container, remove_labelled
from shared.runtime.tasks import awake_timeout
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task

Rewards = float | dict[str, float]  # a reward, or several by name


@dataclass(frozen=True)
class AgentProgram:
    """An agent. ``field``: where the config names it. ``function``: its path, empty for a ``command``. ``reward_key``: see `reward`.
    ``options``: given to it besides its task. ``roles``: of those that play together; ("",) where one plays."""

    field: str
    function: str
    command: tuple[str, ...]
    reward_key: str | None
    options: Mapping[str, Any]
    roles: tuple[str, ...] = ("",)

    @property
    def path(self) -> str:
        """Returns the function's path, or the command line, for errors."""
        return self.function or " ".join(self.command)

    def failed(self, reason: str, *, disruptive: bool = False) -> HookFailed:
        """Returns the error of a rollout that the agent has no result for; ``disruptive`` as `HookFailed` has it."""
        return HookFailed(self.field, self.path, " ".join(reason.split()), disruptive)

    def reward(self, result: object) -> Rewards | None:
        """Returns the reward in an agent's result: a number, or named ones of which one counts; None: the run's reward scores it. Raises
        HookFailed that says what would be valid."""
        if result is None:
            return None
        try:
            given = reward_values.plain(result)
            reward_values.read(given, self.reward_key)  # the one that counts is there
            return given
        except ValueError as error:
            raise self.failed(f"returned an invalid reward: {error}") from None

    def rewards(self, result: object) -> dict[str, Rewards | None]:
        """Returns the reward of each role in an agent's result, as `reward` does."""
        try:
            return {role: self.reward(given) for role, given in by_role(result, self.roles).items()}
        except ValueError as error:
            raise self.failed(str(error)) from None

    def named(self, reward: Rewards | None, role: str) -> Rewards | None:
        """Returns a role's reward with what counts of it under the role's name, too: it is a metric of its own."""
        if reward is None or not role:
            return reward
        key = self.reward_key or reward_values.REWARD
        return {role: reward, key: reward} if isinstance(reward, float) else {role: reward[key], **reward}


def by_role(result: object, roles: Sequence[str]) -> dict[str, object]:
    """Returns what an agent's result gives to each role: its own where the result is by role, else the same to all. Raises ValueError where
    some roles have one and others none."""
    if not isinstance(result, Mapping) or result.keys().isdisjoint(roles):
        return dict.fromkeys(roles, result)
    if result.keys() != set(roles):
        raise ValueError(f"gave rewards of {', '.join(map(str, result))}; expected one of each role: {', '.join(roles)}")
    return {role: result[role] for role in roles}


def agent_program(config: RunConfig, group: str) -> AgentProgram | None:
    """Returns the agent that plays a group's rollouts, its set's or the run's; None where none does."""
    view = eval_view(config, group)
    seen = config if view is None else view.config
    rollout, key = seen.rollout, seen.reward.reward_key
    section = "rollout" if view is None or not view.own.generators else view.field
    more = (key, rollout.agent_options, tuple(rollout.agent_roles) or ("",))
    if rollout.agent:
        return AgentProgram(f"{section}.agent", rollout.agent, (), *more)
    if rollout.agent_command:
        return AgentProgram(f"{section}.agent_command", "", tuple(rollout.agent_command), *more)
    return None


def agent_data(task: Task, rollout: int, model: str, options: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Returns an agent's data of its rollout: the prompt as messages and as it stands in the file, what belongs to it, the model.
    ``roles``: the key of each, by name; empty where one plays."""
    messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    return {
        "messages": messages,
        "prompt": task.prompt,
        "label": Reference(task.label, task.label_json).value,
        "metadata": task.metadata,
        "model": model,
        "options": options,
        "group": task.group,
        "rollout": rollout,
        "roles": roles,
        "evaluation": is_evaluation(task.group),
    }


SENT: dict[str, Callable[[str], dict[str, Any]]] = {
    "image": lambda encoded: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
    "audio": lambda encoded: {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    "video": lambda encoded: {"type": "video_url", "video_url": {"url": f"data:video/png;base64,{encoded}"}},
}


def with_pictures(messages: Any, pictures: Iterable[bytes]) -> Any:
    """Returns a prompt's messages with what it shows as parts that the gateway takes of OpenAI's clients. ``pictures``: pictures, sounds or
    videos as they are stored, in order."""
    given = (base64.b64encode(one).decode() for one in pictures)

    def shown(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [SENT[part["type"]](next(given)) if part["type"] in SENT else part for part in content]

    return [{**message, "content": shown(message["content"])} for message in messages]


# The seconds beyond ``agent_timeout`` after which a container ends by itself; the second where that does not run while engines sleep.
LEASE_BEYOND_S, LEASE_COLOCATED_S = 60, 86400

NOBODY = "65534:65534"
NOT_STARTED, NOT_RUN, NOT_FOUND, KILLED = 125, 126, 127, 137  # exit codes of the command lines, and that of what SIGKILL has ended


class AgentContainers:
    """The containers of one rollout service. ``named``: variables of the service that agents get. ``run``, ``instance``: of the service; a
    successor has the same. ``colocated``: whether no agent's time runs while engines sleep."""

    def __init__(self, rollout: RolloutSection, named: Sequence[str], run: str, instance: str, colocated: bool = False) -> None:
        self._lease_s = rollout.agent_timeout + (LEASE_COLOCATED_S if colocated else LEASE_BEYOND_S)
        self._rollout, self._named, self._run = rollout, named, run
        owner = "\n".join((socket.gethostname(), str(os.getuid()), os.getcwd(), run, instance))
        self._owner = f"myxo.owner={hashlib.sha256(owner.encode()).hexdigest()[:32]}"

    async def start(self) -> None:
        """Removes what a predecessor left. Raises ConfigError where runtime, image or network are not there."""
        rollout = self._rollout
        await asyncio.to_thread(check_containers, rollout.agent_runtime, str(rollout.agent_image), rollout.agent_network)
        try:
            await asyncio.to_thread(remove_labelled, rollout.agent_runtime, self._owner)
        except RuntimeFailed as error:  # it ends by itself
            structlog.get_logger().warning("agent_containers_not_removed", error=str(error))

    async def run(
        self, command: Sequence[str], environment: Mapping[str, str], gateway: Mapping[str, str], data: Mapping[str, object]
    ) -> object:
        """Returns what the last line of a command says, as `run_command` does. ``environment``: that of the service's commands.
        ``gateway``: the variables that tell where the gateway is. Raises CommandFailed."""
        name, ended = f"myxo-agent-{uuid.uuid4().hex}", False
        played = f"{data.get('group')}/{data.get('rollout')}"
        line = self.command_line(name, played, command, (*gateway, *self._named))
        try:
            result = await run_command(line, {**environment, **client_environment(), **gateway}, data)
            ended = True
            return result
        except CommandFailed as error:
            ended = error.code is not None and error.code >= 0 and error.code != NOT_STARTED
            raise CommandFailed(f"{error}{self._explained(error.code)}", error.code) from None
        finally:
            if not ended:
                try:
                    await asyncio.to_thread(remove_container, self._rollout.agent_runtime, name)
                except RuntimeFailed as error:  # it ends by itself
                    structlog.get_logger().warning("agent_container_not_removed", container=name, error=str(error))

    def command_line(self, name: str, played: str, command: Sequence[str], variables: Sequence[str]) -> list[str]:
        """Returns the command line that runs an agent in a container. ``name``: the container's. ``played``: group and rollout, for whoever
        looks at it. ``variables``: names; values do not belong in a process list."""
        rollout = self._rollout
        memory = str(rollout.agent_memory_bytes)
        options = {
            "name": name,
            "network": rollout.agent_network,
            "user": NOBODY,
            "tmpfs": "/tmp:rw,exec,nosuid,nodev,mode=1777",  # in memory, and counted as such
            "workdir": "/tmp",
            "memory": memory,
            "memory-swap": memory,
            "cpus": f"{rollout.agent_cpus:g}",
            "pids-limit": str(rollout.agent_processes),
            "entrypoint": "timeout",
        }
        words = [word for option, value in options.items() for word in (f"--{option}", value)]
        words += [word for label in (f"myxo.run={self._run}", f"myxo.rollout={played}", self._owner) for word in ("--label", label)]
        words += [word for variable in (*variables, "HOME=/tmp", "TMPDIR=/tmp") for word in ("--env", variable)]
        lease = ("-s", "KILL", f"{self._lease_s:.0f}")
        return [rollout.agent_runtime, "run", "--rm", "--interactive", *HARDENED, *words, str(rollout.agent_image), *lease, *command]

    def _explained(self, code: int | None) -> str:
        runtime, image, memory = self._rollout.agent_runtime, self._rollout.agent_image, self._rollout.agent_memory_bytes
        return {
            NOT_STARTED: f" ({runtime} could not start the container: its words are in the log of the rollout service)",
            NOT_RUN: f" (rollout.agent_image = {image!r} has the command, and cannot run it)",
            NOT_FOUND: f" (rollout.agent_image = {image!r} has no such command, or no `timeout`)",
            KILLED: f" (it was killed; rollout.agent_memory_bytes = {memory} may be too little)",
        }.get(code or 0, "")


COMMANDS_AT_ONCE = 64  # default of `agent_concurrency` where some agents are commands: each is a process
FEWEST_WORKERS, MOST_WORKERS = 2, 16  # bounds of `agent_workers` where the run does not say how many
_MODULE = "services.rollout.function_worker"


class AgentDisturbed(Exception):
    """An agent's process was ended, and another agent in it was the cause, or (``unknown``) no one knows which one."""

    def __init__(self, unknown: bool) -> None:
        self.unknown = unknown
        super().__init__("its process was ended by another agent, or it is not known by which")


def agent_workers(rollout: RolloutSection) -> int:
    """Returns how many processes a rollout service has for agents."""
    share = len(os.sched_getaffinity(0)) // (2 * rollout.rollout_replicas)
    return rollout.agent_workers or min(MOST_WORKERS, max(FEWEST_WORKERS, share))


class AgentRunner:
    """Runs a run's agents. Processes for functions start with `start`. ``instance``: the service's. ``asleep``: whether its engine sleeps
    for a trainer: then no agent's time runs. ``slots``: the places of agents that run at once; held by whoever calls `run`."""

    def __init__(self, config: RunConfig, instance: str, asleep: Callable[[], bool]) -> None:
        rollout = config.rollout
        self._asleep = asleep if config.trainer.colocate else None
        self._timeout_s = rollout.agent_timeout
        self._environment = worker_environment(config.reward.worker_environment)
        commands = any(isinstance(agent, list) for agent in agents(config).values())
        self.slots = asyncio.Semaphore(rollout.agent_concurrency or (COMMANDS_AT_ONCE if commands else sys.maxsize))
        named = config.reward.worker_environment
        contained = rollout.agent_image and commands
        where = (config.run.name, instance, config.trainer.colocate)
        self._containers = AgentContainers(rollout, named, *where) if contained else None
        self._pool: WorkerPool | None = None
        if agent_paths(config):
            setup = {"config": config.model_dump_json(), "verb": "play"}
            self._pool = WorkerPool("the agents", agent_workers(rollout), setup, _MODULE, config.reward.worker_environment, self._asleep)

    async def start(self) -> None:
        """Starts the processes. Raises ConfigError where an agent cannot be imported, or has no image."""
        if self._containers is not None:
            await self._containers.start()
        if self._pool is not None:
            await self._pool.start()

    async def close(self) -> None:
        """Kills the processes."""
        if self._pool is not None:
            await self._pool.close()

    async def run(self, program: AgentProgram, data: dict[str, Any], base_url: str, api_key: str, *, alone: bool = False) -> object:
        """Returns an agent's result. One that is cancelled is ended with all that it started, as far as it gives way. ``alone``: in a
        process that has no other agent. Raises HookFailed where it gave none, AgentDisturbed."""
        try:
            if program.command:
                async with awake_timeout(self._timeout_s, self._asleep):
                    gateway = environment_of(base_url, api_key)
                    if self._containers is not None:
                        return await self._containers.run(program.command, self._environment, gateway, data)
                    return await run_command(program.command, self._environment | gateway, data)
            return await self._called(program, {"data": data, "base_url": base_url, "api_key": api_key}, alone)
        except (TimeoutError, DeadlineExceeded):
            raise program.failed(f"it did not end within agent_timeout = {self._timeout_s:g} s") from None
        except (CommandFailed, WorkerFailed, BadMessage) as error:
            raise program.failed(str(error), disruptive=isinstance(error, CallBlocked | WorkerDied)) from None

    async def _called(self, program: AgentProgram, given: dict[str, Any], alone: bool) -> object:
        assert self._pool is not None
        request = {"verb": "play", "field": program.field, "path": program.function, "of": program.roles, **given}
        try:
            answer = await self._pool.ask(request, "an agent", program.path, self._timeout_s, once=True, alone=alone)
        except WorkerGone as gone:
            raise AgentDisturbed(unknown=gone.cause is None) from None
        return answer.get("reward")
