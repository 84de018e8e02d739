"""Runs agents that are commands, each in a container of its own, by the command line of docker or podman.

A container can write to ``/tmp`` alone, in memory; it has no capabilities, gets no privileges, is nobody, and is on one network. It is
removed when its agent ends, at its deadline, and when it is cancelled. Where the service itself is killed, its successor removes what it
left; and where none comes, each container ends by itself a while after its deadline.
"""

import asyncio
import hashlib
import os
import socket
import uuid
from collections.abc import Mapping, Sequence

import structlog

from services.rollout.agents.agent_command import CommandFailed, run_command
from shared.config.rollout_section import RolloutSection
from shared.runtime.errors import ConfigError
from shared.runtime.host import HARDENED, RuntimeFailed, client_environment, remove_container, remove_labelled, runtime_answer

LEASE_BEYOND_S, LEASE_COLOCATED_S = 60, 86400
"""The seconds beyond ``agent_timeout`` after which a container ends by itself; the second where that does not run while engines sleep."""

NOBODY = "65534:65534"

NOT_STARTED, NOT_RUN, NOT_FOUND, KILLED = 125, 126, 127, 137
"""Exit codes of the command lines, and that of what SIGKILL has ended."""


class AgentContainers:
    """The containers of one rollout service.

    Args:
        named: variables of the service that agents get. run, instance: of the service; a successor has the same.
        colocated: whether no agent's time runs while engines sleep.
    """

    def __init__(self, rollout: RolloutSection, named: Sequence[str], run: str, instance: str, colocated: bool = False) -> None:
        self._lease_s = rollout.agent_timeout + (LEASE_COLOCATED_S if colocated else LEASE_BEYOND_S)
        self._rollout, self._named, self._run = rollout, named, run
        owner = "\n".join((socket.gethostname(), str(os.getuid()), os.getcwd(), run, instance))
        self._owner = f"myxo.owner={hashlib.sha256(owner.encode()).hexdigest()[:32]}"

    async def start(self) -> None:
        """Removes what a predecessor left. Raises ConfigError where runtime, image or network are not there."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        rollout = self._rollout
        looked_at = {"agent_runtime": ("version", rollout.agent_runtime), "agent_image": ("image", rollout.agent_image)}
        looked_at["agent_network"] = ("network", rollout.agent_network)
        for field, (kind, value) in looked_at.items():
            words = (kind,) if kind == "version" else (kind, "inspect", str(value))
            try:
                runtime_answer(rollout.agent_runtime, *words)
            except RuntimeFailed as error:
                raise ConfigError(f"rollout.{field}", value, f"one that is there where rollout services run: {error}") from None
        try:
            remove_labelled(rollout.agent_runtime, self._owner)
        except RuntimeFailed as error:  # it ends by itself
            structlog.get_logger().warning("agent_containers_not_removed", error=str(error))

    async def run(
        self, command: Sequence[str], environment: Mapping[str, str], gateway: Mapping[str, str], data: Mapping[str, object]
    ) -> object:
        """Returns what the last line of a command says, as `run_command` does.

        Args:
            environment: that of the service's commands. gateway: the variables that tell where the gateway is.

        Raises CommandFailed.
        """
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
        """Returns the command line that runs an agent in a container.

        Args:
            name: the container's. played: group and rollout, for whoever looks at it. variables: names; values do not belong in a process
                list.
        """
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
        """Returns what an exit code means of a container."""
        runtime, image, memory = self._rollout.agent_runtime, self._rollout.agent_image, self._rollout.agent_memory_bytes
        return {
            NOT_STARTED: f" ({runtime} could not start the container: its words are in the log of the rollout service)",
            NOT_RUN: f" (rollout.agent_image = {image!r} has the command, and cannot run it)",
            NOT_FOUND: f" (rollout.agent_image = {image!r} has no such command, or no `timeout`)",
            KILLED: f" (it was killed; rollout.agent_memory_bytes = {memory} may be too little)",
        }.get(code or 0, "")
