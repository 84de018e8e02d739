"""Begins the processes that an SGLang engine will start before SGLang is imported, so that they import side by side.

What multiprocessing spawns imports everything again. `EarlyProcesses` begins such children beside the imports of this process; when a
process is started whose target is of their module, one of them becomes it. It is given what a spawned child is given, by multiprocessing's
own pickling, over a pair of sockets that has no name and of which no one else has an end. Its parent, pid, exit code and sentinel are those
of a spawned child.

A wrong guess of `early_modules` costs time, not correctness. Where something takes effect in a fresh process alone (another executable, a
variable that may be read while modules are imported), and where the early process is gone, one is spawned as usual; the log says why. Those
that are not needed end with this process, or before.
"""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from multiprocessing import context, popen_spawn_posix, process, reduction, resource_tracker, spawn, util
from typing import Any, NoReturn

from shared.runtime.quick_imports import quick_imports

WAIT_SECONDS = 300.0  # the longest wait for work: the first start of an engine may look up or download a model before it has any
LENGTH_BYTES = 8  # each message follows its length, in so many bytes, the first being the highest
MOST_DESCRIPTORS = 64  # the most descriptors that go along with a message

_received: list[int] = []


class Descriptor:
    """Stands for a descriptor among pickled arguments, by its place among those that came along with the message."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return _received[self._index]


def wait_for_work(handle: int, tracker: int, module: str) -> NoReturn:
    """Runs this process, which inherits the descriptors of its end of the sockets and of multiprocessing's resource tracker.

    Two messages come: what spawned children are prepared with; then the variables that have changed, the limits, that preparation as it is
    by now, and the process."""
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    channel = socket.socket(fileno=handle)
    channel.set_inheritable(False)
    channel.settimeout(WAIT_SECONDS)
    preparation, _ = _receive(channel)
    with _being_spawned():
        spawn.prepare(pickle.loads(preparation))
    with quick_imports():
        importlib.import_module(module)
    message, descriptors = _receive(channel)
    _received.extend(descriptors)
    work = io.BytesIO(message)
    for name, value in pickle.load(work).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for limit, bounds in pickle.load(work).items():
        resource.setrlimit(limit, bounds)
    with _being_spawned():
        spawn.prepare(pickle.load(work))
        process_object = pickle.load(work)
    channel.settimeout(None)
    sys.exit(process_object._bootstrap(channel.detach()))  # the descriptor tells of the parent's end


@contextlib.contextmanager
def _being_spawned() -> Iterator[None]:
    """Has multiprocessing refuse to start processes, as while a spawned child imports its main module."""
    current: Any = process.current_process()
    current._inheriting = True
    try:
        yield
    finally:
        del current._inheriting


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Returns the next message and the descriptors that came along; ends this process where none comes any more."""
    try:
        head, descriptors, _, _ = socket.recv_fds(channel, LENGTH_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        message = bytearray()
        while head and (missing := int.from_bytes(head, "big") - len(message)):
            if not (part := channel.recv(missing)):
                sys.exit(0)
            message += part
    except TimeoutError:
        sys.exit(f"No work has come within {WAIT_SECONDS:g} s for a process that was begun early.")
    except ConnectionError:
        sys.exit(0)
    if not head:
        sys.exit(0)  # the parent has ended, or does not need this process
    return bytes(message), descriptors


# The deadline for an early process to take its work. It reads when its imports have ended; a small message need not wait for that.
HAND_OVER_SECONDS = 60.0

# The limits of a process, as for open files, which children inherit: SGLang raises some before it starts them.
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

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
            program = f"from {__name__} import wait_for_work; wait_for_work(*{descriptors}, {module!r})"
            arguments = [*util._args_from_interpreter_flags(), "-c", program, "--multiprocessing-fork"]  # type: ignore[attr-defined]
            self.child = subprocess.Popen([self.executable, *arguments], env=environment, pass_fds=descriptors)
        self.send(_pickled(self, spawn.get_preparation_data(module)))

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends bytes and descriptors. Raises OSError: the process is gone, or does not read in time."""
        self.channel.settimeout(HAND_OVER_SECONDS)
        socket.send_fds(self.channel, [len(message).to_bytes(LENGTH_BYTES, "big")], descriptors)
        self.channel.sendall(message)
        self.channel.settimeout(None)

    def end(self) -> None:
        """Ends the process, which has no work."""
        self.channel.close()
        self.child.kill()
        self.child.wait()


class EarlyPopen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a child, for an early process that becomes it. Raises OSError where that fails."""

    DupFd = Descriptor  # type: ignore[assignment]
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

    ``variables``: which will have been set in the environment when the targets are started, unless they are set now. ``late``: the names of
    further variables that may be set until then: they are not read while modules are imported."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], late: Collection[str]) -> None:
        self._expected, self._late, self._imported = variables, late, dict(os.environ)
        self._waiting: list[EarlyProcess] = []
        multiprocessing.set_start_method("spawn", force=True)  # it is passed on to the children
        try:
            for module in modules:
                self._waiting.append(EarlyProcess(module, {**variables, **os.environ}))
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
