"""Runs the user's own functions in separate processes."""

from collections.abc import Mapping
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from services.reward.custom_functions import SCORE, FilterResult
from services.reward.worker_pool import WorkerFailed, WorkerPool
from shared.config.run_config import RunConfig
from shared.hooks import paths
from shared.schema import sample
from shared.schema.sample import Sample, Score

_SCORE = TypeAdapter(Score)


class HooksPool(WorkerPool):
    """A pool of ``reward_workers`` processes, each with all of the config's functions for the reward service. Calls raise as `ask` does."""

    def __init__(self, config: RunConfig, module: str = "services.reward.hooks_worker") -> None:
        self._waiting: set[str] = set()
        self._config, found = config, paths(config, "reward")
        self._scoring = f"{SCORE} = {found.get(SCORE)}"
        self._selecting = ", ".join(f"{field} = {path}" for field, path in found.items() if field != SCORE)
        name = f"the functions {', '.join(found.values())}"
        super().__init__(name, config.reward.reward_workers, module, [], {"config": config.model_dump_json()})

    async def start(self) -> None:
        await super().start()
        self._waiting = set(self.ready.get("waits", ()))

    @property
    def scores_at_once(self) -> int | None:
        """Returns how many groups an async ``custom_rm_path`` may have in hand; None where it is plain, or before the start."""
        return self._config.reward.environment_concurrency if "score" in self._waiting else None

    async def score(self, samples: list[Sample]) -> list[Score]:
        """Returns one score a sample, by ``custom_rm_path``."""
        request = {"verb": "score", "samples": self._blobs(samples)}
        answer = await self._asked(request, f"{len(samples)} rewards", self._scoring)
        return self._scores(answer, len(samples))

    async def select(self, samples: list[Sample], scores: list[Score]) -> FilterResult:
        """Returns the outcome of the filters for a scored group."""
        request = {"verb": "select", "samples": self._blobs(samples), "scores": [asdict(score) for score in scores]}
        answer = await self._asked(request, "a verdict", self._selecting)
        filtered = answer.get("filtered")
        return FilterResult(None if filtered is None else str(filtered), self._scores(answer, len(samples)))

    async def _asked(self, request: Mapping[str, object], awaited: str, awaited_from: str) -> dict[str, object]:
        timeout = self._config.reward.reward_timeout
        return await self.ask(request, awaited, awaited_from, timeout, waits=request["verb"] in self._waiting)

    def _blobs(self, samples: list[Sample]) -> list[bytes]:
        return sample.encode(samples, self._config.store.blob_bytes)

    def _scores(self, answer: dict[str, object], count: int) -> list[Score]:
        """Returns the scores of an answer, checked: functions share a process with what answers for them."""
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(scores) != count:
            raise WorkerFailed(f"{self._name} gave {str(scores)[:80]} for {count} samples")
        try:
            return [_SCORE.validate_python(score) for score in scores]
        except ValidationError as error:
            raise WorkerFailed(f"{self._name} gave no scores: {error.errors()[0]['msg']}") from None
