"""Checks of the machine that a run is about to start on: packages, GPUs, disk, memory, limits, programs, sandbox, keys, an earlier run.

A run is refused where it surely cannot get to its end; where it only may not, a note says what is short. Only `check_functions` and
`check_extras` are also asked of a run whose services are started elsewhere.
"""

import asyncio
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from myxo.preflight.inspection import Findings, Inspection, ModelSize, Note
from myxo.run import run_access
from myxo.run.run_directory import STATE, RunDirectory, checkpoints
from shared import hooks
from shared.bus import runs
from shared.config import devices
from shared.config.eval_views import agents, missing_packages, named_rewards
from shared.config.run_config import RunConfig
from shared.config.service_sections import ingest_key
from shared.model.final_exports import export_target, occupant
from shared.rewards.names import RUNS_CODE, base
from shared.runtime import addresses
from shared.runtime.errors import ConfigError
from shared.runtime.host import check_containers, host_memory
from shared.runtime.safe_text import without_credentials
from shared.runtime.traces import trace_settings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.store.s3 import ObjectStoreCredentials, S3Client

# The packages, and the services that need them; importing them would take seconds.
PACKAGES = {"torch": "the trainer and the engine", "megatron": "the trainer", "sglang": "the engine"}
IMPORT_SECONDS = 120.0  # deadline for importing the user's own functions
LONGEST_WORDS = 1000  # most characters that are shown of an import's output
GIB = 1 << 30
LEAST_DISK = 64 << 20  # bytes without which not even the servers can keep what a run's first minutes bring
LITTLE_DISK = LITTLE_SHARED_MEMORY = GIB
FEW_FILES = 1024  # open files that the servers of a run and a few hundred connections come near to
OPTIMIZER_BYTES = 8  # bytes per parameter of Adam's two moments in float32
MASTER_BYTES = 4  # bytes per parameter of the gradient in float32; where training is in bfloat16, also of a float32 copy of the weights


def check_traces(_: Inspection) -> Findings:
    """Raises for what the environment says wrong of the export of traces."""
    trace_settings(os.environ)
    yield from ()


def check_extras(inspection: Inspection) -> Findings:
    """Raises for a package that the config asks for and that is not installed."""
    devices.check(inspection.config)
    yield from ()


