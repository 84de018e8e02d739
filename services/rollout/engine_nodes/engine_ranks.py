"""One node's part of an engine, as its agent begins and ends it (`shared.nodes.node_agent.RanksOfNode`)."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.launch_command import EngineCommand, EngineMeeting
from shared.nodes.node_decisions import OwnRanks
from shared.runtime import exit_codes

SPAN = 14
"""The ports from the meeting point's on that SGLang takes with data-parallel attention: it adds up to 13 to it."""


class EngineRanks:
    """Starts and ends an engine's processes on this node.

    An engine that ends is no reason to end its services: the attempt counts as one whose nodes have lost each other, and the next begins.

    Args:
        node, nodes: this one's index, and how many there are. secret: returns the first node's, by which the engine's processes know each
            other. command: makes the launch command. log_file: the engine's output.

    Attributes:
        own: how they are. engine: the processes, while there are any.
    """

    def __init__(
        self, node: int, nodes: int, secret: Callable[[], str], command: Callable[[EngineMeeting], EngineCommand], log_file: Path
    ) -> None:
        self._node, self._nodes, self._secret, self._command, self._log_file = node, nodes, secret, command, log_file
        self._asked = False
        self.own = OwnRanks()
        self.engine: EngineProcess | None = None

    def begin(self, number: int, address: str, port: int) -> None:
        """Starts the engine's part for an attempt. Port 0: SGLang's first rank opens the meeting point, at a free one."""
        port = port or free_ports_at(address, SPAN)
        self._asked = False
        self.engine = EngineProcess(self._command(EngineMeeting(self._node, self._nodes, address, port, self._secret())), self._log_file)
        self.own = OwnRanks(number, port, ended=self.own.ended)

    def look(self) -> OwnRanks:
        """Returns how the processes are now."""
        if self.engine is not None and (fault := self.engine.fault()):
            self._end(f"its part of the engine {fault}")
        return self.own

    def ask_to_stop(self) -> None:
        """Ends the engine at once: who wanted its requests has aborted them before."""
        if self.engine is not None:
            self._asked = True
            self.engine.kill()

    def kill(self, reason: str) -> None:
        """Ends the processes at once, and returns when they are gone."""
        if self.look().running:
            self._end(reason)

    def _end(self, reason: str) -> None:
        assert self.engine is not None
        engine, self.engine = self.engine, None
        engine.stop(0)
        code = exit_codes.DONE if self._asked else exit_codes.FAILED
        self.own = OwnRanks(0, ended=self.own.running, code=code, reason=reason, consequence=True)


def free_ports_at(address: str, span: int, tries: int = 64) -> int:
    """Returns the first of so many free ports in a row. Raises OSError where there are none in so many tries."""
    for _ in range(tries):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = int(held.enter_context(socket.create_server((address, 0))).getsockname()[1])
            for port in range(first + 1, first + span):
                held.enter_context(socket.create_server((address, port)))
            return first
    raise OSError(f"{address} has no {span} free ports in a row")
