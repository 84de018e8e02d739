"""What plays a task's rollouts, what it is told of them, and what its result says. It is pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.eval_views import eval_view
from shared.config.run_config import RunConfig
from shared.hooks import HookFailed, reward_values
from shared.rewards.reference import Reference
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task

Rewards = float | dict[str, float]
"""A reward, or several by name."""


@dataclass(frozen=True)
class AgentProgram:
    """An agent. ``field``: where the config names it. ``function``: its path, empty for a ``command``. ``reward_key``: see `reward`.

    ``options``: what it is told besides its task."""

    field: str
    function: str
    command: tuple[str, ...]
    reward_key: str | None
    options: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Returns the function's path, or the command line, for errors."""
        return self.function or " ".join(self.command)

    def failed(self, reason: str, *, disruptive: bool = False) -> HookFailed:
        """Returns the error of a rollout that the agent has no result for; ``disruptive`` as `HookFailed` has it."""
        return HookFailed(self.field, self.path, " ".join(reason.split()), disruptive)

    def reward(self, result: object) -> Rewards | None:
        """Returns the reward in an agent's result: a number, or named ones of which one counts; None: the run's reward scores it.

        Raises HookFailed that says what would be valid.
        """
        if result is None:
            return None
        try:
            given = reward_values.plain(result)
            reward_values.read(given, self.reward_key)  # the one that counts is there
            return given
        except ValueError as error:
            raise self.failed(f"gave a reward that is none: {error}") from None


def agent_program(config: RunConfig, group: str) -> AgentProgram | None:
    """Returns the agent that plays a group's rollouts, its set's or the run's; None where none does."""
    view = eval_view(config, group)
    seen = config if view is None else view.config
    rollout, key = seen.rollout, seen.reward.reward_key
    section = "rollout" if view is None or not view.own.generators else view.field
    if rollout.agent:
        return AgentProgram(f"{section}.agent", rollout.agent, (), key, rollout.agent_options)
    if rollout.agent_command:
        return AgentProgram(f"{section}.agent_command", "", tuple(rollout.agent_command), key, rollout.agent_options)
    return None


def agent_data(task: Task, rollout: int, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an agent is told of its rollout: the prompt as messages and as it stands in the file, what belongs to it, the model."""
    messages = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
    return {
        "messages": messages,
        "prompt": task.prompt,
        "label": Reference(task.label, task.label_json).value,
        "metadata": task.metadata,
        "model": model,
        "options": options,
        "group": task.group,
        "rollout": rollout,
        "evaluation": is_evaluation(task.group),
    }


def environment_of(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables by which OpenAI's and Anthropic's clients find the gateway. Anthropic's appends ``/v1`` itself."""
    root = base_url.removesuffix("/v1")
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": api_key}