def check_functions(inspection: Inspection) -> Findings:
    """Yields what keeps a function of the user's own from being imported; a separate process imports it."""
    functions = hooks.paths(inspection.config)
    if not functions:
        return
    if inspection.starts:
        for name in inspection.config.reward.worker_environment:
            if name not in os.environ:
                yield ConfigError("reward.worker_environment", name, "names of variables that are set where `myxo up` starts")
    field, path = next(iter(functions.items()))
    command, config = [sys.executable, "-m", "shared.hooks"], inspection.config.model_dump_json()
    try:
        importing = subprocess.run(command, input=config, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        yield ConfigError(field, path, f"importing {', '.join(functions.values())} did not end within {IMPORT_SECONDS:g} s")
        return
    if importing.returncode == 2:
        yield ConfigError(*json.loads(importing.stdout.splitlines()[-1]))
    elif importing.returncode != 0:
        words = " ".join(importing.stderr.split())[-LONGEST_WORDS:]
        yield ConfigError(field, path, f"importing {', '.join(functions.values())} ended with {importing.returncode}: {words}")


def check_packages(inspection: Inspection) -> Findings:
    """Yields the packages of the services that are not installed."""
    debug = inspection.config.debug
    left_out = ("sglang",) if debug.trains_only else ("megatron",) if debug.debug_rollout_only else ()
    for package, needed_by in PACKAGES.items():
        if package not in left_out and importlib.util.find_spec(package) is None:
            yield ConfigError("the environment", package, f"not installed, and {needed_by} cannot start without it")


def check_gpus(inspection: Inspection) -> Findings:
    """Yields the devices that are asked for and not there."""
    config = inspection.config
    if devices.gpus():
        if devices.amd_gpus() and devices.resolve(config.trainer.train_device) == "cuda" and config.trainer.trainer_backend != "torch":
            yield ConfigError("trainer.trainer_backend", config.trainer.trainer_backend, "torch; Megatron does not run here on AMD's GPUs")
        devices.assign_gpus(config)  # raises ConfigError
        return
    fields = {"trainer.train_device": config.trainer.train_device, "rollout.rollout_device": config.rollout.rollout_device}
    for field, device in fields.items():
        if device == "cuda":
            yield ConfigError(field, device, "this machine shows no GPU (/dev/nvidia0, or AMD's in /sys/class/kfd); use cpu, or auto")


def check_profilers(inspection: Inspection) -> Findings:
    """Yields a recorder of allocations that knows none of this machine's."""
    debug, device = inspection.config.debug, devices.resolve(inspection.config.trainer.train_device)
    if debug.record_memory_history and debug.memory_recorder == "torch" and device == "cpu":
        expected = "false, or memory_recorder = memray: PyTorch records the allocations of CUDA, and the trainer computes on a CPU"
        yield ConfigError("debug.record_memory_history", True, expected)


def check_credentials(inspection: Inspection) -> Findings:
    """Notes the fields with a credential in them: services read the config on the bus, and so can every account of the run."""
    given, shown = (config.model_dump(mode="json") for config in (inspection.config, inspection.config.shown()))
    held = [f"{section}.{field}" for section in given for field in given[section] if given[section][field] != shown[section][field]]
    if held:
        yield Note(f"{', '.join(held)}: holds a credential, which every account of the run can read on the bus")


def check_earlier_run(inspection: Inspection) -> Findings:
    """Yields each field in which the run that lies in the run's directory differs and may not; a run on a given bus is checked there."""
    directory = RunDirectory(inspection.config.run.root)
    own = inspection.config.debug.trains_only or (os.path.isdir(directory.nats) and not addresses.nats_url())
    if inspection.fresh or not inspection.whole or not own:
        return
    if (frozen := runs.frozen(directory.root)) is not None:
        yield from runs.differences(frozen, inspection.frozen or inspection.config)


def check_directories(inspection: Inspection) -> Findings:
    """Yields the directories of the run that cannot be written, and the first of an export to come where something else lies."""
    config, done = inspection.config, 0 if inspection.fresh else max(checkpoints(inspection.config), default=0)
    wanted = {
        "run.dir": config.run.root,
        "trainer.save": config.trainer.save and config.trained,
        "weights.update_weight_disk_dir": config.weights.update_weight_disk_dir,
        "monitoring.wandb_dir": config.monitoring.wandb_dir if config.monitoring.use_wandb else None,
    }
    for field, directory in wanted.items():
        if directory is not None and (reason := unwritable(directory)) is not None:
            yield ConfigError(field, str(directory), f"{reason}; give a directory that this user can write")
    root = config.run.root
    for path in [root / name for name in STATE if (root / name).exists()] if os.access(root, os.W_OK) else []:
        if not os.access(path, os.W_OK):
            yield ConfigError("run.dir", str(path), f"{_owned(path)}; make it yours (chown), or give another run.name")
    for steps in range(done + 1, config.rollout.num_rollout + 1):
        if (export := export_target(config, steps)) is not None and (what := occupant(config, export)):
            expected = f"a directory for exports alone, with {{rollout_id}} for the step: one would replace {what} there"
            yield ConfigError("trainer.save_hf", str(export), expected)
            return


def check_disk(inspection: Inspection) -> Findings:
    """Yields a disk on which the checkpoints that lie there at once have no room; notes one that may fill."""
    config, root = inspection.config, inspection.config.trained
    field = "run.dir" if config.trainer.save is None else "trainer.save"
    if unwritable(root) is not None:
        return
    removed = STATE if inspection.fresh else ("checkpoints",)  # checkpoints that are there make room for those to come
    files = (entry for name in removed for entry in (root / name).rglob("*") if entry.is_file())
    free = shutil.disk_usage(nearest_existing(root)).free + sum(entry.stat().st_blocks * 512 for entry in files)
    size, count = inspection.model_size, checkpoints_at_once(config)
    checkpoint, most = (0, 0) if size is None else (checkpoint_bytes(config, size), disk_bytes(config, size))
    kept = f"keep_checkpoints = {config.trainer.keep_checkpoints}"
    if free < max(count * checkpoint, LEAST_DISK):
        needed = f"a run needs {_shown(LEAST_DISK)} at least"
        if count * checkpoint > LEAST_DISK:
            needed = f"a checkpoint of this model takes {_shown(checkpoint)}"
            if count > 1:
                needed += f", and {count} lie there at once with {kept}, the one being written included"
        yield ConfigError(field, str(root), f"{_shown(free)} are free on its disk; {needed}: free some, or give another {field}")
    elif free < most:
        filled = f"{kept} and what else is kept of this model can take {_shown(most)}"
        yield Note(f"{field}: {_shown(free)} are free on the disk of {root}; {filled}")
    elif free < LITTLE_DISK:
        yield Note(f"{field}: only {_shown(free)} are free on the disk of {root}")


def check_memory(inspection: Inspection) -> Findings:
    """Yields a model that does not fit into this machine's memory, where trainer or engines compute on CPUs; notes what is short."""
    config, size = inspection.config, inspection.model_size
    shared, trainer, rollout = Path("/dev/shm"), config.trainer, config.rollout
    several = trainer.ranks("actor") > 1 or rollout.rollout_num_gpus_per_engine > 1
    on_gpus = "cuda" in (devices.resolve(trainer.train_device), devices.resolve(rollout.rollout_device))
    shares = trainer.colocate or trainer.lend_gpus or (several and on_gpus)
    if shares and shared.is_dir() and (there := shutil.disk_usage(shared).total) < LITTLE_SHARED_MEMORY:
        yield Note(f"/dev/shm has {_shown(there)}: little for ranks that share tensors by it; in a container: --shm-size 8g")
    if size is None:
        return
    needed, (total, available) = memory_bytes(config, size), host_memory()
    if needed > total:
        expected = (
            f"{size.parameters / 1e9:.2g} billion parameters need {_shown(needed)} of memory for training and engines on CPUs, this "
            f"machine has {_shown(total)}; take a smaller model, fewer ranks or replicas, or a machine with GPUs"
        )
        yield ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), expected)
    elif needed > available:
        yield Note(f"memory: the run needs about {_shown(needed)} and more, {_shown(available)} of {_shown(total)} are free")


