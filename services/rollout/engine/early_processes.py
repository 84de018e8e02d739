"""Processes that are begun before there is work for them: they import what they will need, and wait to be the process that is started.

What multiprocessing spawns imports everything again. `EarlyProcesses` begins such children beside the imports of this process; when a
process is started whose target is of their module, one of them becomes it. It is given what a spawned child is given, by
multiprocessing's own pickling, over a pair of sockets that has no name and of which nobody else has an end
(`services.rollout.engine.early_child`). Its parent, pid, exit code and sentinel are those of a spawned child.

Where something takes effect in a fresh process alone (another executable, a variable that may be read while modules are imported), and
where the early process is gone, one is spawned as usual; the log tells why. Those that nobody needs end with this process, or before.
"""

import io
import logging
import multiprocessing
import os
import resource
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

from services.rollout.engine import early_child

HAND_OVER_SECONDS = 60.0
"""The deadline for an early process to take its work. It reads when its imports have ended; a small message need not wait for that."""

LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
"""The limits of a process, as for open files, which children inherit: SGLang raises some before it starts them."""

_logger = logging.getLogger(__name__)


class EarlyProcess:
    """A child that imports ``module`` and waits, begun with ``environment``. Raises OSError where it cannot be begun."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module, self.environment, self.begun = module, environment, time.monotonic()
        self.executable = spawn.get_executable()
        self.channel, theirs = socket.socketpair()
        with theirs:
            tracker = resource_tracker.getfd()
            assert tracker is not None  # it is running now
            descriptors = theirs.fileno(), tracker
            program = f"from {early_child.__name__} import wait_for_work; wait_for_work(*{descriptors}, {module!r})"
            arguments = [*util._args_from_interpreter_flags(), "-c", program, "--multiprocessing-fork"]  # type: ignore[attr-defined]
            self.child = subprocess.Popen([self.executable, *arguments], env=environment, pass_fds=descriptors)
        self.send(_pickled(self, spawn.get_preparation_data(module)))

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends bytes and descriptors. Raises OSError: the process is gone, or does not read in time."""
        self.channel.settimeout(HAND_OVER_SECONDS)
        socket.send_fds(self.channel, [len(message).to_bytes(early_child.LENGTH_BYTES, "big")], descriptors)
        self.channel.sendall(message)
        self.channel.settimeout(None)

    def end(self) -> None:
        """Ends the process, which has no work."""
        self.channel.close()
        self.child.kill()
        self.child.wait()


class EarlyPopen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a child, for an early process that becomes it. Raises OSError where that fails."""

    DupFd = early_child.Descriptor  # type: ignore[assignment]
    _fds: list[int]

    def __init__(self, process_object: Any, early: EarlyProcess) -> None:
        self._early = early
        super().__init__(process_object)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_object: Any) -> None:
        early = self._early
        changed = changed_variables(early.environment, os.environ), {limit: resource.getrlimit(limit) for limit in LIMITS}
        early.send(_pickled(self, *changed, spawn.get_preparation_data(process_object.name), process_object), self._fds)
        self.pid, self.sentinel = early.child.pid, early.channel.detach()
        self.finalizer = util.Finalize(self, util.close_fds, [self.sentinel])  # type: ignore[attr-defined]

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        self.returncode = self._early.child.poll() if flag else self._early.child.wait()
        return self.returncode


class EarlyProcesses:
    """Begins a process for each of ``modules``, in the order in which their targets will be started, and has multiprocessing use them.

    Args:
        variables: which will have been set in the environment when the targets are started, unless they are set now.
        late: the names of further variables that may be set until then: they are not read while modules are imported.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], late: Collection[str]) -> None:
        self._expected, self._late, self._imported = variables, late, dict(os.environ)
        self._waiting: list[EarlyProcess] = []
        multiprocessing.set_start_method("spawn", force=True)  # the children are told of it
        try:
            for module in modules:
                self._waiting.append(EarlyProcess(module, {**variables, **os.environ}))
        except OSError as error:
            _logger.warning("No further process is begun early: %r", error)
        self._spawn = context.SpawnProcess._Popen
        context.SpawnProcess._Popen = staticmethod(self._start)  # type: ignore[method-assign,assignment]

    def note_imported(self) -> None:
        """Tells that the environment is now what the imports have made of it, which are those of the early processes."""
        self._imported = dict(os.environ)

    def _start(self, process_object: Any) -> Any:
        module = getattr(process_object._target, "__module__", None)
        while self._waiting and self._waiting[0].module != module:  # the order tells that they are not needed any more
            self._waiting.pop(0).end()
        if self._waiting and (started := self._hand_over(process_object, self._waiting.pop(0))):
            return started
        return self._spawn(process_object)

    def _hand_over(self, process_object: Any, early: EarlyProcess) -> EarlyPopen | None:
        started = None
        try:
            if not (reason := self._refusal(early)):
                started = EarlyPopen(process_object, early)
        except OSError as error:
            reason = repr(error)
        finally:
            if started is None:
                early.end()
        if started is None:
            _logger.warning("A process of %s is spawned, not taken from those begun early: %s", early.module, reason)
        else:
            _logger.info("Process %d, begun %.1f s ago, runs %s", started.pid, time.monotonic() - early.begun, early.module)
        return started

    def _refusal(self, early: EarlyProcess) -> str:
        """Returns why the process must be a fresh one; empty where it need not."""
        if (code := early.child.poll()) is not None:
            return f"the early one has ended with {code}"
        if spawn.get_executable() != early.executable:
            return "it needs another executable"
        changed = changed_variables(early.environment, os.environ)
        by_imports = {name for name in changed if name not in self._expected and self._imported.get(name) == changed[name]}
        telling = sorted(changed.keys() - by_imports - set(self._late))
        return f"variables have changed: {', '.join(telling)}" if telling else ""


def _pickled(child: Any, *parts: Any) -> bytes:
    """Returns the parts, pickled as for a child that is being spawned: its handle tells how descriptors go there."""
    message = io.BytesIO()
    context.set_spawning_popen(child)
    try:
        for part in parts:
            reduction.dump(part, message)
    finally:
        context.set_spawning_popen(None)
    return message.getvalue()


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables that differ, with their values in ``after``; None: it has none."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
