"""The limit of a link: broadcasts of 1 GiB from one GPU to another and nothing else, in processes of their own, with a deadline.

``python -m benchmarks.raw_broadcast [--peer GPU]`` prints GB/s of the best of six rounds, as JSON. ``--device cpu`` shows that it works.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

BYTES, TIMES, ROUNDS = 2**30, 8, 6
SECONDS = {"cuda": 120.0, "cpu": 600.0}
"""The deadline of the whole measurement, by device: after it both processes are killed. CPUs may be busy with other tests."""

TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables of a torchrun whose ranks these processes are not."""


def raw_gb_per_s(peer: int, device: str = "cuda") -> float:
    """Returns GB/s from GPU 0 to GPU ``peer``. Raises RuntimeError, with what the processes said, where they fail or take too long."""
    seconds = SECONDS[device]
    with tempfile.TemporaryDirectory() as directory:
        here = [sys.executable, "-m", "benchmarks.raw_broadcast", "--device", device, "--store", f"{directory}/store"]
        own = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": own}
        ranks = [subprocess.Popen([*here, "--rank", str(rank), "--gpu", str(gpu)], **pipes) for rank, gpu in enumerate((0, peer))]
        try:
            end = time.monotonic() + seconds
            said = [rank.communicate(timeout=max(0.1, end - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"broadcasts from GPU 0 to GPU {peer} did not end within {seconds:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"broadcasts from GPU 0 to GPU {peer} failed: {''.join(errors for _, errors in said)[-2000:]}")
    return float(json.loads(said[0][0]))


def broadcast_rank(rank: int, gpu: int, store: str, device: str) -> float:
    """Runs one of the two processes. Returns GB/s as it sees them."""
    import torch
    import torch.distributed as dist

    on_gpu = device == "cuda"
    where = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    # NCCL's barrier takes the GPU numbered as its rank, unless the group knows better: with another peer than GPU 1 it would never end
    bound: dict[str, Any] = {"device_id": where} if on_gpu else {}
    backend, meeting = "nccl" if on_gpu else "gloo", dist.FileStore(store, 2)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS[device]), **bound)
    size, times = (BYTES, TIMES) if on_gpu else (BYTES // 256, 2)
    flat, best = torch.empty(size, dtype=torch.uint8, device=where), float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            dist.broadcast(flat, 0)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    dist.destroy_process_group()
    return size * times / best / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for of_a_rank in ("--rank", "--gpu"):
        parser.add_argument(of_a_rank, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        print(json.dumps(round(raw_gb_per_s(arguments.peer, arguments.device), 2)))
    else:
        print(json.dumps(broadcast_rank(arguments.rank, arguments.gpu, arguments.store, arguments.device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