def check_limits(inspection: Inspection) -> Findings:
    """Notes a limit on open files that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        allowed = "" if hard != resource.RLIM_INFINITY and hard <= soft else f": ulimit -n {FEW_FILES * 4 if hard < 0 else hard}"
        yield Note(f"this shell lets a process open {soft} files at once, few for a run's servers; raise the limit{allowed}")


def checkpoint_bytes(config: RunConfig, size: ModelSize) -> int:
    """Returns the bytes that a checkpoint of the trainer takes at least: weights and Adam's moments of what trains."""
    if _trains_part(config) or config.debug.debug_rollout_only:
        return 0
    return size.parameters * (4 + OPTIMIZER_BYTES + (2 if config.trainer.train_dtype == "bfloat16" else 0))


def checkpoints_at_once(config: RunConfig) -> int:
    """Returns how many checkpoints the run has at once, at most: those that are kept, and the one being written."""
    trainer, steps = config.trainer, config.rollout.num_rollout
    made = config.saves_at_start + -(-steps // trainer.save_interval)  # with the last step's
    if config.rollout.num_rollout_per_epoch is not None:
        made += steps // config.rollout.num_rollout_per_epoch
    return max(1, min(trainer.keep_checkpoints + 1, made))


def disk_bytes(config: RunConfig, size: ModelSize) -> int:
    """Returns the bytes of all that the run keeps, at most: checkpoints, one of them being written, snapshots, the final weights."""
    if config.debug.debug_rollout_only:
        return 0
    weights = size.parameters * _weight_bytes(config)
    here = config.weights.update_weight_disk_dir is None
    taken = config.engines_read_snapshots or config.weights.snapshot_interval > 0
    snapshots = config.weights.keep_snapshots + 1 if here and taken else 0
    if not config.engines_read_snapshots and config.weights.snapshot_interval > 0:
        snapshots = min(snapshots, 1 + config.rollout.num_rollout // config.weights.snapshot_interval)
    checkpoints = checkpoints_at_once(config) * checkpoint_bytes(config, size)
    exports = config.rollout.num_rollout // config.trainer.save_interval + 1 if config.trainer.save_hf is not None else 0
    return checkpoints + (snapshots + exports + config.trainer.save_final_hf) * weights


def memory_bytes(config: RunConfig, size: ModelSize) -> int:
    """Returns the bytes of memory that parameters, gradients and Adam take at least, trainer and engines together."""
    trainer, needed = config.trainer, 0
    if devices.resolve(trainer.train_device) == "cpu" and not config.debug.debug_rollout_only:
        replica = trainer.tensor_model_parallel_size * trainer.pipeline_model_parallel_size * trainer.context_parallel_size
        copies = max(trainer.ranks("actor") // replica, 1) if trainer.expert_model_parallel_size == 1 else 1
        held = _weight_bytes(config) + (0 if _trains_part(config) else MASTER_BYTES)
        state = 0 if _trains_part(config) else OPTIMIZER_BYTES + (MASTER_BYTES if trainer.train_dtype == "bfloat16" else 0)
        needed += size.parameters * (copies * held + (1 if trainer.use_distributed_optimizer else copies) * state)
    if devices.resolve(config.rollout.rollout_device) == "cpu" and not (config.debug.trains_only or config.rollout.external_engines):
        needed += (config.rollout.rollout_replicas + len(devices.lent_instances(config))) * size.bytes
    return needed


def _weight_bytes(config: RunConfig) -> int:
    return 2 if config.trainer.train_dtype == "bfloat16" else 4


def _trains_part(config: RunConfig) -> bool:
    trainer = config.trainer  # gradients and moments are then of that part of the parameters
    return bool(trainer.lora_rank or trainer.only_train_params_name_list or trainer.freeze_params_name_list)


def nearest_existing(path: Path) -> Path:
    """Returns the nearest of a path and its parents that is there."""
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def unwritable(directory: Path) -> str | None:
    """Returns why nothing can be written into a directory, or it cannot be made; None where all is well. Leaves nothing behind."""
    existing = nearest_existing(directory)
    if not existing.is_dir():
        return f"{existing} is a file" if existing.exists() else f"{existing} is a link that leads nowhere"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".myxo-", dir=existing))
    except PermissionError:
        return _owned(existing)
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}"
    return None


