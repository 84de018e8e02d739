"""The rank of this node among those of a trainer, or of an engine, over several machines."""

import os
from collections.abc import Mapping

from shared.runtime.errors import ConfigError

NODE_RANK = "MYXO_NODE_RANK"

RANK_VARIABLES = (NODE_RANK, "SLURM_NODEID", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX")
"""Where the rank stands, first match: given by hand, by SLURM (one task a node), by an indexed Job or a
LeaderWorkerSet of Kubernetes."""


def node_rank(nodes: int, environment: Mapping[str, str] = os.environ, *, of: str = "the trainer") -> int:
    """Returns this node's rank, 0 to ``nodes`` - 1; ``of``: whose nodes. Raises ConfigError that names the variable."""
    for variable in RANK_VARIABLES:
        if given := environment.get(variable, "").strip():
            if not given.isdecimal() or int(given) >= nodes:
                raise ConfigError(variable, given, f"the rank of this node, 0 to {nodes - 1}: {of} has {nodes} nodes")
            return int(given)
    expected = f"the rank of this node, 0 to {nodes - 1}, in the environment of each of {of}'s {nodes} nodes"
    raise ConfigError(NODE_RANK, None, f"{expected} (or {', '.join(RANK_VARIABLES[1:])})")
