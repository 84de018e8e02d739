"""A push as slime makes it: buckets of 512 MiB, each announced to the engine by a request, one broadcast a tensor."""

import contextlib
import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from services.rollout.engine.engine_process import UnixConnection

SLIME_BUCKET = 512 * 2**20


def slime_way(engine: str, tensors: list[tuple[str, Any]], rounds: int = 5) -> float:
    """GB/s of the best round: buckets of 512 MiB, each announced to the engine, one broadcast a tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    minute = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    place = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    joined = in_thread(post, engine, "/init_weights_update_group", {**place, "group_name": "plain", "backend": "nccl"})
    group, _ = _new_process_group_helper(2, 0, [], dist.Backend("nccl"), PrefixStore("plain", store), group_name="plain", timeout=minute)
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    joined.join(60)
    buckets, size = [[]], 0
    for name, tensor in tensors:
        if buckets[-1] and size + tensor.nbytes > SLIME_BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    post(engine, "/pause_generation", {"mode": "in_place"})
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for bucket in buckets:
            request = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": "plain",
                "flush_cache": False,
            }
            told = in_thread(post, engine, "/update_weights_from_distributed", request)
            works = [dist.broadcast(tensor, 0, group=group, async_op=True) for _, tensor in bucket]
            for work in works:
                work.wait()
            told.join(60)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    post(engine, "/continue_generation", {})
    return sum(tensor.nbytes for _, tensor in tensors) / min(seconds) / 1e9


def post(engine: str, path: str, body: Any) -> Any:
    connection = UnixConnection(Path(engine), 60)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read() or b"{}")


def in_thread(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread
