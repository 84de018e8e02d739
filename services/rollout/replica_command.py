"""The launch command of a run's engine, the same on all of its nodes, made from the run's config and this service's environment."""

import os
import zlib
from pathlib import Path
from typing import Any

from services.rollout.engine.decode_graphs import graph_flags
from services.rollout.engine.launch_command import EngineCommand, EngineMeeting, engine_command
from services.rollout.prefix_cache import keeps_prefixes
from services.rollout.router import router_url
from shared import hooks
from shared.config import devices, sglang_flags
from shared.config.engine_limits import PREFILL_GRAPHS, captures_prefill
from shared.config.run_config import RunConfig
from shared.hooks.loading import agent_paths
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from shared.service.service_base import Service, default_instance

INSTANCE = "MYXO_INSTANCE"


def engine_name(config: RunConfig) -> str:
    """Returns the name of an engine over several nodes, which these find each other by. Raises ConfigError where none is given."""
    if not os.environ.get(INSTANCE):
        nodes = config.rollout.nodes_per_engine
        raise ConfigError(INSTANCE, None, f"required: a name of the engine, the same on each of its {nodes} nodes (rollout.sglang.nnodes)")
    return default_instance("rollout")


def engine_log(service: Service) -> Path:
    """Returns the log of this service's engine."""
    directory = os.environ.get("MYXO_LOG_DIR")
    root = Path(directory) if directory else service.config.run.root / "logs"
    return root / f"{service.instance}-engine.log"


def replica_command(service: Service, name: str, meeting: EngineMeeting | None = None) -> EngineCommand:
    """Returns the launch command of a replica's engine, or of one node's part of it. Raises ConfigError.

    Args:
        name: the replica's. meeting: where the nodes' ranks meet; None: all ranks are on this machine.
    """
    config, rollout = service.config, service.config.rollout
    device = devices.resolve(rollout.rollout_device)
    tensor_parallel = device == "cuda" or meeting is not None  # an engine on one CPU has one rank, whatever its share of GPUs
    flags: dict[str, Any] = {"tp-size": rollout.rollout_num_gpus_per_engine} if tensor_parallel else {}
    own = hooks.paths(config, "rollout").keys() - agent_paths(config).keys()  # agents ask gateways, and these the replica
    answers_are_read = not (bool(router_url()) or own)
    flags["disable-radix-cache"] = not keeps_prefixes(config, device, answers_are_read=answers_are_read)
    # others expect SGLang's own way: each part of a stream repeats all tokens before it
    flags["incremental-streaming-output"] = config.gateways > 0 and answers_are_read
    flags["trust-remote-code"] = config.model.trust_remote_code
    flags["enable-return-routed-experts"] = config.trainer.use_rollout_routing_replay
    flags |= graph_flags(config, device)
    if devices.engines_release(config):
        flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": devices.engines_back_up(config)}
    own_flags = sglang_flags.present_names(rollout.sglang)
    if device == "cuda" and not captures_prefill({sglang_flags.plain_name(name): value for name, value in own_flags.items()}):
        flags |= sglang_flags.known_ones({PREFILL_GRAPHS: "disabled"})
    return engine_command(
        config.model.hf_checkpoint,
        free_port(),
        device=device,
        random_seed=config.data.rollout_seed + zlib.crc32(name.encode()) % 2**20,  # replicas draw different samples
        flags=flags | own_flags,
        meeting=meeting,
    )