def _owned(path: Path) -> str:
    return f"{path} cannot be written: it belongs to user {path.stat().st_uid}, this is user {os.geteuid()}"


def _shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def check_commands(inspection: Inspection) -> Findings:
    """Yields the commands whose program is not there, the agents' server among them. Raises for containers that cannot be started."""
    rollout = inspection.config.rollout
    commands = {field: agent for field, agent in agents(inspection.config).items() if isinstance(agent, list)}
    image = rollout.agent_image
    if image is not None and not commands:
        yield ConfigError("rollout.agent_image", image, "belongs to agent_command, which is not there")
    own = {} if image is not None else commands  # those of an image are in it
    for field, command in (own | {"rollout.agent_service": rollout.agent_service}).items():
        if command and shutil.which(command[0]) is None:
            expected = f"a program that this machine has: {command[0]!r} is neither on PATH nor a file that can be run"
            yield ConfigError(field, command, expected)
    if image is not None and commands:
        check_containers(rollout.agent_runtime, image, rollout.agent_network)


def check_gateways(inspection: Inspection) -> Findings:
    """Raises where gateways are to start that cannot; yields frozen models that have a name of the trained one's there, and a port
    without effect."""
    config = inspection.config
    taken = {config.run.name, config.model.hf_checkpoint.name, *config.gateway.gateway_models} if config.gateways else set()
    for model in sorted(taken & config.rollout.models.keys()):
        yield ConfigError(f"rollout.models.{model}", model, "another name: agents ask for the model that is trained by this one")
    if config.gateways and importlib.util.find_spec("renderers") is None:
        expected = "gateways need the package renderers: pip install 'myxo[gateway]', or 0 where they run on other machines"
        raise ConfigError("gateway.gateway_replicas", config.gateways, expected)
    if config.gateways and (port := config.gateway.gateway_port) and (given := os.environ.get(addresses.GATEWAY_VARIABLE)):
        yield Note(f"gateway.gateway_port = {port} changes nothing: gateways listen at {addresses.GATEWAY_VARIABLE} = {given}")


