"""Has the user's own functions score a group, decide whether it is kept, and which of its samples are trained.

The order is slime's: score; keep or drop (``dynamic_sampling_filter_path``); of groups that are kept, take samples out of the loss
(``rollout_sample_filter_path``); show every group (``rollout_all_samples_process_path``). What a later function changes in a sample's
``reward`` and ``remove_sample`` counts; all other changes are ignored.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from shared.config.eval_views import reward_field
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, DynamicFilterOutput, HookFailed, HookSample, load, paths, reward_values
from shared.hooks.filters import BUILT_IN
from shared.hooks.loading import split_path
from shared.hooks.sample_conversion import from_stored
from shared.process.call_server import Calls
from shared.runtime.tasks import defined_at, error_text, gathered, is_async, print_traceback, settled
from shared.schema.sample import Sample as StoredSample
from shared.schema.sample import Score, decode

SCORE = "reward.custom_rm_path"
KEEP = "rollout.dynamic_sampling_filter_path"
REMOVE = "rollout.rollout_sample_filter_path"
SEE = "rollout.rollout_all_samples_process_path"

LONGEST_REASON = 100  # The most characters of the reason for which a group is dropped


def is_scoring(field: str) -> bool:
    """Returns whether the function of a field scores samples; the others of the reward service are filters."""
    return field.endswith(".custom_rm_path")


@dataclass(frozen=True)
class FilterResult:
    """The scores of a group, one a sample, in order. ``filtered``: why the filters drop it; None: they keep it."""

    scores: list[Score]
    filtered: str | None = None


class Functions(Calls):
    """Holds the functions of a run's config that the reward service calls. Raises ConfigError for one that cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self._paths = paths(config, "reward")
        self._functions = {field: load(field, path) for field, path in self._paths.items()}
        self._config, self._args, self._key = config, Arguments(config), config.reward.reward_key
        self._group_rm = config.reward.group_rm
        name = config.rollout.dynamic_sampling_filter_path
        if name in BUILT_IN:
            self._paths[KEEP], self._functions[KEEP] = name, BUILT_IN[name]
        of_verb = {"score": [self._functions[field] for field in self._functions if is_scoring(field)]}
        of_verb["select"] = [self._functions[field] for field in self._functions if not is_scoring(field)]
        self.waits = [verb for verb, functions in of_verb.items() if functions and all(map(is_async, functions))]
        """Those of the verbs whose functions are all async: while one call waits, others may be made."""

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a call in a worker. ``request``: ``{"verb": "score", "samples": [blob, …], "key": name or None}``, with the blobs of
        `shared.schema.sample`; or ``{"verb": "select", "samples": [blob, …], "scores": [score, …]}``. Returns a `FilterResult` as a map, or
        ``{"error": text}``."""
        samples = decode(request["samples"])
        try:
            if request["verb"] == "score":
                return asdict(FilterResult(await self.score(samples, request["key"])))
            return asdict(await self.select(samples, [Score(**score) for score in request["scores"]]))
        except HookFailed as error:
            return {"error": str(error)}

    async def score(self, stored: list[StoredSample], key: str | None) -> list[Score]:
        """Returns one score a sample, by ``custom_rm_path``, the evaluation set's own where it has one. Raises HookFailed. The function
        gets one sample after the other; all samples of the group at once with ``group_rm``, which is the run's function's alone; those of
        one rollout at once where it gave several."""
        samples, group = [from_stored(sample) for sample in stored], stored[0].group
        field = reward_field(self._config, group)
        if self._group_rm and field == SCORE:
            values = await self._list_of(field, samples)
        else:
            pairs = groupby(zip(stored, samples, strict=True), key=lambda pair: pair[0].rollout)
            scoring = [self._of_rollout(field, [sample for _, sample in several]) for _, several in pairs]
            values = [value for given in await gathered(scoring) for value in given]
        return [self._read(field, value, index, key) for index, value in enumerate(values)]

    async def select(self, stored: list[StoredSample], scores: list[Score]) -> FilterResult:
        """Returns the outcome of the filters for a scored group. Raises HookFailed."""
        samples = [from_stored(sample, score, self._key) for sample, score in zip(stored, scores, strict=True)]
        given = [copy.deepcopy(sample.reward) for sample in samples]
        filtered = self._reason(await self._call(KEEP, list(samples))) if KEEP in self._functions else None
        if REMOVE in self._functions and filtered is None:
            await self._call(REMOVE, [list(samples)])
        if SEE in self._functions:
            await self._call(SEE, [list(samples)], None)
        last = REMOVE if REMOVE in self._functions else SEE
        decided = []
        for index, (sample, score, reward) in enumerate(zip(samples, scores, given, strict=True)):
            counts = score if sample.reward == reward else self._read(last, sample.reward, index, self._key)
            decided.append(replace(counts, removed=bool(sample.remove_sample)))
        return FilterResult(decided, filtered)

    async def _of_rollout(self, field: str, samples: list[HookSample]) -> list[Any]:
        return await self._list_of(field, samples) if len(samples) > 1 else [await self._call(field, samples[0])]

    async def _list_of(self, field: str, samples: list[HookSample]) -> list[Any]:
        values = await self._call(field, samples)
        if not isinstance(values, list | tuple) or len(values) != len(samples):
            found = f"{len(values)} rewards" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
            raise self._failed(field, f"gave {found} for {len(samples)} samples; expected a list with one a sample")
        return list(values)

    def _read(self, field: str, value: object, index: int, key: str | None) -> Score:
        try:
            return reward_values.read(value, key)
        except ValueError as error:
            raise self._failed(field, f"sample {index}: {error}") from None

    def _reason(self, output: Any) -> str | None:
        keep = output.keep if isinstance(output, DynamicFilterOutput) else output
        keep = keep.item() if hasattr(keep, "item") else keep  # comparisons of arrays and tensors return such values
        if not isinstance(keep, bool):
            raise self._failed(KEEP, f"gave {str(output)[:80]}; expected shared.hooks.DynamicFilterOutput or a bool")
        over_sampled: bool = (self._args.over_sampling_batch_size or 0) > self._args.rollout_batch_size
        if keep or (isinstance(output, DynamicFilterOutput) and output.keep_when_insufficient and not over_sampled):
            return None
        reason = output.reason if isinstance(output, DynamicFilterOutput) else None
        return str(reason or split_path(self._paths[KEEP])[1])[:LONGEST_REASON]

    async def _call(self, field: str, *given: Any) -> Any:
        function: Callable[..., Any] = self._functions[field]
        try:
            return await settled(function(self._args, *given))
        except (Exception, SystemExit) as error:  # an exception of the user's function fails its group, not this process
            print_traceback()
            raise HookFailed(field, self._paths[field], error_text(error, function)) from error

    def _failed(self, field: str, reason: str) -> HookFailed:
        return HookFailed(field, self._paths[field], f"{reason}{defined_at(self._functions[field])}")
