"""``myxo doctor [CONFIG]``: examines this machine, and reports what is wrong with it and what mends that.

An *examination* takes the directory of the runs and yields `Diagnosis`; each looks at one thing, changes nothing, and has a deadline of its
own. With a config the checks of `myxo.preflight` are asked as well, as `myxo up` does.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import nats.errors
from nats.js.errors import Error as JetStreamError
from packaging.requirements import Requirement
from redis.exceptions import RedisError
from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json
from myxo.commands.quickstart import pinned
from myxo.commands.up import leading, with_flags
from myxo.preflight import Source, checked_config
from myxo.preflight.machine_checks import FEW_FILES, GIB, LITTLE_SHARED_MEMORY, nearest_existing, unwritable
from myxo.run.run_access import ANSWER_SECONDS, check_store, connect, given_servers
from shared.bus.connection import TRANSIENT, redacted
from shared.config import devices
from shared.process.embedded_servers import ServerMissing, nats_binary, valkey_binary
from shared.runtime import exit_codes
from shared.runtime.errors import BadInput, ConfigError, MyxoError, problems_of
from shared.runtime.host import host_memory
from shared.runtime.safe_text import json_text
from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.store.payload_store import Store

State = Literal["ok", "note", "fault"]

COMMAND_SECONDS = 15.0  # deadline of a program that is asked


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at. ``fault``: runs fail for it; ``note``: they may. ``mend``: the command, or what to do in words."""

    subject: str
    state: State
    found: str
    mend: str = ""


Examination = Callable[[Path], Iterator[Diagnosis]]


def told_by(command: Sequence[str]) -> tuple[str, str]:
    """Returns (what a program printed, why it failed); one of the two is empty."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS)
    except FileNotFoundError:
        return "", f"{command[0]} is not on PATH"
    except OSError as error:
        return "", f"{shown} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{shown} did not end within {COMMAND_SECONDS:g} s"
    if done.returncode != 0:
        return "", f"{shown} ended with {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}"
    return done.stdout, ""


OLDEST, NEWEST = (3, 11), (3, 13)  # versions of Python that Myxo is tested with

# The extras without which `myxo up` starts nothing, and whom they are for.
NEEDED = {"": "every service", "embedded": "servers of a run on this machine", "trainer": "the trainer", "rollout": "engines"}
OWN_PACKAGES = ("sglang", "xgrammar")  # packages that no extra can bring: they are installed without what they ask for (see the Makefile)


def examine_python(_: Path) -> Iterator[Diagnosis]:
    """Yields the version of Python."""
    found = f"Python {sys.version.split()[0]}, {sys.executable}"
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        yield Diagnosis("python", "ok", found)
    else:
        wanted = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        yield Diagnosis("python", "note", f"{found}; Myxo is tested with {wanted}", "python3.11 -m venv .venv")


def examine_packages(_: Path) -> Iterator[Diagnosis]:
    """Yields the packages that are missing, or of a version that Myxo does not take."""
    requirements = [Requirement(text) for text in importlib.metadata.requires("myxo") or []]
    faults = 0
    for extra, whom in NEEDED.items():
        wanted = [one for one in requirements if _of_extra(one, extra)]
        for problem in filter(None, map(_problem, wanted)):
            faults += 1
            mend = f"pip install 'myxo[{extra}]'" if extra else "pip install myxo"
            yield Diagnosis("packages", "fault", f"{problem}; it is for {whom}", mend)
    for package in OWN_PACKAGES:
        if importlib.util.find_spec(package) is None:
            faults += 1
            remedy = f"pip install --no-deps {pinned(package)}"
            yield Diagnosis("packages", "fault", f"{package} is not installed; it is for engines", remedy)
    if not faults:
        yield Diagnosis("packages", "ok", f"myxo {importlib.metadata.version('myxo')} and all that it needs")


def examine_torch(_: Path) -> Iterator[Diagnosis]:
    """Yields whether torch's build fits the machine. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return  # said among the packages
    cuda, version = cuda_of(Path(spec.origin).with_name("version.py")), importlib.metadata.version("torch")
    if devices.gpus() and cuda is None:
        found = f"torch {version} is built for CPUs alone, and this machine has {devices.gpus()} GPUs"
        yield Diagnosis("torch", "fault", found, "pip install --force-reinstall --no-deps torch==2.13.0")
    else:
        yield Diagnosis("torch", "ok", f"torch {version}, " + (f"for CUDA {cuda}" if cuda else "for CPUs"))


