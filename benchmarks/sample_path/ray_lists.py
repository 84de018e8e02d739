"""Ray as slime uses it: a batch of samples as maps of lists of Python numbers goes into the object store, another process takes it out.

The producer is an actor that holds the arrays and makes the lists of them, as slime's rollout has lists from its engine's JSON; the
consumer is an actor that is handed the reference and makes arrays again, and compares them. Nothing is admitted, recorded or kept
beyond the reference.
"""

import logging
import statistics
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.sample_path.content import PROMPT, SAMPLES, Pool
from shared.schema.ledger import group_id

INSTALL = "pip install -c constraints.txt -e '.[benchmarks]'"
AHEAD = 2
"""Batches that are put before the consumer has taken them."""


class RayMissing(Exception):
    """Ray is not installed."""


class _Producer:
    def __init__(self, length: int, groups: int) -> None:
        self._pool, self._groups, self._next = Pool(length), groups, 0
        self._prompt = np.arange(PROMPT, dtype=np.int32)

    def put(self) -> list[Any]:
        """One batch in the object store: a reference, in a list so that it stays one."""
        import ray

        first, self._next = self._next, self._next + self._groups
        batch = []
        for number in range(first, self._next):
            for index in range(SAMPLES):
                one = self._pool.sample(group_id(number), index, self._prompt, 0, "", None)
                assert one.log_probs is not None
                tokens = [*one.prompt.tolist(), *one.response.tolist()]
                lists = {"tokens": tokens, "loss_mask": one.mask.tolist(), "rollout_log_probs": one.log_probs.tolist()}
                batch.append({"group": one.group, "index": index, "response_length": len(one.response), "reward": 0.0, **lists})
        return [ray.put(batch)]


class _Consumer:
    def __init__(self, length: int) -> None:
        self._pool = Pool(length)

    def get(self, references: list[Any]) -> int:
        """Takes a batch out and compares it; how many samples it had."""
        import ray

        batch = ray.get(references[0])
        for entry in batch:
            one = self._pool.sample(entry["group"], entry["index"], np.empty(0, np.int32), 0, "", None)
            one.prompt = np.array(entry["tokens"][:PROMPT], np.int32)
            one.response = np.array(entry["tokens"][PROMPT:], np.int32)
            one.log_probs = np.array(entry["rollout_log_probs"], np.float32)
            one.mask = np.array(entry["loss_mask"], np.uint8)
            self._pool.check(entry["group"], entry["index"], one)
        return len(batch)


def pace(length: int, groups: int, seconds: float, repetitions: int) -> tuple[float, float]:
    """(samples per second, CPU seconds per 1,000 samples), medians. Raises RayMissing."""
    try:
        import ray
    except ImportError:
        raise RayMissing(f"Ray is not installed: {INSTALL}, or leave its row out with --no-ray") from None
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, object_store_memory=1 << 30)
    try:
        producer, consumer = ray.remote(_Producer).remote(length, groups), ray.remote(_Consumer).remote(length)
        figures = []
        for number in range(repetitions + 1):  # the first is the warm-up
            used, begun, samples = _cpu(), time.monotonic(), 0
            put = [producer.put.remote() for _ in range(AHEAD)]
            while time.monotonic() - begun < (seconds if number else 1.0):
                put.append(producer.put.remote())
                samples += ray.get(consumer.get.remote(ray.get(put.pop(0))))
            for left in put:
                samples += ray.get(consumer.get.remote(ray.get(left)))
            taken = time.monotonic() - begun
            figures.append((samples / taken, (_cpu() - used) * 1000 / samples))
        paces, costs = zip(*figures[1:], strict=True)
        return statistics.median(paces), statistics.median(costs)
    finally:
        ray.shutdown()


def _cpu() -> float:
    """CPU seconds so far of this process and all that it started."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
