"""Scores groups: by verifiers and the user's functions in worker processes, by environments outside of Myxo, or by a weighted sum of
several. The rewards themselves are computed in `shared.rewards`.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.reward.custom_functions import FilterResult, is_scoring
from shared.bus.connection import TRANSIENT
from shared.bus.registry import ENVIRONMENT
from shared.config.eval_views import group_config, reward_field, reward_key
from shared.config.reward_section import CUSTOM, WEIGHTED, RewardSection
from shared.config.run_config import RunConfig
from shared.config.service_sections import SandboxSection
from shared.environment.protocol import OF_PROMPT, Environment, EnvironmentAway, EnvironmentFailed, ScoreRequest, ScoreSample, first_problem
from shared.hooks import paths, reward_values
from shared.process.worker_pool import LOOP_SECONDS, CallLate, WorkerDied, WorkerFailed, WorkerPool
from shared.rewards.names import GIVEN, needs_label, pattern_of, queue_of, wrong
from shared.rewards.reference import Reference, label_problem
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded, MyxoError, nearest
from shared.runtime.tasks import doubling, gathered
from shared.schema import sample
from shared.schema.message import MAX_PARTS
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score, scored_text
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service

_MODULE = "services.reward.worker"

_ANSWER = TypeAdapter(FilterResult)


class ScoringPool(WorkerPool):
    """A pool whose workers answer with scores."""

    async def scores(self, request: dict[str, Any], count: int, awaited: str, awaited_from: str, deadline: float) -> FilterResult:
        """Returns a worker's answer about a group of ``count`` samples, checked. Raises as `ask` does."""
        answer = await self.ask(request, awaited, awaited_from, deadline)
        try:
            result = _ANSWER.validate_python(answer)
        except ValidationError as error:
            raise WorkerFailed(f"{self._name} answered with what is no score: {first_problem(error)}") from None
        if len(result.scores) != count:
            raise WorkerFailed(f"{self._name} gave {len(result.scores)} scores for {count} samples")
        return result


@dataclass(frozen=True)
class Verification:
    """A request to the verifier ``name``. references: one for each response, or one for all. pattern: takes the answer out of a response.
    key: the reward that counts of several."""

    name: str
    responses: Sequence[str]
    references: Sequence[Reference]
    pattern: str | None = None
    key: str | None = None

    def each(self) -> list["Verification"]:
        """Returns a verification for each response alone."""
        references = [self.references[index % len(self.references)] for index in range(len(self.responses))]
        return [replace(self, responses=[one], references=[reference]) for one, reference in zip(self.responses, references, strict=True)]


class VerifierPool(ScoringPool):
    """Runs the verifiers of one queue. ``queue``: its name. ``names``: the verifiers, keys of `shared.rewards.verifiers.VERIFIERS`.
    ``sandbox``: for those that run code."""

    def __init__(self, queue: str, names: Sequence[str], size: int, module: str = _MODULE, sandbox: SandboxSection | None = None) -> None:
        fields = sandbox.model_dump(mode="json") if sandbox is not None else None
        super().__init__(queue, size, {"verifiers": list(names), "sandbox": fields}, module)

    async def score(self, asked: Verification, deadline: float) -> list[Score]:
        """Returns one score a response; those that could not be verified have that of a wrong answer, and say why in ``unread``. The worker
        gives each response its share of ``deadline`` seconds. Where one holds up or ends the whole process, fresh ones get each alone,
        within as long again. Raises as `ask` does, but for the errors that a response is the cause of."""
        count, source = len(asked.responses), f"verifier {asked.name}"
        try:
            request = {**asdict(asked), "seconds": deadline}  # which `services.reward.worker.VerifierCalls.answer` reads
            return (await self.scores(request, count, "the rewards", source, deadline + LOOP_SECONDS)).scores
        except (CallLate, WorkerDied) as error:
            if count == 1:
                return [Score(reward=wrong(asked.name, asked.key), unread=str(error))]
        return [score for alone in asked.each() for score in await self.score(alone, deadline / count)]