def cuda_of(version_file: Path) -> str | None:
    """Returns the version of CUDA that torch was built for, as its own ``version.py`` says; None: for CPUs."""
    found = re.search(r"^cuda\b[^=]*= *'([0-9.]+)'", version_file.read_text(), re.MULTILINE)
    return None if found is None else found[1]


def _of_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return extra == "" if marker is None else bool(extra) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _problem(requirement: Requirement) -> str:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} {version} is installed, {requirement.specifier} is needed"


# Major version of CUDA → the oldest driver of Linux that its programs run on (NVIDIA's compatibility guide).
OLDEST_DRIVER = {12: 525, 13: 580}
QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")
BUSY_SHARE = 0.1  # share of a GPU's memory from which on use by another process is reported
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
        hidden = "nvidia-smi is here and /dev shows no GPU: in a container run it with --gpus all; else look at `dmesg | grep -i nvrm`"
        yield Diagnosis("gpus", "note", found, hidden) if shutil.which("nvidia-smi") else Diagnosis("gpus", "ok", found)
        return
    gpus, failure = read_gpus()
    if failure:
        mend = "install NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA Container Toolkit on the host"
        yield Diagnosis("gpus", "fault", f"/dev shows {shown}, and {failure}", mend)
        return
    for gpu in gpus:
        yield from _of_gpu(gpu)
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


def read_gpus() -> tuple[list[Gpu], str]:
    """Returns the GPUs that nvidia-smi lists, and why it lists none, if it fails."""
    text, failure = told_by(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == len(QUERY) - 1]
    found = [
        Gpu(index, name, driver, _figure(total), _figure(used), int(_figure(errors))) for index, name, driver, total, used, errors in lines
    ]
    return found, failure


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
        found = f"{SHARED_MEMORY} is not there: ranks share tensors by it"
        yield Diagnosis("shared memory", "fault", found, f"mount -t tmpfs tmpfs {SHARED_MEMORY}")
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    if size < LITTLE_SHARED_MEMORY:
        found = f"{SHARED_MEMORY} has {size >> 20} MiB: ranks and data loaders that share tensors by it die of SIGBUS once it is full"
        yield Diagnosis("shared memory", "fault", found, f"mount -o remount,size=8g {SHARED_MEMORY}; in a container: --shm-size 8g")
    else:
        yield Diagnosis("shared memory", "ok", f"{SHARED_MEMORY} has {size >> 30} GiB")


