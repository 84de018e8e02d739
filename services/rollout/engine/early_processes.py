"""Begins the processes that an SGLang engine will start before SGLang is imported, so that they import side by side.

What multiprocessing spawns imports everything again. `EarlyProcesses` spawns such children beside the imports of this process, with an
`EarlyWork` in the place of a process: it imports a module and waits. When a process is started whose target is of that module, one of them
is sent it, by multiprocessing's own pickling, over a pair of sockets that has no name and of which no one else has an end.

A wrong guess of `early_modules` costs time, not correctness. Where something takes effect in a fresh process alone (another executable, a
variable that may be read while modules are imported), and where the early process is gone, one is spawned as usual; the log says why. Those
that are not needed end with this process, or before.
"""

import importlib
import io
import logging
import multiprocessing
import os
import pickle
import resource
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from multiprocessing import context, popen_spawn_posix, reduction, spawn
from multiprocessing.connection import Connection
from typing import Any

from shared.runtime import quick_imports

WAIT_SECONDS = 300.0  # the longest wait for work: the first start of an engine may look up or download a model before it has any

# The deadline for an early process to take its work. It reads when its imports have ended; a small message need not wait for that.
HAND_OVER_SECONDS = 60

# The limits of a process, as for open files, which children inherit: SGLang raises some before it starts them.
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_logger = logging.getLogger(__name__)
_received: list[int] = []


class Descriptor:
    """Stands for a descriptor among pickled arguments, by its place among those that follow the message."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _received[self._index]


class EarlyWork:
    """What an early process is spawned with: it imports ``module``, waits at ``channel`` for a process, and becomes it."""

    def __init__(self, module: str, channel: "Connection[Any, Any]") -> None:
        self._name, self._module, self._channel = module, module, channel

    def _bootstrap(self, parent_sentinel: int) -> object:
        with quick_imports():
            importlib.import_module(self._module)
        if not self._channel.poll(WAIT_SECONDS):
            sys.exit(f"No work has come within {WAIT_SECONDS:g} s for a process that was begun early.")
        try:
            changed, limits, descriptors, pickled = self._channel.recv()
            _received.extend(reduction.recv_handle(self._channel) for _ in range(descriptors))
        except (EOFError, ConnectionError):
            sys.exit(0)  # the parent has ended, or does not need this process
        for name, value in changed.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for limit, bounds in limits.items():
            resource.setrlimit(limit, bounds)
        return pickle.loads(pickled)._bootstrap(parent_sentinel)


class EarlyPopen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a child that is begun early. ``environment``: this process's, and more. Raises OSError."""

    _fds: list[int]

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.module, self.environment, self.begun, self.executable = module, environment, time.monotonic(), spawn.get_executable()
        self.channel, theirs = multiprocessing.Pipe()
        missing = {name: value for name, value in environment.items() if name not in os.environ}
        os.environ.update(missing)
        try:
            with closing(theirs):
                super().__init__(EarlyWork(module, theirs))  # type: ignore[arg-type]
        finally:
            for name in missing:
                del os.environ[name]

    def become(self, process_object: Any) -> None:
        """Has the child be a process. Raises OSError: it is gone, or does not read in time."""
        setattr(self, "DupFd", Descriptor)  # noqa: B010  # a class attribute by its type
        self._fds = []
        message = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(process_object, message)
        finally:
            context.set_spawning_popen(None)
        with socket.socket(fileno=os.dup(self.channel.fileno())) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", HAND_OVER_SECONDS, 0))
        limits = {limit: resource.getrlimit(limit) for limit in LIMITS}
        self.channel.send((changed_variables(self.environment, os.environ), limits, len(self._fds), message.getvalue()))
        for descriptor in self._fds:
            reduction.send_handle(self.channel, descriptor, self.pid)
        self.channel.close()

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1 if "DupFd" in vars(self) else fd

    def end(self) -> None:
        """Ends the process, which has no work."""
        self.channel.close()
        self.kill()
        self.wait()


