"""`[reward]`: what scores."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shared.config.environment_variables import VARIABLE
from shared.config.rollout_section import MODEL_NAME
from shared.config.section import MUTABLE, Rule, Section, Table, hook, read_where
from shared.environment import environment_url as address
from shared.rewards.names import GIVEN, QUEUES, VERIFIERS, queue_of
from shared.runtime.errors import nearest
from shared.schema.sample import ScoredText

OWN = "environment"  # The environment of ``environment_url``
CUSTOM = "custom_rm"  # The environment of ``custom_rm_path``
REMOTE = "remote_rm"  # The environment of ``rm_url``
JUDGE = "judge"  # The environment of ``judge_url`` for each response
TOURNAMENT = "tournament"  # The environment of ``judge_url`` for whole groups
WEIGHTED = "weighted"  # The environment of ``reward_weights``

JUDGE_PROMPT = """Judge an answer to a task.

Task:
{prompt}

Right answer, if one is known:
{label}

Answer:
{response}

Say in one sentence whether the answer is right and complete. Then write on a line of its own a score from 0 (wrong) to 1 (right), such as:
Score: 0.5"""


PAIR_PROMPT = """Compare two answers to a task.

Task:
{prompt}

Right answer, if one is known:
{label}

Answer A:
{first}

Answer B:
{second}

