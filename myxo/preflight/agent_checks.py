"""Checks of gateways and of agents that are commands; agents that are functions are imported with all functions (`machine_checks`)."""

import importlib.util
import shutil

from myxo.preflight.inspection import Findings, Inspection
from shared.config.eval_views import agents
from shared.config.rollout_section import RolloutSection
from shared.runtime.errors import ConfigError
from shared.runtime.host import RuntimeFailed, runtime_answer


def check_commands(inspection: Inspection) -> Findings:
    """Yields the commands whose program is not there, the agents' server among them, and the image where that is not."""
    rollout = inspection.config.rollout
    commands = {field: agent for field, agent in agents(inspection.config).items() if isinstance(agent, list)}
    if rollout.agent_image is not None:
        yield from _image_problems(rollout, commands)
        commands = {}
    for field, command in (commands | {"rollout.agent_service": rollout.agent_service}).items():
        if command and shutil.which(command[0]) is None:
            yield ConfigError(
                field, command, f"a program that this machine has: {command[0]!r} is neither on PATH nor a file that can be run"
            )


def _image_problems(rollout: RolloutSection, commands: dict[str, list[str]]) -> Findings:
    if not commands:
        yield ConfigError("rollout.agent_image", rollout.agent_image, "belongs to agent_command, which is not there")
        return
    try:
        runtime_answer(rollout.agent_runtime, "image", "inspect", str(rollout.agent_image))
    except RuntimeFailed as error:
        yield ConfigError("rollout.agent_image", rollout.agent_image, f"an image that this machine has: {error}")


def check_gateways(inspection: Inspection) -> Findings:
    """Raises where gateways are to start that cannot."""
    if inspection.config.gateways and importlib.util.find_spec("renderers") is None:
        expected = "gateways need the package renderers: pip install 'myxo[gateway]', or 0 where they run on other machines"
        raise ConfigError("gateway.gateway_replicas", inspection.config.gateways, expected)
    yield from ()
