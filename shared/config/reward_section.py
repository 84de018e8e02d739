"""`[reward]`: what scores."""

import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from shared.config.section import MUTABLE, Rule, Section, hook
from shared.environment import environment_url
from shared.runtime.errors import nearest

VERIFIERS = ("math", "exact")
"""Environments that come with the reward service."""

REMOTE = "remote_rm"
"""The environment of ``rm_url``."""

CUSTOM = "custom_rm"
"""The environment of ``custom_rm_path``."""


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class RewardSection(Section):
    """Scoring."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "group_rm",
            lambda reward, given: given and reward.custom_rm_path is None,
            "needs custom_rm_path, the function that takes a whole group",
        ),
    )

    rm_type: str = Field(
        default="math",
        description="what scores: math (math-verify), exact (match), remote_rm (the environment at rm_url) or a name of environments; "
        "a prompt's metadata.rm_type overrides it",
    )
    custom_rm_path: str | None = hook("that scores a sample, in place of rm_type and of every other environment")
    group_rm: bool = Field(default=False, description="custom_rm_path takes a whole group at once")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: the environment's reward")
    rm_url: str | None = Field(default=None, description="the environment of remote_rm: http://host:port or nats:NAME", **MUTABLE)
    environments: dict[str, str] = Field(default={}, description="more environments: name = http://host:port or nats:NAME", **MUTABLE)
    environment_concurrency: int = Field(
        default=16,
        gt=0,
        description="groups in the hands of an external environment, or of an async custom_rm_path, at once, for each reward service",
        **MUTABLE,
    )
    reward_timeout: float = Field(default=30, gt=0, description="seconds for scoring one group", **MUTABLE)
    reward_workers: int = Field(default=1, gt=0, description="processes of each verifier and of hooks in a reward service", **MUTABLE)
    worker_environment: list[str] = Field(
        default=[],
        description="environment variables that hooks of the reward service get besides PATH, HOME, LANG, TMPDIR and the like: "
        "the key of a judge, say",
        **MUTABLE,
    )
    reward_replicas: int = Field(default=1, gt=0, description="reward services that `myxo up` starts", **MUTABLE)

    def _misfits(self) -> Iterator[str]:
        taken = (*VERIFIERS, REMOTE, CUSTOM)
        for name, url in self.environments.items():
            if not environment_url.NAME.match(name):
                yield f"reward.environments: the name {name!r}: use 1 to 63 letters, digits, '-' and '_'"
            if name in taken:
                yield f"reward.environments: the name {name!r} is taken; {', '.join(taken[:-1])} and {CUSTOM} are there already"
            yield from _url_problems(f"reward.environments.{name}", url)
        for name in self.worker_environment:
            if not VARIABLE.match(name) or name.startswith(("NATS_URL", "REDIS_URL")):
                yield f"reward.worker_environment: {name!r}: use names of environment variables, without the credentials of NATS and Redis"
        if self.rm_url is not None:
            yield from _url_problems("reward.rm_url", self.rm_url)
        elif self.rm_type == REMOTE and self.custom_rm_path is None:
            yield f"reward.rm_url: required with rm_type = {REMOTE}: {environment_url.EXPECTED}"
        if self.custom_rm_path is None and self.rm_type not in (REMOTE, *self.environment_names()):
            yield f"reward.rm_type: no such verifier or environment; {nearest(self.rm_type, self.environment_names())}"

    @property
    def external(self) -> dict[str, str]:
        """Returns the environments outside of Myxo, name → URL; none if ``custom_rm_path`` replaces all of them."""
        if self.custom_rm_path is not None:
            return {}
        return {**({} if self.rm_url is None else {REMOTE: self.rm_url}), **self.environments}

    def environment_names(self) -> list[str]:
        """Returns every environment that a prompt of this run may name, built in or not; each has its own queue."""
        return sorted({*VERIFIERS, *self.external}) if self.custom_rm_path is None else [CUSTOM]

    def environment_of(self, named: str | None) -> str:
        """Returns the environment that scores a prompt. ``named``: the one that the prompt names, if any."""
        if self.custom_rm_path is not None:
            return CUSTOM
        return self.rm_type if named is None else named


def _url_problems(field: str, url: str) -> Iterator[str]:
    try:
        environment_url.parse(url)
    except ValueError as error:
        yield f"{field}: {error}"
