"""The launch command of a run's engine, the same on all of its nodes, and what the run's config decides about that engine.

The decisions are pure: whether it keeps keys and values of prefixes, and for how many requests at once it captures its decode steps as
CUDA graphs.
"""

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.rollout.client_adapters import adapter_flags
from services.rollout.engine.engine_process import EngineCommand, EngineRendezvous, engine_command
from services.rollout.router_registration import router_url
from shared import hooks
from shared.bus.registry import MODEL
from shared.config import devices, sglang_flags
from shared.config.engine_limits import PREFILL_GRAPHS, captures_prefill, needed_model_config
from shared.config.rollout_section import APART, TRANSFER, transfer_backend
from shared.config.run_config import RunConfig
from shared.config.sglang_flags import plain_name
from shared.config.speculation import ALGORITHM, DRAFT, OF_THE_MODEL, speculation_flags, without_speculation
from shared.config.speculation import speculates as with_speculation
from shared.hooks.loading import agent_paths
from shared.model.families import architecture_of, read_architecture
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from shared.service.service_base import Service, default_instance
from shared.transfer import BATCH_INVARIANT


def keeps_prefixes(config: RunConfig, device: str, *, answers_are_read: bool) -> bool:
    """Returns whether an engine keeps prefixes, where ``[rollout.sglang] disable-radix-cache`` says nothing. ``device``: the engine's.
    ``answers_are_read``: by this service; not those of a router's clients and of the user's own functions."""
    separable = config.rollout.in_flight_on_push != "retract" and answers_are_read
    reproducible = config.rollout.seeded  # a prefix that is there or not may change a last bit
    # to look a prefix up costs more than to compute it, for a single turn of a model that a CPU can serve
    worth_it = device == "cuda" or config.has_agents or bool(config.rollout.engine_flags.get("enable-hierarchical-cache"))
    return separable and worth_it and not reproducible


def engine_speculation(config: RunConfig) -> dict[str, Any]:
    """Returns the engine's flags for `rollout.speculation`. Raises ConfigError: the checkpoint's ``config.json`` cannot be read."""
    rollout, entries = config.rollout, needed_model_config(config.model.hf_checkpoint) if config.rollout.speculation else {}
    flags = speculation_flags(rollout.speculation, rollout.sglang, entries)
    chosen = flags | rollout.engine_flags
    if str(chosen.get(ALGORITHM)).upper() in OF_THE_MODEL and not chosen.get(DRAFT):
        flags[DRAFT] = str(config.model.hf_checkpoint)  # SGLang knows that of some models alone
    if with_speculation(chosen) and devices.engines_release(config):
        flags["enable-draft-weights-cpu-backup"] = True  # no push brings a draft's weights back, where they are not trained
    return flags


FEWEST, MOST_CAPTURED = 256, 512  # the requests that are captured at least, as SGLang does by itself on large GPUs, and at most
FLAG = "cuda-graph-max-bs-decode"

# Flags by which a run says itself how many: the most, or a list.
SIZES = (FLAG, "cuda-graph-max-bs", "cuda-graph-bs-decode", "cuda-graph-bs")

# Flags after which no one can tell.
OTHERWISE = ("disable-cuda-graph", "disable-decode-cuda-graph", "cuda-graph-config", "cuda-graph-backend-decode")


def captured_requests(config: RunConfig, device: str) -> int | None:
    """Returns for how many requests the engine's decode steps are captured; None where that bounds nothing, or is not known."""
    given = config.rollout.engine_flags
    if device != "cuda" or any(given.get(name) for name in OTHERWISE):
        return None
    for name in SIZES:
        if given.get(name) is not None:
            sizes = given[name] if isinstance(given[name], list) else [given[name]]
            return max((int(size) for size in sizes if str(size).isdecimal()), default=None)
    if config.trainer.colocate:
        return FEWEST  # the trainer's memory is beside it
    return min(MOST_CAPTURED, max(FEWEST, config.rollout.rollout_concurrency or MOST_CAPTURED))


def graph_flags(config: RunConfig, device: str) -> dict[str, Any]:
    """Returns the engine's flags for it; none where the run has its own."""
    own = {plain_name(name) for name in config.rollout.sglang} & {*SIZES, *OTHERWISE}
    captured = captured_requests(config, device)
    return {} if own or captured is None or config.trainer.colocate else {FLAG: captured}


RUNNER, RECORD = "moe-runner-backend", "enable-return-routed-experts"
CHOSEN_FROM = 10.0  # the compute capability from which on SGLang takes kernels by itself for which it rearranges experts


def expert_flags(config: RunConfig, device: str) -> dict[str, Any]:
    """Returns the engine's flags for the record of each token's experts, and for kernels that keep one and take what is pushed: SGLang
    would take others for gpt-oss, and on new GPUs for most models.

    Raises ConfigError: the run asks for kernels that keep none.
    """
    kept, flags = config.trainer.use_rollout_routing_replay, config.rollout.engine_flags
    given, free = flags.get(RUNNER), config.pushes and flags.get("moe-a2a-backend") in (None, "none")
    if device == "cuda" and kept and read_architecture(config.model.hf_checkpoint).stacked_experts:
        if given not in (None, "auto", "triton"):
            wanted = "triton with use_rollout_routing_replay: others keep no record of the experts"
            raise ConfigError(f"rollout.sglang.{RUNNER}", given, wanted)
        return {RECORD: kept, RUNNER: "triton"}
    if device == "cuda" and free and given in (None, "auto") and architecture_of(config).experts is not None:
        return {RECORD: kept} | ({RUNNER: "triton"} if max(devices.gpu_capabilities(), default=0.0) >= CHOSEN_FROM else {})
    return {RECORD: kept}


