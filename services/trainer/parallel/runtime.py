"""The process group, its split into parallel groups, and the plain data that ranks exchange besides tensors.

One process is one rank. torchrun (or another launcher) sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
``MASTER_ADDR`` and ``MASTER_PORT``; without them the process is a world of one and opens no port. Every collective has the
group's deadline, and :func:`deadline` turns its timeout into an error that names the awaited step.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.trainer.parallel import DEVICE_TYPE
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import DeadlineExceeded, MyxoError


class PeerLost(MyxoError):
    """Another rank went away in the middle of a collective."""


class PeerFailed(MyxoError):
    """Another rank reported an error in a step that all ranks take together; that rank raises the cause."""


class ParallelGroups(Protocol):
    """The parallel groups of a backend; a module with these functions is one."""

    def form(self, layout: ParallelLayout, timeout_seconds: float) -> None:
        """Forms the groups; a collective of all ranks."""

    def leave(self) -> None:
        """Ends them; models of them are of no use afterwards."""

    def seed(self, seed: int) -> None:
        """Seeds the random streams that ranks of a model share or must not share."""

    def random_states(self) -> dict[str, Any]:
        """Returns the states of these streams, as a checkpoint holds them."""

    def set_random_states(self, states: Mapping[str, Any]) -> None:
        """Takes them from a checkpoint's."""

    def data_parallel(self) -> dist.ProcessGroup:
        """Returns the ranks that hold the same part of the model, and train on other samples than this one."""


_timeout_seconds = 0.0
_formed: tuple[ParallelLayout, float, ParallelGroups] | None = None


def device() -> torch.device:
    """Returns the device of this rank."""
    if DEVICE_TYPE == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_seconds() -> float:
    """Returns how long a rank waits for the others."""
    return _timeout_seconds


def start(layout: ParallelLayout, seed: int, timeout_seconds: float, groups: ParallelGroups) -> None:
    """Joins the other ranks and forms the parallel groups.

    A process group that exists already is used as it is. Models of one process (an actor, its reference, a critic) share
    their groups as long as they have the same layout; another layout forms new groups, and earlier models are then of no use.

    Args:
        layout: checked against the world size. seed: of the model's random streams (dropout, initialisation).
        timeout_seconds: how long any collective may wait for the other ranks. groups: the backend's.

    Raises:
        ConfigError: the layout does not divide the world. DeadlineExceeded: the other ranks did not come.
    """
    global _timeout_seconds, _formed
    _timeout_seconds = timeout_seconds
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    for problem in layout.world_problems(world_size):
        raise problem
    if not dist.is_initialized():
        with deadline(f"the meeting of {world_size} trainer ranks"):
            _join(world_size, timedelta(seconds=timeout_seconds))
    if _formed != (layout, timeout_seconds, groups):
        leave_groups()
        with deadline("the forming of the parallel groups"):
            groups.form(layout, timeout_seconds)
        _formed = (layout, timeout_seconds, groups)
    torch.manual_seed(seed)
    groups.seed(seed)


def make_deterministic() -> None:
    """Has every operation of this process give the same bits in every run, before the first one on a GPU.

    A kernel that has no such form is named in a warning of PyTorch's and runs as it is. On CPUs this changes next to nothing.
    """
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if DEVICE_TYPE == "cuda":
        torch.backends.cudnn.benchmark = False


# Environment that deterministic runs need; what the user has set stays
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # otherwise cuBLAS chooses its order of addition
    "NCCL_ALGO": "Ring",  # fixes the order of ranks in sums; Megatron refuses NCCL's own choice of the algorithm
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def leave_groups() -> None:
    """Leaves the parallel groups, but not the world; models of them are of no use afterwards."""
    global _formed
    formed, _formed = _formed, None
    if formed is not None:
        formed[2].leave()


def _join(world_size: int, timeout: timedelta) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "nccl" if DEVICE_TYPE == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def stop() -> None:
    """Leaves the groups and the world; a later :func:`start` forms new ones."""
    leave_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Returns the index of this process among all of the job's."""
    return int(dist.get_rank())


def data_parallel() -> tuple[int, int]:
    """Returns this rank's index among the replicas of the model, and their number."""
    group = groups().data_parallel()
    return group.rank(), group.size()


def groups() -> ParallelGroups:
    """Returns the backend's parallel groups."""
    assert _formed is not None  # `start` was called
    return _formed[2]


@contextlib.contextmanager
def deadline(what: str) -> Iterator[None]:
    """Turns a failed collective of the body into an error that names the common step.

    Args:
        what: the common step, for the error's text.

    Raises:
        DeadlineExceeded: a collective ran into the group's timeout. PeerLost: another rank's connection broke.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        text = str(error).lower()
        next_action = "this rank stops; restart all ranks from the newest checkpoint"
        if "timed out" in text or "timeout" in text:
            raise DeadlineExceeded(what, "the other trainer ranks", _timeout_seconds, next_action) from error
        if "connection closed" in text or "connection reset" in text or "broken pipe" in text or "nccl error" in text:
            raise PeerLost(f"a trainer rank went away during {what}; {next_action}") from error
        raise


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Makes a step fail on all ranks if it fails on one, so that no rank waits for one that has given up.

    The body must not leave other ranks inside a collective when it raises.

    Raises:
        PeerFailed: on the ranks where the body went well, if it did not on another. Else what the body raised.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = failure is not None
    try:
        with deadline(what):
            failed = anywhere(failed)
    except MyxoError:
        if failure is None:
            raise
    if failure is not None:
        raise failure
    if failed:
        raise PeerFailed(f"{what} failed on another trainer rank; its log names the cause")


def anywhere(condition: bool) -> bool:
    """Returns whether ``condition`` holds on a rank. A collective of all ranks."""
    found = torch.tensor([float(condition)], device=device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns ``value`` of every rank, in rank order, on every rank. JSON, since pickles of received bytes are not read here.

    Args:
        group: of gloo, to gather over; all ranks' own if None.
    """
    target = device() if group is None else torch.device("cpu")
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(target)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=target)
    sizes[dist.get_rank(group)] = encoded.numel()
    dist.all_reduce(sizes, group=group)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=target)
    mine[: encoded.numel()] = encoded
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(everyone, sizes.tolist(), strict=True)]


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory. From a GPU it is complete once the current stream is through."""
    if DEVICE_TYPE == "cpu":
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple that is not below a value."""
    return math.ceil(value / multiple) * multiple


def sum_over_data_parallel(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sum of arrays of one shape over the data-parallel ranks, on each of them: float64, exact for integers below 2^53."""
    total = torch.from_numpy(values.copy()).to(device())
    with deadline("a sum over the data-parallel ranks"):
        dist.all_reduce(total, group=groups().data_parallel())
    return total.cpu().numpy()