def check_rewards(inspection: Inspection) -> Findings:
    """Yields the packages that are not installed, and a key that is not set where the services start."""
    yield from missing_packages(inspection.config)
    variable = inspection.config.reward.judge_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("reward.judge_key_variable", variable, "a variable that is set where `myxo up` starts")


def check_servers(inspection: Inspection) -> Findings:
    """Yields a NATS or Redis of the environment's variables that does not answer; notes an environment at whose URL there is no server."""
    reward, steps = inspection.config.reward, inspection.config.episode.episode_url
    urls = {"reward.environment_url": reward.environment_url, "reward.rm_url": reward.rm_url, "episode.episode_url": steps}
    for field, url in (urls | {f"reward.environments.{name}": url for name, url in reward.environments.items()}).items():
        parts = urlsplit(url or "")
        try:
            if parts.scheme in ("http", "https"):
                socket.create_connection((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), 1.0).close()
        except OSError as error:
            where = without_credentials(url)
            further = "" if field == "reward.rm_url" else f", and try it: myxo env check {where}"
            yield Note(f"{field}: no reply from {where} yet ({error}); start it{further}")
    asyncio.run(run_access.check_servers(run_access.given_servers(), inspection.config.run.name))  # raises ConfigError


def check_sandbox(inspection: Inspection) -> Findings:
    """Yields why no sandbox can be started, where a reward needs one, and a note where the config does without."""
    if not any(base(name) in RUNS_CODE for _, name in named_rewards(inspection.config)):
        return
    settings = inspection.config.sandbox.settings()
    if settings.kind == "none":
        yield Note("sandbox.sandbox = none: the model's code runs with the files, the network and the rights of the reward service")
        return
    try:
        with Sandbox(settings) as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        yield ConfigError("sandbox.sandbox", settings.kind, str(error))


def check_object_store(inspection: Inspection) -> Findings:
    """Raises for an object store that does not take, give, list or remove objects with the trainer's credentials."""
    weights = inspection.config.weights
    if weights.update_weight_transport == "s3":
        S3Client(weights.objects(inspection.config.run.name), ObjectStoreCredentials.of()).probe()
    yield from ()


def check_ingest(inspection: Inspection) -> Findings:
    """Yields a key that is not set where the gateways start, and a note where none starts here."""
    mode, gateways = inspection.config.ingest.ingest_groups, inspection.config.gateways
    if mode != "off" and not gateways:
        yield Note(f"ingest_groups is {mode} and gateway_replicas 0: groups come in by gateways that are started elsewhere")
    elif mode != "off" and inspection.starts:
        ingest_key()  # raises ConfigError
