"""The agent that plays a task's rollouts, the data that it gets of them, and the rewards in its result. It is pure."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.config.eval_views import eval_view
from shared.config.run_config import RunConfig
from shared.hooks import HookFailed, reward_values
from shared.rewards.reference import Reference
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task

Rewards = float | dict[str, float]  # a reward, or several by name


@dataclass(frozen=True)
class AgentProgram:
    """An agent. ``field``: where the config names it. ``function``: its path, empty for a ``command``. ``reward_key``: see `reward`.
    ``options``: given to it besides its task. ``roles``: of those that play together; ("",) where one plays."""

    field: str
    function: str
    command: tuple[str, ...]
    reward_key: str | None
    options: Mapping[str, Any]
    roles: tuple[str, ...] = ("",)

    @property
    def path(self) -> str:
        """Returns the function's path, or the command line, for errors."""
        return self.function or " ".join(self.command)

    def failed(self, reason: str, *, disruptive: bool = False) -> HookFailed:
        """Returns the error of a rollout that the agent has no result for; ``disruptive`` as `HookFailed` has it."""
        return HookFailed(self.field, self.path, " ".join(reason.split()), disruptive)

    def reward(self, result: object) -> Rewards | None:
        """Returns the reward in an agent's result: a number, or named ones of which one counts; None: the run's reward scores it. Raises
        HookFailed that says what would be valid."""
        if result is None:
            return None
        try:
            given = reward_values.plain(result)
            reward_values.read(given, self.reward_key)  # the one that counts is there
            return given
        except ValueError as error:
            raise self.failed(f"returned an invalid reward: {error}") from None

    def rewards(self, result: object) -> dict[str, Rewards | None]:
        """Returns the reward of each role in an agent's result, as `reward` does."""
        try:
            return {role: self.reward(given) for role, given in by_role(result, self.roles).items()}
        except ValueError as error:
            raise self.failed(str(error)) from None

    def named(self, reward: Rewards | None, role: str) -> Rewards | None:
        """Returns a role's reward with what counts of it under the role's name, too: it is a metric of its own."""
        if reward is None or not role:
            return reward
        key = self.reward_key or reward_values.REWARD
        return {role: reward, key: reward} if isinstance(reward, float) else {role: reward[key], **reward}


def by_role(result: object, roles: Sequence[str]) -> dict[str, object]:
    """Returns what an agent's result gives to each role: its own where the result is by role, else the same to all. Raises ValueError where
    some roles have one and others none."""
    if not isinstance(result, Mapping) or result.keys().isdisjoint(roles):
        return dict.fromkeys(roles, result)
    if result.keys() != set(roles):
        raise ValueError(f"gave rewards of {', '.join(map(str, result))}; expected one of each role: {', '.join(roles)}")
    return {role: result[role] for role in roles}


def agent_program(config: RunConfig, group: str) -> AgentProgram | None:
    """Returns the agent that plays a group's rollouts, its set's or the run's; None where none does."""
    view = eval_view(config, group)
    seen = config if view is None else view.config
    rollout, key = seen.rollout, seen.reward.reward_key
    section = "rollout" if view is None or not view.own.generators else view.field
    more = (key, rollout.agent_options, tuple(rollout.agent_roles) or ("",))
    if rollout.agent:
        return AgentProgram(f"{section}.agent", rollout.agent, (), *more)
    if rollout.agent_command:
        return AgentProgram(f"{section}.agent_command", "", tuple(rollout.agent_command), *more)
    return None


def agent_data(task: Task, rollout: int, model: str, options: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Returns an agent's data of its rollout: the prompt as messages and as it stands in the file, what belongs to it, the model.
    ``roles``: the key of each, by name; empty where one plays."""
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
        "roles": roles,
        "evaluation": is_evaluation(task.group),
    }


def with_pictures(messages: Any, pictures: Iterable[bytes]) -> Any:
    """Returns a prompt's messages with its pictures as parts that the gateway takes of OpenAI's clients. ``pictures``: PNGs, in order."""
    urls = (f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures)

    def shown(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [{"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part for part in content]

    return [{**message, "content": shown(message["content"])} for message in messages]


def environment_of(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables by which OpenAI's and Anthropic's clients find the gateway. Anthropic's appends ``/v1`` itself."""
    root = base_url.removesuffix("/v1")
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": api_key}
