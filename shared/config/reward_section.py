"""`[reward]`: what scores."""

import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from shared.config.environment_variables import VARIABLE
from shared.config.section import MUTABLE, Rule, Section, hook
from shared.environment import environment_url as address
from shared.rewards.names import QUEUES, VERIFIERS, queue_of
from shared.runtime.errors import nearest

OWN = "environment"
"""The environment of ``environment_url``."""

CUSTOM = "custom_rm"
"""The environment of ``custom_rm_path``."""


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
        default="math_verify",
        description=f"what scores: {', '.join(QUEUES)}, one of these behind boxed_, environment (the one at environment_url) or a name of "
        "environments; a prompt's metadata.rm_type overrides it",
    )
    custom_rm_path: str | None = hook("that scores a sample, in place of rm_type and of every other environment")
    group_rm: bool = Field(default=False, description="custom_rm_path takes a whole group at once")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: the environment's reward")
    eval_reward_key: str | None = Field(default=None, description="the same for held-out prompts; default: reward_key")
    answer_pattern: str | None = Field(
        default=None,
        description="a regular expression: the verifier of rm_type gets its last match in a response (of a pattern with a group, what that "
        "holds) in place of the whole response",
    )
    environment_url: str | None = Field(
        default=None, description="the environment of rm_type = environment: http://host:port or nats:NAME", **MUTABLE
    )
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
        taken = (*VERIFIERS, OWN, CUSTOM, *QUEUES.values())
        for name, url in self.environments.items():
            if not address.NAME.match(name):
                yield f"reward.environments: the name {name!r}: use 1 to 63 letters, digits, '-' and '_'"
            if name in taken:
                yield f"reward.environments: the name {name!r} is taken by Myxo's own"
            yield from _url_problems(f"reward.environments.{name}", url)
        for name in self.worker_environment:
            if not VARIABLE.match(name) or name.startswith(("NATS_URL", "REDIS_URL")):
                yield f"reward.worker_environment: {name!r}: use names of environment variables, without the credentials of NATS and Redis"
        if self.environment_url is not None:
            yield from _url_problems("reward.environment_url", self.environment_url)
        elif self.rm_type == OWN and self.custom_rm_path is None:
            yield f"reward.environment_url: required with rm_type = {OWN}: {address.EXPECTED}"
        if self.answer_pattern is not None:
            yield from _pattern_problems(self.answer_pattern)
        if self.custom_rm_path is None and self.rm_type not in (OWN, *self.environment_names()):
            yield f"reward.rm_type: no such verifier or environment; {nearest(self.rm_type, self.environment_names())}"

    @property
    def external(self) -> dict[str, str]:
        """Returns the environments outside of Myxo, name → URL; none if ``custom_rm_path`` replaces all of them."""
        if self.custom_rm_path is not None:
            return {}
        return {**({} if self.environment_url is None else {OWN: self.environment_url}), **self.environments}

    def environment_names(self) -> list[str]:
        """Returns every environment that a prompt of this run may name, built in or not."""
        return sorted({*VERIFIERS, *self.external}) if self.custom_rm_path is None else [CUSTOM]

    def queues(self) -> list[str]:
        """Returns the queues of the run's environments: verifiers that need the same libraries share one."""
        return sorted({queue_of(name) for name in self.environment_names()})

    def environment_of(self, named: object) -> str:
        """Returns the environment that scores a prompt. ``named``: the one that the prompt names, if any."""
        if self.custom_rm_path is not None:
            return CUSTOM
        return str(named or self.rm_type).strip()

    def key(self, evaluation: bool) -> str | None:
        """Returns the name of the reward that counts; None where the run names none."""
        return self.eval_reward_key or self.reward_key if evaluation else self.reward_key


def _pattern_problems(pattern: str) -> Iterator[str]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"reward.answer_pattern: no regular expression: {error}"
        return
    if groups > 1:
        yield f"reward.answer_pattern: has {groups} groups; expected one at most, other brackets as (?:…)"


def _url_problems(field: str, url: str) -> Iterator[str]:
    try:
        address.parse(url)
    except ValueError as error:
        yield f"{field}: {error}"
