"""Makes an engine's launch command from the run's configuration, starts its processes, proves them ready, and stops them with none left
behind.

Precedence of flags, lowest first: the defaults below for the device, the run's ``sglang`` table, what the rollout service itself must know
(where the engine listens, what it serves). A flag of that table goes through verbatim, also one that this module has never heard of.

The engine runs under the watchdog of `shared.process.child_process`, since it starts processes of its own. ``/health`` answers 200 before
an engine can generate, so only a real generation proves that it is ready.
"""

import asyncio
import http.client
import importlib.util
import json
import os
import re
import secrets
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shared
from services.rollout.engine.engine_client import RECEIVER_LOADER, EngineClient
from services.rollout.engine.private_endpoints import ADDRESS_VARIABLE, DIRECTORY_VARIABLE, SECRET_VARIABLE, SOCKET
from services.rollout.engine.transport import EngineTransport
from shared.config.engine_limits import cpu_token_capacity, needed_model_config, unequal_context_problem
from shared.config.sglang_flags import plain_name
from shared.process import child_process as process_watch
from shared.process.child_process import ChildProcess, ProcessWatch, cause
from shared.runtime import failure_summary
from shared.runtime.addresses import LOOPBACK, listening_interfaces, own_address
from shared.runtime.errors import ConfigError
from shared.runtime.user_cache import bytecode_variables, kernel_cache_variables

# A flag's value. True: the bare flag. False or None: left out, also where it is a default. A list: the flag, then each item.
FlagValue = bool | int | float | str | list[str] | list[int] | None

ENGINE_SITE_VARIABLE = "MYXO_ENGINE_SITE"
CPU_LAUNCHER = Path(__file__).with_name("cpu_launcher.py")
GPU_LAUNCHER = Path(__file__).with_name("gpu_launcher.py")

CPU_FLAGS: dict[str, FlagValue] = {
    "attention-backend": "torch_native",  # the default, intel_amx, fails on CPUs without AMX
    "disable-cuda-graph": True,
    "dtype": "float32",  # bfloat16 is slower on most CPUs, and log-probs then differ from the trainer's by 1e-2
    "disable-overlap-schedule": True,  # there is no device to overlap with
    "disable-radix-cache": True,  # prefix lookup costs more than computing the prefix, for a model that a CPU can serve
    "sleep-on-idle": True,  # an idle scheduler otherwise spins on three quarters of a core
    "max-running-requests": 256,
}

COMMON_FLAGS: dict[str, FlagValue] = {
    "log-level-http": "warning",  # one access line per request otherwise
    "enable-metrics": True,  # at /metrics, from which the service reads how many tokens were generated
    "sampling-defaults": "openai",  # or chats that name no top_p have that of generation_config.json, which is not trained
}

# Both ends of a push of weights must agree on these.
COMMON_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    # its server would close idle connections after 5 s, and a request sent into that moment looks like a dead engine
    "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    # an engine that has lost a process would otherwise stay for a minute, to dump the memory of its GPUs and its stacks
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are those of the tempered distribution, as the trainer's
    "SGLANG_MM_AVOID_RETOKENIZE": "1",  # prompts with pictures keep the ids that they are sent with
}
CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # threads that spin while they wait for each other starve each other on busy cores: seen 8 to 30 times slower
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}
CUDA_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True)
class EngineCommand:
    """The launch command of one engine. ``argv``: the command. ``env``: variables to set beside the inherited environment."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class EngineRendezvous:
    """Where the ranks of an engine over several nodes meet, and which of its nodes this is.

    ``rank``: of this node. ``address``, ``port``: of the store that the engine's first rank opens there. ``secret``: by which the engine's
    processes know each other (`services.rollout.engine.private_endpoints`)."""

    rank: int
    nodes: int
    address: str
    port: int
    secret: str

    @property
    def flags(self) -> dict[str, FlagValue]:
        """Returns SGLang's flags of it."""
        return {"nnodes": self.nodes, "node-rank": self.rank, "dist-init-addr": f"{self.address}:{self.port}"}


