"""Checks that what a run's rewards need is there: packages of verifiers, a sandbox, and the judge's key."""

import os
from collections.abc import Iterator

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.eval_views import eval_views
from shared.config.reward_section import CUSTOM
from shared.config.run_config import RunConfig
from shared.rewards.names import RUNS_CODE, base, missing_package
from shared.runtime.errors import ConfigError
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable


def check_rewards(inspection: Inspection) -> Findings:
    """Yields the packages that are not installed, and a key that is not set where the services start."""
    for field, name in named_rewards(inspection.config):
        if (missing := missing_package(name)) is not None:
            yield ConfigError(field, name, missing)
    variable = inspection.config.reward.judge_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("reward.judge_key_variable", variable, "a variable that is set where `myxo up` starts")


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


def named_rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields the rewards that a config names, with the field that does; prompts may name others."""
    if config.reward.environment_of(None) != CUSTOM:
        yield "reward.rm_type", config.reward.rm_type
        yield from (("reward.reward_weights", name) for name in config.reward.reward_weights)
    for view in eval_views(config):
        if view.own.rm_type is not None and view.own.custom_rm_path is None:
            yield f"{view.field}.rm_type", view.own.rm_type
