"""Examines GPUs, their driver, NCCL, and what processes share tensors by."""

import importlib.metadata
import importlib.util
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from myxo.doctor.diagnosis import Diagnosis, told_by
from myxo.doctor.packages import cuda_of
from myxo.preflight.machine_checks import LITTLE_SHARED_MEMORY
from shared.config import devices

OLDEST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA → the oldest driver of Linux that its programs run on (NVIDIA's compatibility guide)."""

QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")

BUSY_SHARE = 0.1
"""The share of a GPU's memory from which on somebody else's use of it is told."""

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi's; memory in MiB. ``errors``: of ECC that were not corrected since the driver was loaded."""

    index: str
    name: str
    driver: str
    total: float
    used: float
    errors: int


def examine_gpus(_: Path) -> Iterator[Diagnosis]:
    """Yields the GPUs with what is wrong with them, and the driver."""
    shown = devices.gpus()
    if not shown:
        found = "none: trainer and engines compute on this machine's CPUs, which is for small models"
        yield Diagnosis("gpus", "note" if shutil.which("nvidia-smi") else "ok", found, _hidden() if shutil.which("nvidia-smi") else "")
        return
    gpus, failure = read_gpus()
    if failure:
        mend = "install NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA Container Toolkit on the host"
        yield Diagnosis("gpus", "fault", f"/dev shows {shown}, and {failure}", mend)
        return
    for gpu in gpus:
        yield from _of_gpu(gpu)
    yield from _of_driver(gpus)


def read_gpus() -> tuple[list[Gpu], str]:
    """Returns the GPUs as nvidia-smi tells of them, and why it tells nothing, where that is so."""
    text, failure = told_by(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    return [_gpu(line) for line in text.splitlines() if line.count(",") == len(QUERY) - 1], failure


def examine_nccl(_: Path) -> Iterator[Diagnosis]:
    """Yields NCCL's version, and limits under which it fails."""
    if not devices.gpus():
        return
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith("nvidia-nccl-cu"):
            yield Diagnosis("nccl", "ok", f"NCCL {distribution.version}")
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and locked != resource.RLIM_INFINITY:
        found = f"a process may lock {locked >> 10} KiB of memory: InfiniBand registers what it sends, and NCCL fails at that"
        yield Diagnosis("nccl", "fault", found, "ulimit -l unlimited; in a container: --ulimit memlock=-1")


def examine_shared_memory(_: Path) -> Iterator[Diagnosis]:
    """Yields how much shared memory there is."""
    if not SHARED_MEMORY.is_dir():
        yield Diagnosis(
            "shared memory", "fault", f"{SHARED_MEMORY} is not there: ranks share tensors by it", f"mount -t tmpfs tmpfs {SHARED_MEMORY}"
        )
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    if size < LITTLE_SHARED_MEMORY:
        found = f"{SHARED_MEMORY} has {size >> 20} MiB: ranks and data loaders that share tensors by it die of SIGBUS once it is full"
        yield Diagnosis("shared memory", "fault", found, f"mount -o remount,size=8g {SHARED_MEMORY}; in a container: --shm-size 8g")
    else:
        yield Diagnosis("shared memory", "ok", f"{SHARED_MEMORY} has {size >> 30} GiB")


def _hidden() -> str:
    return "nvidia-smi is here and /dev shows no GPU: in a container run it with --gpus all; else look at `dmesg | grep -i nvrm`"


def _gpu(line: str) -> Gpu:
    index, name, driver, total, used, errors = (part.strip() for part in line.split(","))
    return Gpu(index, name, driver, _figure(total), _figure(used), int(_figure(errors)))


def _figure(text: str) -> float:
    """Reads a figure; what the GPU does not tell (``[N/A]``) is 0."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _of_gpu(gpu: Gpu) -> Iterator[Diagnosis]:
    what = f"GPU {gpu.index}, {gpu.name}, {gpu.total / 1024:.0f} GiB"
    if gpu.errors:
        found = f"{what}: {gpu.errors} memory errors that could not be corrected"
        yield Diagnosis("gpus", "fault", found, f"nvidia-smi --gpu-reset -i {gpu.index}; a GPU that goes on like that must be replaced")
    elif gpu.used > BUSY_SHARE * gpu.total:
        who = f"nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv -i {gpu.index}"
        mend = f"{who} names who; end them, or set CUDA_VISIBLE_DEVICES"
        yield Diagnosis("gpus", "note", f"{what}: {gpu.used / 1024:.1f} GiB are in use by others", mend)
    else:
        yield Diagnosis("gpus", "ok", what)


def _of_driver(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    spec = importlib.util.find_spec("torch")
    cuda = None if spec is None or spec.origin is None else cuda_of(Path(spec.origin).with_name("version.py"))
    if not gpus or cuda is None:
        return
    driver, oldest = gpus[0].driver, OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if _figure(driver.split(".")[0]) < oldest:
        found = f"the driver is {driver}, and torch is for CUDA {cuda}, which needs {oldest} or newer"
        yield Diagnosis("driver", "fault", found, f"install a driver of NVIDIA's from {oldest} on")
    else:
        yield Diagnosis("driver", "ok", f"driver {driver} for CUDA {cuda}")
