"""Checks of the agents that are commands; those that are functions are imported with all other functions (`machine_checks`)."""

import shutil

from myxo.preflight.inspection import Findings, Inspection
from shared.config.eval_views import agents
from shared.runtime.errors import ConfigError


def check_commands(inspection: Inspection) -> Findings:
    """Yields the commands whose program is not there, the agents' server among them."""
    config = inspection.config
    for field, command in (agents(config) | {"rollout.agent_service": config.rollout.agent_service or ""}).items():
        if isinstance(command, list) and shutil.which(command[0]) is None:
            yield ConfigError(
                field, command, f"a program that this machine has: {command[0]!r} is neither on PATH nor a file that can be run"
            )
