"""The child's side of `services.rollout.engine.early_processes`: it imports a module, waits for its work, and becomes the process of it.

What it unpickles comes over a pair of sockets without a name, which it inherits: only its parent has the other end. It is what any child
that multiprocessing spawns reads from a pipe. When the other end closes before there is work, the child ends, and so it does after
`WAIT_SECONDS`.
"""

import contextlib
import importlib
import io
import os
import pickle
import resource
import socket
import sys
from collections.abc import Iterator
from multiprocessing import process, resource_tracker, spawn
from typing import Any, NoReturn

from shared.runtime.quick_imports import quick_imports

WAIT_SECONDS = 300.0
"""The longest wait for work: the first start of an engine may look up or download a model before it has any."""

LENGTH_BYTES = 8
"""Each message follows its length, in so many bytes, the first being the highest."""

MOST_DESCRIPTORS = 64
"""The most descriptors that go along with a message."""

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
    by now, and the process.
    """
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