class EarlyProcesses:
    """Begins a process for each of ``modules``, in the order in which their targets will be started, and has multiprocessing use them.

    ``variables``: which will have been set in the environment when the targets are started, unless they are set now. ``late``: the names of
    further variables that may be set until then: they are not read while modules are imported."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], late: Collection[str]) -> None:
        self._expected, self._late, self._imported = variables, late, dict(os.environ)
        self._waiting: list[EarlyPopen] = []
        multiprocessing.set_start_method("spawn", force=True)  # it is passed on to the children
        try:
            for module in modules:
                self._waiting.append(EarlyPopen(module, {**variables, **os.environ}))
        except OSError as error:
            _logger.warning("No further process is begun early: %r", error)
        self._spawn = context.SpawnProcess._Popen
        context.SpawnProcess._Popen = staticmethod(self._start)  # type: ignore[method-assign,assignment]

    def note_imported(self) -> None:
        """Reports that the environment is now what the imports have made of it, which are those of the early processes."""
        self._imported = dict(os.environ)

    def _start(self, process_object: Any) -> Any:
        module = getattr(process_object._target, "__module__", None)
        while self._waiting and self._waiting[0].module != module:  # the order tells that they are not needed any more
            self._waiting.pop(0).end()
        if self._waiting and self._hand_over(process_object, early := self._waiting.pop(0)):
            return early
        return self._spawn(process_object)

    def _hand_over(self, process_object: Any, early: EarlyPopen) -> bool:
        taken = False
        try:
            if not (reason := self._refusal(early)):
                early.become(process_object)
                taken = True
        except OSError as error:
            reason = repr(error)
        finally:
            if not taken:
                early.end()
        if taken:
            _logger.info("Process %d, begun %.1f s ago, runs %s", early.pid, time.monotonic() - early.begun, early.module)
        else:
            _logger.warning("A process of %s is spawned, not taken from those begun early: %s", early.module, reason)
        return taken

    def _refusal(self, early: EarlyPopen) -> str:
        """Returns why the process must be a fresh one; empty where it need not."""
        if (code := early.poll()) is not None:
            return f"the early one has ended with {code}"
        if spawn.get_executable() != early.executable:
            return "it needs another executable"
        changed = changed_variables(early.environment, os.environ)
        by_imports = {name for name in changed if name not in self._expected and self._imported.get(name) == changed[name]}
        telling = sorted(changed.keys() - by_imports - set(self._late))
        return f"variables have changed: {', '.join(telling)}" if telling else ""


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables that differ, with their values in ``after``; None: it has none."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# Flags that set sizes, each with its other names.
TENSOR = ("tp-size", "tp", "tensor-parallel-size")
PIPELINE = ("pp-size", "pp", "pipeline-parallel-size")
DATA = ("dp-size", "dp", "data-parallel-size")
NODES = ("nnodes",)


def engine_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a command line without their dashes, each with the first of its values, or an empty string."""
    found = {}
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else "" if following.startswith("--") else following
    return found


def flag_number(flags: Mapping[str, str], names: Sequence[str], default: int = 1) -> int:
    """Returns the number that a flag gives, under any of its names. Raises ValueError for what is none."""
    return next((int(flags[name]) for name in names if name in flags), default)


SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"

# What SGLang sets for its processes, unless flags ask for something else. Some are read while its modules are imported.
EXPECTED_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUTE_DSL_LOG_LEVEL": "30",
    "CUTE_DSL_LOG_TO_CONSOLE": "1",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    "TRTLLM_ENABLE_PDL": "1",
}

# What SGLang sets only after it has read its flags, and reads, or lets NCCL read, only when an engine's process runs.
LATE_VARIABLES = frozenset(
    {
        "CUDA_MODULE_LOADING",  # "AUTO" from SGLang 0.5.16, "LAZY" from torch: the same since CUDA 12.2
        "NCCL_ALGO",
        "NCCL_CUMEM_ENABLE",
        "NCCL_GRAPH_MIXING_SUPPORT",
        "NCCL_GRAPH_REGISTER",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NVLS_ENABLE",
        "SGLANG_OPT_FP8_WO_A_GEMM",  # read by one model's module, and models' modules are imported by running schedulers
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2",
        "SGLANG_RUN_ID",
    }
)

# The flags with which no process can be begun early.
OTHERWISE = frozenset(
    {
        "config",  # a file that may say anything
        "elastic-ep-join-mode",  # a controller starts the schedulers, as with data parallelism
        "enable-memory-saver",  # it must be loaded before anything else
        "encoder-only",
        "grpc-mode",
        "numa-node",  # another executable binds memory to the node
        "smg-grpc-mode",
        "use-ray",
    }
)


def early_modules(arguments: Sequence[str]) -> list[str]:
    """Returns the modules of the processes that SGLang will start on this node, in their order; none where that is not known.
    ``arguments``: the flags of ``sglang.launch_server``."""
    flags = engine_flags(arguments)
    try:
        tensor, pipeline, data, nodes = (flag_number(flags, names) for names in (TENSOR, PIPELINE, DATA, NODES))
        rank, detokenizers = flag_number(flags, ("node-rank",), 0), flag_number(flags, ("detokenizer-worker-num",))
    except ValueError:
        return []  # SGLang reports it
    if OTHERWISE & flags.keys() or data > 1 or nodes < 1:
        return []
    schedulers = max(tensor * pipeline // nodes, 1)
    return [SCHEDULER] * schedulers + ([DETOKENIZER] if rank == 0 and detokenizers == 1 else [])