class HooksPool(ScoringPool):
    """Runs the user's own functions: ``reward_workers`` processes, each with all of them. Calls raise as `ask` does."""

    def __init__(self, config: RunConfig) -> None:
        self._config, found = config, paths(config, "reward")
        self._called = ", ".join(f"{field} = {path}" for field, path in found.items() if not is_scoring(field))
        name = f"the functions {', '.join(found.values())}"
        setup, variables = {"config": config.model_dump_json()}, config.reward.worker_environment
        super().__init__(name, config.reward.reward_workers, setup, _MODULE, variables)

    @property
    def scores_at_once(self) -> int | None:
        """Returns how many groups an async ``custom_rm_path`` may have in hand; None where it is plain, or before the start."""
        return self._config.reward.environment_concurrency if "score" in self._waits else None

    async def score(self, samples: list[Sample], key: str | None) -> list[Score]:
        """Returns one score a sample, by ``custom_rm_path``; ``key`` names the reward that counts of several."""
        return (await self._call("score", samples, f"{len(samples)} rewards", key=key)).scores

    async def select(self, samples: list[Sample], scores: list[Score]) -> FilterResult:
        """Returns the outcome of the filters for a scored group."""
        return await self._call("select", samples, "a verdict", scores=[asdict(score) for score in scores])

    async def _call(self, verb: str, samples: list[Sample], awaited: str, **more: object) -> FilterResult:
        field, found = reward_field(self._config, samples[0].group), paths(self._config, "reward")
        called = f"{field} = {found[field]}" if verb == "score" else self._called
        request = {"verb": verb, "samples": sample.encode(samples, self._config.store.blob_bytes), **more}
        return await self.scores(request, len(samples), awaited, called, self._config.reward.reward_timeout)


class EnvironmentHealthCheck:
    """Asks one environment for its description every few seconds, publishes its status, and gives it no work while it is unreachable.

    States: `starting` until the first answer; `ready`; `away`: no connection can be made; `refused`: the server is no environment of this
    protocol version; `late`: it takes connections and does not answer in time. While it is starting, away or refused, its groups wait in
    the queue. A late one still gets work: its groups die at their deadlines and are replaced, so that it cannot stop the run.
    Every reward service makes its own; they publish the same status.
    """

    def __init__(self, service: Service, environment: Environment) -> None:
        self._service, self._environment = service, environment
        self._describe_seconds = service.config.bus.registry_ttl / 2  # with a heartbeat between two it stays below the TTL
        self._log = service.log.bind(environment=environment.name, url=environment.shown)
        self.state, self.detail = "starting", ""
        self.reachable = asyncio.Event()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await self._describe()
            with contextlib.suppress(MyxoError, *TRANSIENT):  # the next heartbeat is near
                await self._service.registry.renew(self._status())
            await asyncio.sleep(self._service.heartbeat)

    async def leave(self) -> None:
        """Removes the status; where another reward service also watches, it is published again within a heartbeat."""
        with contextlib.suppress(MyxoError, *TRANSIENT):
            await self._service.registry.leave(self._status())

    async def _describe(self) -> None:
        try:
            description = await self._environment.describe(self._describe_seconds)
        except EnvironmentAway as error:
            self.report("away", error.reason)
        except EnvironmentFailed as error:
            self.report("refused", error.reason)
        except DeadlineExceeded:
            self.report("late", f"describe was not answered within {self._describe_seconds:g} s")
        else:
            if not description.scores:
                self.report("refused", f"verbs is {', '.join(description.verbs)}; expected 'score' where it is to score")
                return
            needs, given = description.timeout, self._service.config.reward.reward_timeout
            self.report(
                "ready", f"needs up to {needs:g} s, reward_timeout gives {given:g} s" if needs is not None and needs > given else ""
            )

    def report(self, state: str, detail: str) -> None:
        """Logs a new state, and has groups taken or not by it."""
        if state != self.state:
            log = self._log.info if state == "ready" and not detail else self._log.warning
            log("environment_state", state=state, reason=detail, before=self.state)
        self.state, self.detail = state, detail
        if state in ("ready", "late"):
            self.reachable.set()
        else:
            self.reachable.clear()

    def _status(self) -> ServiceStatus:
        return ServiceStatus(
            service=ENVIRONMENT,
            instance=self._environment.name,
            host="",
            pid=0,
            http=self._environment.shown,
            state=self.state,
            detail=self.detail,
            at=time.time(),
        )


IN_HAND = 4  # The number of groups in progress for each verifier process: the next one's payload is read while this one is scored
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # Seconds between tries while an environment cannot be reached