def _figure(text: str) -> float:
    """Reads a figure; what the GPU does not report (``[N/A]``) is 0."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _of_gpu(gpu: Gpu) -> Iterator[Diagnosis]:
    what = f"GPU {gpu.index}, {gpu.name}, {gpu.total / 1024:.0f} GiB"
    if gpu.errors:
        found = f"{what}: {gpu.errors} memory errors that could not be corrected"
        yield Diagnosis("gpus", "fault", found, f"nvidia-smi --gpu-reset -i {gpu.index}; a GPU that continues like that must be replaced")
    elif gpu.used > BUSY_SHARE * gpu.total:
        who = f"nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv -i {gpu.index}"
        mend = f"{who} names who; end them, or set CUDA_VISIBLE_DEVICES"
        yield Diagnosis("gpus", "note", f"{what}: {gpu.used / 1024:.1f} GiB are in use by others", mend)
    else:
        yield Diagnosis("gpus", "ok", what)


INSTALL = "pip install 'myxo[embedded]'"


def examine_nats(_: Path) -> Iterator[Diagnosis]:
    """Yields the given NATS server with its JetStream, or the one that a run would start."""
    url = given_servers().nats_url
    if url is None:
        yield _embedded("nats", "nats-server", nats_binary)
    else:
        yield asyncio.run(_nats(url))


def examine_store(_: Path) -> Iterator[Diagnosis]:
    """Yields the given Redis or Valkey with how it keeps what it is given, or the one that a run would start."""
    url = given_servers().redis_url
    if url is None:
        yield _embedded("store", "valkey-server", valkey_binary)
        return
    try:
        yield from asyncio.run(_store(url))
    except BadInput as error:
        yield Diagnosis("store", "fault", str(error), "docker compose up -d redis, or unset REDIS_URL for one that Myxo starts")


def _embedded(subject: str, name: str, find: Callable[[], Path]) -> Diagnosis:
    try:
        binary = find()
    except ServerMissing as error:
        return Diagnosis(subject, "fault", str(error), INSTALL)
    reported, failure = told_by([str(binary), "--version"])
    if failure:
        return Diagnosis(subject, "fault", failure, f"{INSTALL}, or put a {name} for this machine on PATH")
    return Diagnosis(subject, "ok", f"a run starts its own: {' '.join(reported.split())[:60]}")


async def _nats(url: str) -> Diagnosis:
    try:
        bus = await connect(url, "doctor")
    except (BadInput, MyxoError) as error:
        return Diagnosis("nats", "fault", str(error), "docker compose up -d nats, or unset NATS_URL for one that Myxo starts")
    try:
        async with contextlib.aclosing(bus):
            account = await asyncio.wait_for(bus.js.account_info(), ANSWER_SECONDS)
    except (JetStreamError, nats.errors.Error, *TRANSIENT) as error:
        found = f"{redacted(url)} answers, and its JetStream does not: {str(error) or type(error).__name__}"
        return Diagnosis("nats", "fault", found, "start it with JetStream: nats-server -js -sd DIRECTORY; its account needs it, too")
    return Diagnosis("nats", "ok", f"{redacted(url)}: JetStream with {account.streams} streams, {account.storage >> 20} MiB on disk")


async def _store(url: str) -> list[Diagnosis]:
    await check_store(url)
    try:
        async with contextlib.aclosing(Store(url)) as store:
            [server] = await store.commands("the server's state", [("INFO", "everything")], ANSWER_SECONDS)
    except (MyxoError, RedisError):  # an account of a service may not ask
        return [Diagnosis("store", "ok", f"{redacted(url)} answers")]
    state: dict[str, Any] = server
    name = f"{redacted(url)}: {state.get('server_name', 'redis')} {state.get('valkey_version') or state.get('redis_version', '')}"
    found = [Diagnosis("store", "ok", name)]
    if (policy := state.get("maxmemory_policy", "noeviction")) != "noeviction":
        lost = f"{name}: maxmemory-policy is {policy}: under pressure it throws samples away that the ledger counts on"
        found.append(Diagnosis("store", "fault", lost, "redis-cli CONFIG SET maxmemory-policy noeviction"))
    if state.get("aof_enabled") == 0:
        lost = f"{name}: it has no append-only file: groups in flight are made again after its death"
        found.append(Diagnosis("store", "note", lost, "redis-cli CONFIG SET appendonly yes"))
    return found


LEAST_MEMORY = 4 * GIB  # bytes that the quick start's services take together

# Bytes without which a run cannot begin, and those that even small models' checkpoints soon fill.
LEAST_DISK, LITTLE_DISK = 256 << 20, 5 * GIB


def examine_memory(_: Path) -> Iterator[Diagnosis]:
    """Yields host memory."""
    total, available = host_memory()
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if available < LEAST_MEMORY:
        yield Diagnosis("memory", "note", f"{found}; even the quick start takes {LEAST_MEMORY // GIB}", "ps aux --sort=-rss | head")
    else:
        yield Diagnosis("memory", "ok", found)


def examine_directory(directory: Path) -> Iterator[Diagnosis]:
    """Yields whether runs can be written where they are to lie, and what is free there."""
    place = nearest_existing(directory.absolute())
    if (reason := unwritable(directory.absolute())) is not None:
        yield Diagnosis("disk", "fault", reason, f"sudo chown {os.geteuid()} {place}, or give another directory: myxo up --dir DIR")
        return
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB are free on the disk of {place}"
    if free < LEAST_DISK:
        yield Diagnosis("disk", "fault", f"{found}: too few for any run", f"du -xh {place} | sort -h | tail, or give another --dir")
    elif free < LITTLE_DISK:
        yield Diagnosis("disk", "note", f"{found}; checkpoints fill that soon", "lower trainer.keep_checkpoints, or give another --dir")
    else:
        yield Diagnosis("disk", "ok", found)


def examine_cache(_: Path) -> Iterator[Diagnosis]:
    """Yields whether models of the hub can be kept."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    place = nearest_existing(cache.absolute())
    if os.access(place, os.W_OK | os.X_OK):
        yield Diagnosis("model cache", "ok", str(cache))
    else:
        found = f"{place} cannot be written, where models of the hub are kept"
        yield Diagnosis("model cache", "fault", found, f"sudo chown -R {os.geteuid()} {place}, or export HF_HOME=DIRECTORY")


