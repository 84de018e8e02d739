"""What a set of held-out prompts leaves to the run: the run's config as each set sees it.

The order is slime's: the set's own field, then the field of ``[eval]``, then the run's. Two exceptions, slime's as well: a prompt's length
has no bound of the run's, and a set's ``rm_type`` goes into the metadata of its prompts, so that it wins over what they name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.config.eval_section import EvalSet
from shared.config.reward_section import CUSTOM
from shared.config.rollout_section import GENERATORS
from shared.config.run_config import RunConfig
from shared.data.data_files import DataFile
from shared.rewards.names import missing_package
from shared.runtime.errors import ConfigError
from shared.schema.ledger import eval_group_parts

_FIELDS: dict[str, dict[str, tuple[str, str | None]]] = {
    "rollout": {
        "rollout_temperature": ("temperature", "eval_temperature"),
        "rollout_top_p": ("top_p", "eval_top_p"),
        "rollout_top_k": ("top_k", "eval_top_k"),
        "rollout_max_response_len": ("max_response_len", "eval_max_response_len"),
        "rollout_stop": ("stop", None),
        "rollout_stop_token_ids": ("stop_token_ids", None),
        "n_samples_per_prompt": ("n_samples_per_eval_prompt", "n_samples_per_eval_prompt"),
        **{name: (name, None) for name in (*GENERATORS, "agent_options", "agent_roles")},
    },
    "data": {
        "input_key": ("input_key", "eval_input_key"),
        "label_key": ("label_key", "eval_label_key"),
        "tool_key": ("tool_key", "eval_tool_key"),
        **{name: (name, None) for name in ("metadata_key", "apply_chat_template", "apply_chat_template_kwargs")},
    },
    "reward": {"custom_rm_path": ("custom_rm_path", None)},
}
"""Section → field of the run → field of a set, and of ``[eval]`` where there is one."""


@dataclass(frozen=True)
class EvalView:
    """One set of a run. ``field``: where the config names it."""

    run: RunConfig
    field: str
    own: EvalSet

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def files(self) -> list[DataFile]:
        return self.own.path

    @cached_property
    def config(self) -> RunConfig:
        """Returns the run's config with the set's values in the place of those for training prompts."""
        sections = {name: self._section(name, fields) for name, fields in _FIELDS.items()}
        return self.run.model_copy(update=sections)

    @property
    def metadata(self) -> dict[str, Any]:
        """Returns what is put into the metadata of the set's prompts, over what they have."""
        return {**({} if self.own.rm_type is None else {"rm_type": self.own.rm_type}), **(self.own.metadata_overrides or {})}

    @property
    def min_new_tokens(self) -> int:
        return next((given for given in (self.own.min_new_tokens, self.run.eval.eval_min_new_tokens) if given is not None), 0)

    @property
    def max_context_len(self) -> int | None:
        """Returns the most tokens of a prompt and its response together; None: no bound but the engine's."""
        return self.run.eval.eval_max_context_len if self.own.max_context_len is None else self.own.max_context_len

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns the chat template's variables that the set has otherwise than the run; None for those that it does not have."""
        own, run = self.config.data.apply_chat_template_kwargs, self.run.data.apply_chat_template_kwargs
        return {name: own.get(name) for name in {**run, **own} if own.get(name) != run.get(name)}

    def _section(self, name: str, fields: dict[str, tuple[str, str | None]]) -> Any:
        values: dict[str, Any] = {}
        for field, (own, shared) in fields.items():
            for value in (getattr(self.own, own), None if shared is None else getattr(self.run.eval, shared)):
                if value is not None:
                    values.setdefault(field, value)
        if name == "rollout":
            if self.own.generators:  # it takes the place of whichever the run has
                values = dict.fromkeys(GENERATORS) | {"agent_command": [], "agent_roles": []} | values
            given = self.run.eval.eval_max_prompt_len if self.own.max_prompt_len is None else self.own.max_prompt_len
            context = None if self.max_context_len is None else self.max_context_len - 1  # room for one token at least
            values["rollout_max_prompt_len"] = min((length for length in (given, context) if length is not None), default=None)
        if name == "reward":
            values["reward_key"] = self.own.reward_key or self.run.reward.key(evaluation=True)
            values |= {"rm_type": CUSTOM} if self.own.custom_rm_path else {}  # which replaces weights, too
        return getattr(self.run, name).model_copy(update=values)


def eval_views(config: RunConfig) -> list[EvalView]:
    """Returns the sets of a run, in the order in which it names them."""
    return [EvalView(config, field, item) for field, item in config.eval.named.items()]


def named_rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the rewards that a config names, with the field that does; prompts may name others."""
    if config.reward.environment_of(None) != CUSTOM:
        yield "reward.rm_type", config.reward.rm_type
        yield from (("reward.reward_weights", name) for name in config.reward.reward_weights)
    for view in eval_views(config):
        if view.own.rm_type is not None and view.config.reward.environment_of(view.own.rm_type) != CUSTOM:
            yield f"{view.field}.rm_type", view.own.rm_type


def missing_packages(config: RunConfig) -> Iterator[ConfigError]:
    """Yields an error for each reward that a config names whose package is not installed."""
    for field, name in named_rewards(config):
        if (missing := missing_package(name)) is not None:
            yield ConfigError(field, name, missing)


def eval_view(config: RunConfig, group: str) -> EvalView | None:
    """Returns the set that a group is of; None for a training group, and for a set that the run does not have any more."""
    parts = eval_group_parts(group)
    return None if parts is None else next((view for view in eval_views(config) if view.name == parts[0]), None)


def group_config(config: RunConfig, group: str) -> RunConfig:
    """Returns the run's config as a group sees it: with the values of its set of held-out prompts, where it is of one."""
    view = eval_view(config, group)
    return config if view is None else view.config


def reward_key(config: RunConfig, group: str) -> str | None:
    """Returns which of several named rewards of a group counts; None: the one that is called reward."""
    return group_config(config, group).reward.reward_key


def reward_field(config: RunConfig, group: str) -> str:
    """Returns the field of the function that scores a group, where one does: that of its set, or the run's."""
    view = eval_view(config, group)
    return "reward.custom_rm_path" if view is None or view.own.custom_rm_path is None else f"{view.field}.custom_rm_path"


def functions_of_sets(config: RunConfig, *names: str) -> dict[str, str]:
    """Returns the functions that sets have of their own in fields of these names: the field, as `RunConfig` errors name it → the path."""
    found = {f"{view.field}.{name}": getattr(view.own, name) for view in eval_views(config) for name in names}
    return {field: path for field, path in found.items() if path is not None}


def agents(config: RunConfig) -> dict[str, str | list[str]]:
    """Returns the agents of a run and of its sets, functions and commands, by field."""
    sections = {"rollout": config.rollout} | {view.field: view.own for view in eval_views(config)}
    found = {f"{field}.{name}": getattr(section, name) for field, section in sections.items() for name in ("agent", "agent_command")}
    return {field: agent for field, agent in found.items() if agent}
