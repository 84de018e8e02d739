"""The process group, its split into parallel groups, and the plain data that ranks exchange besides tensors.

One process is one rank. torchrun (or another launcher) sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
``MASTER_ADDR`` and ``MASTER_PORT``; without them the process is a world of one and opens no port. Every collective has the
group's deadline, and :func:`deadline` turns its timeout into an error that names the awaited step.
"""

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from numpy.typing import NDArray

from services.trainer.megatron import DEVICE_TYPE
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.errors import DeadlineExceeded, MyxoError


class PeerLost(MyxoError):
    """Another rank went away in the middle of a collective."""


class PeerFailed(MyxoError):
    """Another rank reported an error in a step that all ranks take together; that rank raises the cause."""


_timeout_seconds = 0.0
_formed: tuple[ParallelLayout, float] | None = None


def device() -> torch.device:
    """Returns the device of this rank."""
    if DEVICE_TYPE == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_seconds() -> float:
    """Returns how long a rank waits for the others."""
    return _timeout_seconds


def start(layout: ParallelLayout, seed: int, timeout_seconds: float) -> None:
    """Joins the other ranks and forms the parallel groups.

    A process group that exists already is used as it is. Models of one process (an actor, its reference, a critic) share
    their groups as long as they have the same layout; another layout forms new groups, and earlier models are then of no use.

    Args:
        layout: checked against the world size. seed: of the model's random streams (dropout, initialisation).
        timeout_seconds: how long any collective may wait for the other ranks.

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
    if _formed != (layout, timeout_seconds):
        _form_groups(layout, timeout_seconds)
        _formed = (layout, timeout_seconds)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


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


def _form_groups(layout: ParallelLayout, timeout_seconds: float) -> None:
    leave_groups()
    with deadline("the forming of the parallel groups"):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.chunks > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor_size,
            create_gloo_process_groups=False,
            # declared an integer, but handed to timedelta(minutes=...) as it is
            distributed_timeout_minutes=timeout_seconds / 60,
        )


def leave_groups() -> None:
    """Leaves the parallel groups, but not the world; models of them are of no use afterwards.

    Megatron forgets its groups without ending them: each would keep threads of gloo's, which wake up a hundred times a second.
    """
    global _formed
    _formed = None
    if not parallel_state.model_parallel_is_initialized():
        return
    groups = list(parallel_state._global_process_group_list or [])
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    groups, group = [], None
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # its keys are the embeddings, which hold the ranks that share a sequence
    for _ in range(2):  # models are in reference cycles and hold their groups; objects that the first round frees hold more of them
        gc.collect()


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
    return int(parallel_state.get_data_parallel_rank()), int(parallel_state.get_data_parallel_world_size())


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
    return math.ceil(value / multiple) * multiple


def sum_over_data_parallel(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sum of arrays of one shape over the data-parallel ranks, on each of them: float64, exact for integers below 2^53."""
    total = torch.from_numpy(values.copy()).to(device())
    with deadline("a sum over the data-parallel ranks"):
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu().numpy()