BOOTSTRAP = "disaggregation-bootstrap-port"


def kind_flags(config: RunConfig, device: str) -> dict[str, Any]:
    """Returns the flags of a prefill or a decode engine; none of one that does both."""
    kind = config.rollout.worker_type
    if kind not in APART:
        return {}
    flags = {"disaggregation-mode": kind, TRANSFER: transfer_backend(config.rollout, device)}
    if kind == "prefill":
        return flags | {BOOTSTRAP: free_port()}
    return flags | ({"disaggregation-decode-retraction-backup": "cpu_tensor"} if device == "cpu" else {})


def parameter_flags(config: RunConfig, device: str, of_policy: bool = True) -> dict[str, Any]:
    """Returns the flag of a trained engine's parameters on a GPU. SGLang takes float16 for a checkpoint of float32, whose range the
    trainer's weights may leave; float32 that is pushed is cast, which `myxo.preflight` notes."""
    return {"dtype": "bfloat16"} if config.pushes and of_policy and device == "cuda" else {}


INSTANCE = "MYXO_INSTANCE"


def engine_name(config: RunConfig) -> str:
    """Returns the name of an engine over several nodes, which these find each other by. Raises ConfigError where none is given."""
    if not os.environ.get(INSTANCE):
        nodes = config.rollout.nodes_per_engine
        raise ConfigError(INSTANCE, None, f"required: a name of the engine, the same on each of its {nodes} nodes (rollout.sglang.nnodes)")
    return default_instance("rollout")


def external_engine(service: Service) -> str:
    """Returns the URL of the external engine that this service takes, by its own number; empty in a run of its own engines. Raises
    ConfigError."""
    urls, number = service.config.rollout.external_engines, service.instance.removeprefix("rollout-")
    if not urls or (number.isdecimal() and int(number) < len(urls)):
        return urls[int(number)] if urls else ""
    raise ConfigError(INSTANCE, service.instance, f"rollout-0 to rollout-{len(urls) - 1}: each takes its one of rollout.external_engines")


def engine_log(service: Service) -> Path:
    """Returns the log of this service's engine."""
    directory = os.environ.get("MYXO_LOG_DIR")
    root = Path(directory) if directory else service.config.run.root / "logs"
    return root / f"{service.instance}-engine.log"


def replica_command(service: Service, name: str, meeting: EngineRendezvous | None = None, speculates: bool = True) -> EngineCommand:
    """Returns the launch command of a replica's engine, or of one node's part of it. Raises ConfigError. ``name``: the replica's.
    ``meeting``: where the nodes' ranks meet; None: all ranks are on this machine. ``speculates``: as the run's flags have it, else not."""
    config, rollout = service.config, service.config.rollout
    device = devices.resolve(rollout.rollout_device)
    # else it has one rank, whatever its share of GPUs
    parallel = any((device == "cuda", meeting is not None, rollout.stages_per_engine > 1))
    flags: dict[str, Any] = {"tp-size": rollout.tensor_parallel} if parallel else {}
    own = hooks.paths(config, "rollout").keys() - agent_paths(config).keys()  # agents ask gateways, and these the replica
    answers_are_read = not (bool(router_url()) or own)
    flags["disable-radix-cache"] = service.name != MODEL and not keeps_prefixes(config, device, answers_are_read=answers_are_read)
    # others expect SGLang's own way: each part of a stream repeats all tokens before it
    flags["incremental-streaming-output"] = config.gateways > 0 and answers_are_read
    flags["trust-remote-code"] = config.model.trust_remote_code
    if config.kept_top_k and not sglang_flags.known_ones({"sampling-mask-max-tokens": 0}):
        expected = f"off: SGLang {sglang_flags.installed()} does not return the tokens that its sampler kept, as 0.5.20 does"
        raise ConfigError("trainer.support_replay", config.trainer.support_replay, expected)
    flags |= expert_flags(config, device) | graph_flags(config, device) | kind_flags(config, device)
    flags |= parameter_flags(config, device, service.name != MODEL)
    if devices.engines_release(config):
        flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": devices.engines_back_up(config)}
    flags |= engine_speculation(config) | adapter_flags(config, device)
    given = sglang_flags.present_names(rollout.sglang)  # auto is SGLang's own default, and would hide the choice above
    own_flags = {name: value for name, value in given.items() if (sglang_flags.plain_name(name), value) != (RUNNER, "auto")}
    if not speculates:
        flags, own_flags = without_speculation(flags), without_speculation(own_flags)
    if device == "cuda" and not captures_prefill({sglang_flags.plain_name(name): value for name, value in own_flags.items()}):
        flags |= sglang_flags.known_ones({PREFILL_GRAPHS: "disabled"})
    command = engine_command(
        config.model.hf_checkpoint,
        free_port(),
        device=device,
        random_seed=config.data.rollout_seed + zlib.crc32(name.encode()) % 2**20,  # replicas sample differently
        flags=flags | rollout.alignment_flags | own_flags,
        meeting=meeting,
    )
    return replace(command, env=command.env | {BATCH_INVARIANT: "1"}) if rollout.alignment == "bitwise" else command
