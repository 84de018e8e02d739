"""Makes the command that launches an engine, argv and environment, from the run's configuration. Nothing is started here.

Precedence, lowest first: the defaults below for the device, the run's ``sglang`` table, what the rollout service itself must know (where
the engine listens, what it serves). A flag of that table goes through verbatim, also one that this module has never heard of.
"""

import importlib.util
import json
import os
import secrets
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import shared
from services.rollout.engine.curve_sockets import SECRET_VARIABLE
from services.rollout.engine.private_endpoints import ADDRESS_VARIABLE
from shared.config.engine_limits import cpu_token_capacity
from shared.config.sglang_flags import plain_name
from shared.runtime.addresses import LOOPBACK, listening_interfaces, own_address
from shared.runtime.errors import ConfigError
from shared.runtime.user_cache import bytecode_variables, kernel_cache_variables

FlagValue = bool | int | float | str | list[str] | list[int] | None
"""A flag's value. True: the bare flag. False or None: left out, also where it is a default. A list: the flag, then each item."""

ENGINE_SITE_VARIABLE = "MYXO_ENGINE_SITE"
CPU_LAUNCHER = Path(__file__).with_name("cpu_launcher.py")
GPU_LAUNCHER = Path(__file__).with_name("gpu_launcher.py")

RECEIVER_LOADER = "services.rollout.engine.receiver.loader.load"
"""The function that an engine calls, in each of its schedulers, to receive weights."""

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
    "enable-metrics": True,  # at /metrics, from which the service reads how many tokens were drawn
    "sampling-defaults": "openai",  # or chats that name no top_p have that of generation_config.json, which is not trained
}

COMMON_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    # its server would close idle connections after 5 s, and a request sent into that moment looks like a dead engine
    "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    # an engine that has lost a process would otherwise stay for a minute, to dump the memory of its GPUs and its stacks
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are those of the tempered distribution, as the trainer's
}
CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # threads that spin while they wait for each other starve each other on busy cores: seen 8 to 30 times slower
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}
CUDA_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Both ends of a push of weights must agree on these."""


@dataclass(frozen=True)
class EngineCommand:
    """The launch command of one engine.

    Args:
        argv: the command. env: variables to set beside the inherited environment.
    """

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class EngineMeeting:
    """Where the ranks of an engine over several nodes meet, and which of its nodes this is.

    Args:
        rank: of this node. address, port: of the store that the engine's first rank opens there. secret: by which the engine's processes
            know each other (`services.rollout.engine.curve_sockets`).
    """

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
    meeting: EngineMeeting | None = None,
) -> EngineCommand:
    """Returns the launch command of an engine. It labels its tokens with weight version 0 until it is told another.

    Args:
        model_path: a Hugging Face checkpoint: a directory, or on CUDA also a name of the hub.
        port: free on 127.0.0.1, though nothing listens on it (`services.rollout.engine.private_endpoints`): SGLang derives others from it.
        device: ``cpu`` or ``cuda``. random_seed: of the engine's sampling.
        flags: the run's ``sglang`` table, names with or without the leading dashes, ``-`` or ``_``.
        meeting: of an engine over several nodes; None: all of its ranks are on this machine.

    Raises ConfigError: on a CPU, no checkpoint at ``model_path``, or no engine site.
    """
    chosen: dict[str, FlagValue] = COMMON_FLAGS | {"random-seed": random_seed}
    if device == "cpu":
        chosen |= CPU_FLAGS | {"max-total-tokens": _cpu_token_capacity(Path(model_path))}
    chosen |= {plain_name(name): value for name, value in (flags or {}).items()}
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
    """Returns the variables of an engine whose ranks are on several nodes."""
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
    """Yields the flags as command line arguments, in order."""
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


def _cpu_token_capacity(model_path: Path) -> int:
    config_file = model_path / "config.json"
    if not config_file.is_file():
        raise ConfigError("model.hf_checkpoint", str(model_path), "on a CPU, a directory with a checkpoint's config.json")
    return cpu_token_capacity(json.loads(config_file.read_text()))