class Scorer(ABC):
    """Scores whole groups. ``name``: of the environment. ``limit``: groups in hand at once. ``opens``: while all are set, groups are taken
    from the queue."""

    def __init__(self, name: str, limit: int, *opens: asyncio.Event) -> None:
        self.name, self.limit, self.opens = name, limit, opens

    @abstractmethod
    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        """Returns one score a sample, in order, within the run's `reward_timeout`. ``environment``: what scores these samples of the group:
        one of those of this scorer's queue. ``key``: the name of the reward that counts, where there are several. Raises WorkerFailed,
        EnvironmentFailed, BadMessage or DeadlineExceeded: the group is given up."""


def shown(samples: list[Sample], environment: str, config: RewardSection) -> list[Sample]:
    """Returns samples whose text is what ``scored_text`` has scored; a function of the user's gets all of it, as slime has it."""
    if environment in (CUSTOM, WEIGHTED):  # the latter shows each of its own its samples
        return samples
    return [replace(item, text=scored_text(item.text, item.turns, config.scored_text)) for item in samples]


_UNSCORED = (
    "a sample came without a reward, and nothing is named that scores it: let the function that generates it set sample.reward, or give "
    "rm_type, custom_rm_path or the prompt's metadata.rm_type"
)


class VerifierScorer(Scorer):
    """The verifiers of `shared.rewards.verifiers` that share a queue."""

    def __init__(self, queue: str, pool: VerifierPool, config: RunConfig) -> None:
        super().__init__(queue, config.reward.reward_workers * IN_HAND)
        self._pool, self._config = pool, config

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        free = self._config.algorithm.use_opd and needs_label(environment)  # then a sample without a label has 0
        scores = iter(await self._verified([one for one in samples if not free or one.label is not None], environment, key))
        return [Score(reward=0.0) if free and one.label is None else next(scores) for one in samples]

    async def _verified(self, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        references = [sample.reference for sample in samples]
        for reference in references:
            if environment == GIVEN:
                raise WorkerFailed(_UNSCORED)
            if (problem := label_problem(environment, reference)) is not None:
                came = "; its sample came without a reward" if self._config.may_give_rewards else ""
                raise WorkerFailed(f"verifier {environment}: the label: {problem}{came}")
        if not samples:
            return []
        responses, pattern = [sample.text for sample in samples], pattern_of(self._config.reward, environment)
        asked = Verification(
            environment, responses, references if any(one != references[0] for one in references) else references[:1], pattern, key
        )
        try:
            return await self._pool.score(asked, self._config.reward.reward_timeout)
        except ConfigError as error:  # a prompt names a verifier whose package is missing here
            raise WorkerFailed(str(error)) from None


class CustomScorer(Scorer):
    """The user's own function, in the started processes of the run's functions. If it is async, it may have many groups waiting."""

    def __init__(self, pool: HooksPool, config: RewardSection) -> None:
        super().__init__(CUSTOM, pool.scores_at_once or config.reward_workers * IN_HAND)
        self._pool = pool

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await self._pool.score(samples, key)


class ExternalScorer(Scorer):
    """An environment outside of Myxo. Its health check reports whether it is reachable; groups that it had when it left are tried again."""

    def __init__(self, environment: Environment, health: EnvironmentHealthCheck, config: RunConfig) -> None:
        super().__init__(environment.name, config.reward.environment_concurrency, health.reachable)
        self._environment, self._health, self._config, self._timeout = environment, health, config, config.reward.reward_timeout

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        request = _request(self._config.run.name, group, samples)
        end, pauses, reason = time.monotonic() + self._timeout, doubling(FIRST_PAUSE, LONGEST_PAUSE), ""
        while (left := end - time.monotonic()) > 0:
            try:
                return [reward_values.counted(score, key) for score in await self._environment.score(request, left)]
            except ValueError as error:
                raise EnvironmentFailed(self._environment.label, str(error)) from None
            except EnvironmentAway as error:
                reason = error.reason
                self._health.report("away", reason)  # no groups until it has described itself again
                await asyncio.sleep(min(next(pauses), max(0.0, end - time.monotonic())))
            except DeadlineExceeded:
                reason = f"it did not answer; before that: {reason}" if reason else "it did not answer"
                break
        raise DeadlineExceeded(f"{len(samples)} rewards", self._environment.label, self._timeout, f"the group is given up ({reason})")


def _request(run: str, group: Generated, samples: list[Sample]) -> ScoreRequest:
    given = [dict(zip(OF_PROMPT, (one.prompt_text, one.label, one.metadata), strict=True)) for one in samples]
    own = [{name: value for name, value in fields.items() if value != given[0][name]} for fields in given]
    try:
        return ScoreRequest(
            run=run,
            group=group.group,
            attempt=group.attempt,
            **given[0],
            samples=[
                ScoreSample(index=index, response=sample.text, tokens=len(sample.response), finish=sample.finish, **own[index])
                for index, sample in enumerate(samples)
            ],
        )
    except ValidationError as error:
        [where, *_] = (".".join(map(str, problem["loc"])) for problem in error.errors())
        raise BadMessage(f"{group.group}: the payload's {where} does not go into a request for a score") from error


class RewardRouter:
    """Decides what scores a sample: the reward that it came with, else its ``metadata.rm_type``, else what its group was sent to. Scores
    groups whose samples may name different environments: a generate function may change a sample's metadata. ``scorers``: every scorer of
    the run, by the name of its queue."""

    def __init__(self, config: RunConfig, scorers: dict[str, Scorer]) -> None:
        self._config, self._scorers = config, scorers

    async def score(self, group: Generated, samples: list[Sample]) -> list[Score]:
        """Returns one score a sample, in order. Raises as `Scorer.score` does, WorkerFailed for an unknown environment."""
        scores, key = dict[int, Score](), reward_key(self._config, group.group)
        if not self._config.reward.group_rm:  # a function that scores whole groups gets all of their samples, as with slime
            scores = {position: _given(sample, key) for position, sample in enumerate(samples) if sample.given_reward is not None}
        names = [None if position in scores else self._environment(group, sample) for position, sample in enumerate(samples)]
        for name in filter(None, dict.fromkeys(names)):
            positions = [position for position, other in enumerate(names) if other == name]
            asked = shown([samples[position] for position in positions], name, self._config.reward)
            found = await self._scorers[queue_of(name)].score(group, asked, name, key)
            scores.update(zip(positions, found, strict=True))
        return [scores[position] for position in range(len(samples))]

    def _environment(self, group: Generated, sample: Sample) -> str:
        named, reward = sample.metadata.get("rm_type"), group_config(self._config, group.group).reward
        name, names = reward.environment_of(named) if named else group.environment, reward.environment_names()
        if name not in names:
            expected = nearest(name, names)
            raise WorkerFailed(f"sample {sample.name}: metadata.rm_type is {name[:80]!r}; the run has no such environment ({expected})")
        return name


def _given(sample: Sample, key: str | None) -> Score:
    try:
        return reward_values.read(sample.given_reward, key)
    except ValueError as error:
        raise BadMessage(f"sample {sample.name}: the reward that it was generated with: {error}") from None


class WeightedScorer(Scorer):
    """Scores by all of ``reward_weights``. ``scorers``: those of the run, by queue."""

    def __init__(self, config: RewardSection, scorers: Mapping[str, Scorer]) -> None:
        opens = [event for name in config.reward_weights for event in scorers[queue_of(name)].opens]
        super().__init__(WEIGHTED, config.environment_concurrency, *opens)
        self._config, self._weights, self._scorers = config, config.reward_weights, scorers

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        calls = (self._scorers[queue_of(name)].score(group, shown(samples, name, self._config), name, None) for name in self._weights)
        of_names = dict(zip(self._weights, await gathered(calls), strict=True))
        try:
            return [self._sum({name: scores[index] for name, scores in of_names.items()}, key) for index in range(len(samples))]
        except ValueError as error:
            raise EnvironmentFailed(WEIGHTED, str(error)) from None

    def _sum(self, scores: Mapping[str, Score], key: str | None) -> Score:
        total = sum(weight * scores[name].reward for name, weight in self._weights.items())
        parts = {name: score.reward for name, score in scores.items()}
        inner = {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
        named = dict(list({**parts, **inner}.items())[:MAX_PARTS])
        unread = "; ".join(score.unread for score in scores.values() if score.unread)
        counted = reward_values.counted(Score(reward=total, parts=named), key)
        return Score(reward=counted.reward, parts=counted.parts, unread=unread[:200])
