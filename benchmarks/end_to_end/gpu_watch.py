"""Reads how busy the GPUs are, on a thread: by NVML, the share of time in which a kernel ran."""

import statistics
import threading
import time
from collections.abc import Sequence

POLL_INTERVAL_S = 0.1


class GpuWatch:
    """The share of time in which each GPU was busy. Without a GPU it reads nothing.

    Args:
        devices: to be read, as CUDA_VISIBLE_DEVICES names them.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._names = tuple(devices)
        self._samples: list[tuple[float, list[float], list[int]]] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "GpuWatch":
        """Begins to read; without GPUs or NVML's binding there is nothing to read, and the figures lack it."""
        if not self._names:
            return self
        try:
            import pynvml
        except ImportError:
            return self
        pynvml.nvmlInit()
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        devices = [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in self._names]

        def look() -> None:
            while not self._over.wait(POLL_INTERVAL_S):
                busy = [pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in devices]
                used = [int(pynvml.nvmlDeviceGetMemoryInfo(device).used) for device in devices]
                self._samples.append((time.time(), busy, used))

        self._thread = threading.Thread(target=look, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def busy(self, begin: float, end: float) -> list[float]:
        """Returns the mean share of each GPU between two times, seconds since the epoch; empty where nothing was read."""
        found = [busy for at, busy, _ in self._samples if begin <= at <= end]
        return [round(statistics.fmean(one), 3) for one in zip(*found, strict=True)]

    def memory(self, begin: float, end: float) -> list[int]:
        """Returns the most memory in use of each GPU between two times, in bytes."""
        return [max(one) for one in zip(*(used for at, _, used in self._samples if begin <= at <= end), strict=True)]
