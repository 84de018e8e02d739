"""Worker processes that score groups: those of verifiers, and those of the user's functions. Both raise as `WorkerPool.ask` does."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.reward.custom_functions import FilterResult, is_scoring
from shared.config.eval_views import reward_field
from shared.config.run_config import RunConfig
from shared.config.sandbox_section import SandboxSection
from shared.environment.protocol import first_problem
from shared.hooks import paths
from shared.process.worker_pool import LOOP_SECONDS, CallLate, WorkerDied, WorkerFailed, WorkerPool
from shared.rewards.names import wrong
from shared.rewards.reference import Reference
from shared.schema import sample
from shared.schema.sample import Sample, Score

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
    """What is asked of a verifier.

    name: the verifier. responses: their texts. references: what each is compared with, or one for all. pattern: takes the answer out of a
    response. key: the reward that counts of several.
    """

    name: str
    responses: Sequence[str]
    references: Sequence[Reference]
    pattern: str | None = None
    key: str | None = None

    def request(self, seconds: float) -> dict[str, Any]:
        """Returns the request to a worker, which `services.reward.worker.VerifierCalls.answer` reads."""
        return {**asdict(self), "seconds": seconds}

    def each(self) -> list["Verification"]:
        """Returns a verification for each response alone."""
        references = [self.references[index % len(self.references)] for index in range(len(self.responses))]
        return [replace(self, responses=[one], references=[reference]) for one, reference in zip(self.responses, references, strict=True)]


class VerifierPool(ScoringPool):
    """Runs the verifiers of one queue.

    Args:
        queue: its name. names: the verifiers, keys of `shared.rewards.verifiers.VERIFIERS`. sandbox: for those that run code.
    """

    def __init__(self, queue: str, names: Sequence[str], size: int, module: str = _MODULE, sandbox: SandboxSection | None = None) -> None:
        fields = sandbox.model_dump(mode="json") if sandbox is not None else None
        super().__init__(queue, size, {"verifiers": list(names), "sandbox": fields}, module)

    async def score(self, asked: Verification, deadline: float) -> list[Score]:
        """Returns one score a response; those that could not be verified have that of a wrong answer, and say why in ``unread``.

        The worker gives each response its share of ``deadline`` seconds. Where one holds up or ends the whole process, fresh ones get each
        alone, within as long again. Raises as `ask` does, but for the errors that a response is the cause of.
        """
        count, source = len(asked.responses), f"verifier {asked.name}"
        try:
            return (await self.scores(asked.request(deadline), count, "the rewards", source, deadline + LOOP_SECONDS)).scores
        except (CallLate, WorkerDied) as error:
            if count == 1:
                return [Score(reward=wrong(asked.name), unread=str(error))]
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