def examine_limits(_: Path) -> Iterator[Diagnosis]:
    """Yields the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        raised = FEW_FILES * 4 if hard == resource.RLIM_INFINITY else hard
        mend = f"ulimit -n {raised}" if raised > soft else "raise nofile in /etc/security/limits.conf, then log in again"
        yield Diagnosis("open files", "fault", f"a process may open {soft} at once: the run's servers need more", mend)
    else:
        yield Diagnosis("open files", "ok", "any number" if soft == resource.RLIM_INFINITY else f"{soft} at once")


def examine_sandbox(_: Path) -> Iterator[Diagnosis]:
    """Yields whether code of a model can be run apart from this machine."""
    try:
        with Sandbox(SandboxSettings()) as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        found = f"{error}; only runs whose rewards or agents run a model's code need it"
        mend = "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or user.max_user_namespaces=10000; see docs/sandbox.md"
        yield Diagnosis("sandbox", "note", found, mend)
    else:
        yield Diagnosis("sandbox", "ok", "programs run apart from this machine")


EXAMINATIONS: tuple[Examination, ...] = (
    *(examine_python, examine_packages, examine_torch, examine_gpus, examine_nccl, examine_shared_memory),
    *(examine_nats, examine_store, examine_memory, examine_directory, examine_cache, examine_limits, examine_sandbox),
)

MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "fault": ("FAULT", "bold red")}
_ABOUT = """Look at this machine: packages, GPUs and their driver, shared memory, NATS, Redis, disk, limits, the sandbox.

Each fault is shown with the command that mends it. With a CONFIG (and flags over it) everything that `myxo up` checks before it starts is
looked at, too. Nothing is changed. Exits 1 where there is a fault."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _ABOUT, "[CONFIG] [--dir DIR] [--json]", _run)
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs are to lie (default runs)")
    add_json(command, "as one JSON list")


def _run(parsed: argparse.Namespace, console: Console) -> int:
    config, flags = leading(parsed.flags)
    if flags and config is None:
        raise ConfigError("CONFIG", None, f"needed for flags: {' '.join(flags)}")
    found = []
    for diagnosis in diagnoses(parsed.dir, config, flags):
        found.append(diagnosis)
        if not parsed.json:
            mark, style = MARKS[diagnosis.state]
            console.print(Text.assemble((mark, style), f"  {diagnosis.subject:14}{diagnosis.found}"), soft_wrap=True)
            if diagnosis.mend:
                console.print(Text(f"{'':21}→ {diagnosis.mend}", style="cyan"), soft_wrap=True)
    faults = sum(diagnosis.state == "fault" for diagnosis in found)
    if parsed.json:
        console.file.write(json_text([asdict(diagnosis) for diagnosis in found]) + "\n")
    else:
        console.print(f"{faults} fault{'' if faults == 1 else 's'}." if faults else "Nothing is wrong.")
    return exit_codes.FAILED if faults else exit_codes.DONE


def diagnoses(directory: Path, config: Path | None, flags: list[str]) -> Iterator[Diagnosis]:
    """Yields what all examinations find, as they go. One that breaks does not hide the others."""
    for examine in EXAMINATIONS:
        try:
            yield from examine(directory)
        except Exception as error:
            subject = examine.__name__.removeprefix("examine_").replace("_", " ")
            yield Diagnosis(subject, "note", f"it could not be looked at: {type(error).__name__}: {error}")
    if config is None:
        return
    try:
        checked_config(Source.of(config, flags), starts=True)
    except BadInput as error:
        for problem in problems_of(error):
            mend = problem.expected if isinstance(problem, ConfigError) else ""
            yield Diagnosis("config", "fault", str(problem).removesuffix(f": {mend}") if mend else str(problem), mend)
    else:
        yield Diagnosis("config", "ok", f"{config} can be run")