def engine_command(
    model_path: str | Path,
    port: int,
    *,
    device: str,
    random_seed: int = 0,
    flags: Mapping[str, FlagValue] | None = None,
    meeting: EngineRendezvous | None = None,
) -> EngineCommand:
    """Returns the launch command of an engine. It labels its tokens with weight version 0 until it is told another.

    ``model_path``: a Hugging Face checkpoint: a directory, or on CUDA also a name of the hub. ``port``: free on 127.0.0.1, though nothing
    listens on it (`services.rollout.engine.private_endpoints`): SGLang derives others from it. ``device``: ``cpu`` or ``cuda``.
    ``random_seed``: of the engine's sampling. ``flags``: the run's ``sglang`` table, names with or without the leading dashes, ``-`` or
    ``_``. ``meeting``: of an engine over several nodes; None: all of its ranks are on this machine. Raises ConfigError: on a CPU, no
    checkpoint at ``model_path``, or no engine site."""
    chosen: dict[str, FlagValue] = COMMON_FLAGS | {"random-seed": random_seed}
    if device == "cpu":
        config = needed_model_config(Path(model_path))
        chosen |= CPU_FLAGS | {"max-total-tokens": cpu_token_capacity(config)}
    chosen |= {plain_name(name): value for name, value in (flags or {}).items()}
    if device == "cpu" and (problem := unequal_context_problem(config, chosen, device)) is not None:
        raise problem
    chosen |= {
        "model-path": str(model_path),
        "host": LOOPBACK,
        "port": port,
        "device": device,
        "weight-version": "0",
        "skip-server-warmup": True,  # it would ask itself over a port; EngineProcess.ready waits for a real request anyway
        "custom-weight-loader": RECEIVER_LOADER,
    }
    chosen |= meeting.flags if meeting is not None else {}
    launcher = CPU_LAUNCHER if device == "cpu" else GPU_LAUNCHER
    env = (
        COMMON_VARIABLES
        | (listening_interfaces() if meeting is None else _between_nodes())
        | (CPU_VARIABLES if device == "cpu" else CUDA_VARIABLES | kernel_cache_variables(os.environ) | bytecode_variables(os.environ))
        | {"PYTHONPATH": _engine_path(device)}
    )
    if chosen.get("disaggregation-mode"):  # where keys and values are asked for and sent
        chosen["host"] = env["SGLANG_HOST_IP"] = own_address()
    if chosen.get("enable-dp-attention"):  # its processes speak over TCP, also on one machine
        env[SECRET_VARIABLE] = secrets.token_hex(16) if meeting is None else meeting.secret
    if chosen.get("enable-memory-saver") and (runtime := _cuda_runtime()):
        env["LD_LIBRARY_PATH"] = os.pathsep.join([*runtime, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return EngineCommand([sys.executable, str(launcher), *_arguments(chosen)], env)


def engine_site() -> Path:
    """Returns the directory of the engine's torchvision: ``$MYXO_ENGINE_SITE``, else ``engine-site`` in this prefix. Raises ConfigError."""
    given = os.environ.get(ENGINE_SITE_VARIABLE)
    site = Path(given) if given else Path(sys.prefix) / "engine-site"
    if not (site / "torchvision" / "__init__.py").is_file():
        raise ConfigError(
            f"${ENGINE_SITE_VARIABLE}" if given else "the engine site",
            str(site),
            "no torchvision there, which SGLang imports. Install it for the engine alone (it would break a trainer's "
            f"transformers): pip install --no-deps --target {site} torchvision==0.28.0",
        )
    return site


def _between_nodes() -> dict[str, str]:
    address = own_address()
    # SGLang's queue between ranks listens at all addresses for pickled messages, and takes network namespaces for one machine
    return listening_interfaces(across_machines=True) | {
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        "SGLANG_HOST_IP": address,
        ADDRESS_VARIABLE: address,
    }


def _cuda_runtime() -> list[str]:
    """Returns the directories in which pip has put CUDA's runtime. The memory saver needs it before torch is loaded; without it the loader
    leaves the saver out with a line in the log, and no memory would ever be released."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else list(found.submodule_search_locations or [])
    return sorted({str(library.parent) for root in roots for library in Path(root).glob("*/lib/libcudart.so.*")})


def _arguments(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def _engine_path(device: str) -> str:
    """Returns an engine's PYTHONPATH: on a CPU the engine site, then the inherited entries, then the receiver's directory."""
    own = str(Path(shared.__file__).parents[1 + shared.__name__.count(".")])
    installed = own in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))  # then the receiver is found anyway
    entries = [str(engine_site()) if device == "cpu" else "", os.environ.get("PYTHONPATH", ""), "" if installed else own]
    return os.pathsep.join(filter(None, entries))


# The interval at which an engine is searched for processes to watch: those on further nodes start theirs one after the other.
SEARCH_SECONDS = 10.0

TITLE = "sglang::"  # how the names of SGLang's own processes begin: schedulers, the detokenizer, what controls data parallelism
PROBE_SECONDS = 10.0  # the deadline for one probe of a starting engine: the first request on a busy small machine takes seconds

# The most bytes of the name of an engine's directory: that of a socket has no more than 107.
PREFIX = "myxo-engine-"
LONGEST_DIRECTORY = 107 - len("/rank-1023.opening")
_MISSED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed[^.]*")  # what SGLang logs of a process that is gone, before it ends the others
_ALONE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}  # by which prefill and decode engines know a try: SGLang's own has the same
_ONE_TOKEN = json.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, **_ALONE})


class EngineProcess(ChildProcess):
    """An engine that this service has launched.

    SGLang checks for SIGTERM every 5 s and finishes running requests first: abort them before `stop`.

    ``command``: from ``engine_command``. ``log_file``: the engine's output is appended to it; its directory is made. Raises ConfigError
    where the directory for temporary files has too long a name. Attributes: ``receiver``: the private directory in which its server and its
    ranks listen; it is removed with the engine. ``way``: makes the transport of requests to it."""

    def __init__(self, command: EngineCommand, log_file: Path) -> None:
        self.receiver = Path(tempfile.mkdtemp(prefix=PREFIX))
        if len(os.fsencode(self.receiver)) > LONGEST_DIRECTORY:
            self.receiver.rmdir()
            expected = f"at most {LONGEST_DIRECTORY - len(PREFIX) - 9} bytes: an engine's sockets lie below it"
            raise ConfigError("TMPDIR", tempfile.gettempdir(), expected)
        metrics = self.receiver / "metrics"  # SGLang's own temporary directory would stay behind when the engine is killed
        metrics.mkdir()
        private = {DIRECTORY_VARIABLE: str(self.receiver), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        environment = os.environ | command.env | private
        self._watch, self._searched = ProcessWatch(), 0.0
        self.way: Callable[[Path], EngineTransport] = EngineTransport
        super().__init__(f"engine at {self.receiver}", command.argv, log_file, environment, watchdog=True, scratch=self.receiver)

    async def ready(self, deadline: float) -> float:
        """Returns the seconds until the engine has answered a real generation. Raises as `ChildProcess.wait_ready`."""
        return await asyncio.to_thread(self.wait_ready, self._answers, "a first generation", deadline)

    async def client(self) -> EngineClient:
        """Returns a connection to it, once it is ready. Raises as `EngineClient.connect`."""
        return await EngineClient.connect(self.receiver, deadline=60, by=self.way)

    def fault(self) -> str:
        """Returns in words why this engine cannot be used any more; empty while it can. `services.rollout.replica` asks for it.

        It cannot without one of its processes. SGLang finds that out as well, but first waits a minute for dumps of its GPUs' memory; and
        it waits for ever for a process that is stopped."""
        if (code := self.exit_code()) is not None:
            return f"ended with {cause(code)}: {engine_end(self.last_lines())}"
        now = time.monotonic()
        if not self._searched or now - self._searched > SEARCH_SECONDS:
            self._searched = now
            found = process_watch.descendants(self.pid)
            server = [one for one in found if one.parent == self.pid][:1]  # the others are orphans, which the watchdog takes in
            self._watch.add([*server, *(one for one in found if one.name.startswith(TITLE))])
        if not (fault := self._watch.fault(process_watch.seen(self._watch.pids), now)):
            return ""
        lines = self.last_lines()
        if missed := missed_in(lines):  # SGLang has found out first, and ends what is left: the first that is gone may not be the cause
            return f"is ending: {missed}"
        return f"{fault}, after {raised}" if (raised := raised_in(lines)) else fault

    def _answers(self) -> bool:
        connection = UnixConnection(self.receiver / SOCKET, PROBE_SECONDS)
        try:
            connection.request("POST", "/generate", _ONE_TOKEN, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet, or too busy: wait_ready has the deadline
            return False
        finally:
            connection.close()


def engine_end(lines: Sequence[str]) -> str:
    """Returns why an engine has ended, by the last lines of its log: which of its processes SGLang has missed and what was raised before,
    not what comes of it; else its last exception or line."""
    return missed_in(lines) or failure_summary.of_log(lines)


def missed_in(lines: Sequence[str]) -> str:
    """Returns which of its processes SGLang has missed, and what was raised before; empty where it says nothing of that."""
    for index, line in enumerate(lines):
        if found := _MISSED.search(line):
            before = raised_in(lines[:index])
            return failure_summary.short(f"{found[0]}, after {before}") if before else found[0]
    return ""


def raised_in(lines: Sequence[str]) -> str:
    """Returns the last exception in the lines of a log; empty where there is none."""
    found = failure_summary.of_log(lines)
    return found if lines and found != failure_summary.short(lines[-1]) else ""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, for code that blocks. ``timeout``: seconds for each step."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