Say in one sentence which is better, and why; neither their order nor their length counts. Then write on a line of its own [[A]], [[B]], or
[[C]] for a tie."""


class RewardSection(Section):
    """Scoring."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *read_where(lambda reward: reward.custom_rm_path, "needs custom_rm_path, the function that takes a whole group", "group_rm"),
        Rule("environment_url", lambda _, given: address.problem(given)),
        Rule("rm_url", lambda _, given: address.problem(given, address.check_server)),
        Rule("judge_url", lambda reward, _: address.problem(reward._judge_server, address.check_server)),
        Rule(("answer_pattern", "judge_pattern", "judge_pair_pattern"), lambda _, given: given is not None and _pattern_problem(given)),
    )

    rm_type: str = Field(
        default="math_verify",
        description=f"what scores: {', '.join(QUEUES)}, one of these behind boxed_, remote_rm (the server at rm_url), environment (the "
        "one at environment_url), a name of environments, judge (the model at judge_url), tournament (the same, which compares the samples "
        "of a group), weighted (reward_weights), given (samples come with their rewards); a prompt's metadata.rm_type overrides it",
    )
    reward_weights: dict[str, float] = Field(
        default={},
        description="the rewards that rm_type = weighted adds up, name = weight: names as for rm_type, and custom_rm for custom_rm_path",
    )
    custom_rm_path: str | None = hook("that scores a sample, in place of rm_type (unless that is weighted) and of every other environment")
    group_rm: bool = Field(default=False, description="custom_rm_path takes a whole group at once")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: the environment's reward")
    eval_reward_key: str | None = Field(default=None, description="the same for held-out prompts; default: reward_key")
    answer_pattern: str | None = Field(
        default=None,
        description="a regular expression: verifiers of rm_type and reward_weights get its last match in a response (of a pattern with a "
        "group, what that holds) in place of the whole response",
    )
    scored_text: ScoredText = Field(
        default="own",
        description="what of a response is scored: own: what the model itself sampled, its turns on lines of their own, without what tools "
        "and environments wrote between them; last_turn: the last of these turns; full: all of it; a custom_rm_path gets all of it, and "
        "the turns beside it",
    )
    rm_url: str | None = Field(
        default=None,
        description="the server of rm_type = remote_rm: it is sent prompt, response and label of each sample, and answers with the reward",
        **MUTABLE,
    )
    rm_timeout: float = Field(default=120, gt=0, description="seconds for each request to rm_url", **MUTABLE)
    rm_tries: int = Field(default=10, gt=0, description="how often a sample is sent to rm_url at most, with growing pauses", **MUTABLE)
    judge_url: str | None = Field(
        default=None,
        description="the endpoint of rm_type = judge, which speaks OpenAI's chat completions: http://host:port/v1, or the name of a frozen "
        "model of [rollout.models]",
        **MUTABLE,
    )
    judge_model: str | None = Field(default=None, description="the judge's model, as its endpoint calls it; of a frozen model its own name")
    judge_prompt: str = Field(default=JUDGE_PROMPT, description="what the judge is asked, with {prompt}, {response} and {label} in it")
    judge_sampling: Table = Field(default={"temperature": 0.0, "max_tokens": 1024}, description="more fields of the request to the judge")
    judge_pattern: str = Field(
        default=r"(?i)score:\s*(-?\d+(?:\.\d+)?)", description="a regular expression: its last match in the judge's words is the score"
    )
    judge_scores: dict[str, float] = Field(
        default={}, description="what the words are worth that judge_pattern finds: yes = 1.0; default: they are numbers"
    )
    judge_tournament: Literal["round_robin", "anchor", "single_elimination", "double_elimination", "swiss"] = Field(
        default="single_elimination",
        description="rm_type = tournament: who is compared with whom; a group of n takes n(n-1)/2, n-1, 2(n-1), 2(n-1) and about "
        "n/2 log2 n comparisons",
    )
    judge_pair_prompt: str = Field(
        default=PAIR_PROMPT, description="what the judge is asked of two responses, with {prompt}, {label}, {first} and {second} in it"
    )
    judge_pair_pattern: str = Field(
        default=r"\[\[(\w+)\]\]", description="a regular expression: its last match in the judge's words says which of two is better"
    )
    judge_pair_points: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={"A": 1.0, "B": 0.0, "C": 0.5}, description="the points of the first of two, from 0 to 1, by what judge_pair_pattern finds"
    )
    judge_both_orders: bool = Field(default=True, description="the judge is asked about two responses in both orders, and the mean counts")
    judge_key_variable: str | None = Field(
        default=None, description="the environment variable of the reward service that holds the key of judge_url", **MUTABLE
    )
    judge_concurrency: int = Field(default=64, gt=0, description="requests to the judge at once, for each reward service", **MUTABLE)
    judge_timeout: float = Field(default=120, gt=0, description="seconds for each request to the judge", **MUTABLE)
    judge_tries: int = Field(default=5, gt=0, description="how often the judge is asked at most, with growing pauses", **MUTABLE)
    judge_cache: Path | None = Field(
        default=None, description="an SQLite file that keeps what the judge has said; default: in memory alone", **MUTABLE
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
    reward_timeout: float = Field(
        default=30, gt=0, description="seconds for scoring one group; remote_rm and judge have timeouts of their own", **MUTABLE
    )
    reward_workers: int = Field(default=1, gt=0, description="processes of each verifier and of hooks in a reward service", **MUTABLE)
    worker_environment: list[str] = Field(
        default=[],
        description="environment variables that hooks of the reward service get besides PATH, HOME, LANG, TMPDIR and the like: "
        "the key of a judge, say",
        **MUTABLE,
    )
    reward_replicas: int = Field(default=1, gt=0, description="reward services that `myxo up` starts", **MUTABLE)

    def _misfits(self) -> Iterator[str]:
        taken = (*VERIFIERS, GIVEN, OWN, CUSTOM, REMOTE, JUDGE, TOURNAMENT, WEIGHTED, *QUEUES.values())
        for name, url in self.environments.items():
            if not address.NAME.match(name):
                yield f"reward.environments: the name {name!r}: use 1 to 63 letters, digits, '-' and '_'"
            if name in taken:
                yield f"reward.environments: the name {name!r} is taken by Myxo's own"
            if wrong := address.problem(url):
                yield f"reward.environments.{name}: {wrong}"
        for name in self.worker_environment:
            if not VARIABLE.match(name) or name.startswith(("NATS_URL", "REDIS_URL")):
                yield f"reward.worker_environment: {name!r}: use names of environment variables, without the credentials of NATS and Redis"
        yield from self._missing()
        if self.judge_key_variable is not None and not VARIABLE.match(self.judge_key_variable):
            yield "reward.judge_key_variable: expected the name of an environment variable, not its value"

    def _missing(self) -> Iterator[str]:
        """Yields what rm_type and reward_weights ask for and the section does not give."""
        if self.reward_weights and self.rm_type != WEIGHTED:
            yield f"reward.reward_weights: is for rm_type = {WEIGHTED}"
        if not self.reward_weights and self.rm_type == WEIGHTED:
            yield f"reward.reward_weights: required with rm_type = {WEIGHTED}: name = weight"
        if self._judge_server is not None and self.judge_model is None:
            yield "reward.judge_model: required with judge_url: the model's name at that endpoint"
        if self._replaced:
            return
        names = self.environment_names()
        for field, wanted in (("rm_type", [self.rm_type]), ("reward_weights", self.reward_weights)):
            for name in wanted:
                needed, expected = _NEEDS.get(name, ("", ""))
                if needed and getattr(self, needed) is None:
                    yield f"reward.{needed}: required with {field} = {name}: {expected}"
                elif name not in (*names, WEIGHTED) or (field == "reward_weights" and name in (WEIGHTED, GIVEN)):
                    yield f"reward.{field}: no such verifier or environment; {nearest(name, names)}"

    @property
    def _judge_server(self) -> str | None:
        """Returns the judge's address; None where there is no judge, or it is a frozen model."""
        return None if self.judge_url is None or re.match(MODEL_NAME, self.judge_url) else self.judge_url

    @property
    def _replaced(self) -> bool:
        """Returns whether ``custom_rm_path`` scores in place of everything else."""
        return self.custom_rm_path is not None and self.rm_type != WEIGHTED

    @property
    def external(self) -> dict[str, str]:
        """Returns the environments outside of Myxo, name → URL; none if ``custom_rm_path`` replaces all of them."""
        if self._replaced:
            return {}
        return {**({} if self.environment_url is None else {OWN: self.environment_url}), **self.environments}

    def environment_names(self) -> list[str]:
        """Returns every environment that a prompt of this run may name, built in or not."""
        if self._replaced:
            return [CUSTOM]
        judged = dict.fromkeys((JUDGE, TOURNAMENT), self.judge_url)
        given = {REMOTE: self.rm_url, **judged, WEIGHTED: self.reward_weights or None, CUSTOM: self.custom_rm_path}
        return sorted({*VERIFIERS, GIVEN, *self.external, *(name for name, value in given.items() if value is not None)})

    def queues(self) -> list[str]:
        """Returns the queues of the run's environments: verifiers that need the same libraries share one."""
        return sorted({queue_of(name) for name in self.environment_names()})

    def environment_of(self, named: object) -> str:
        """Returns the environment that scores a prompt. ``named``: the one that the prompt names, if any."""
        if self._replaced:
            return CUSTOM
        return str(named or self.rm_type).strip()

    def key(self, evaluation: bool) -> str | None:
        """Returns the name of the reward that counts; None where the run names none."""
        return self.eval_reward_key or self.reward_key if evaluation else self.reward_key


_NEEDS = {
    OWN: ("environment_url", address.EXPECTED),
    REMOTE: ("rm_url", "http://host:port/path"),
    JUDGE: ("judge_url", "http://host:port/v1"),
    TOURNAMENT: ("judge_url", "http://host:port/v1"),
    CUSTOM: ("custom_rm_path", "package.module:function"),
}
"""The field that an environment needs, and what it holds."""


def _pattern_problem(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"no regular expression: {error}"
    return f"has {groups} groups; expected one at most, other brackets as (?:…)" if groups > 1 else ""
