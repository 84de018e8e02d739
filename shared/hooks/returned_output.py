"""Reads what a rollout or evaluation function in slime's manner returns; the classes of its results are those of
``slime.rollout.base_types``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.config.eval_section import NAME
from shared.hooks import reward_values
from shared.hooks.hook_sample import HookSample, Status, status_of
from shared.schema.message import MAX_PARTS, is_part_name


@dataclass
class RolloutFnTrainOutput:
    """The groups of a training step, each a list of samples, or of lists of samples where rollouts fan out; and metrics by name."""

    samples: list[list[HookSample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Of each held-out set ``rewards``, ``truncated`` and ``samples``; and metrics by name."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns the output of a rollout function; a bare value of older ones is put into the output's class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


@dataclass
class ReturnedGroup:
    """The samples of one group. ``rollouts``: of each sample, which of the group's rollouts it comes from."""

    number: int
    samples: list[HookSample] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)

    def add(self, sample: HookSample, rollout: int) -> None:
        self.samples.append(sample)
        self.rollouts.append(rollout)


def train_output(returned: object) -> RolloutFnTrainOutput:
    """Returns what a function returned in its newest form; it may be a plain list of groups. Raises ValueError."""
    if isinstance(returned, list):
        return RolloutFnTrainOutput(returned)
    if isinstance(getattr(returned, "samples", None), list):
        return RolloutFnTrainOutput(returned.samples, getattr(returned, "metrics", None))  # type: ignore[attr-defined]
    raise ValueError(f"it returned a {type(returned).__name__}; expected RolloutFnTrainOutput(samples, metrics) or a list of groups")


def returned_groups(samples: list[Any]) -> list[ReturnedGroup]:
    """Returns the samples of any nesting of lists by their ``group_index``, in the order in which the groups first occur.

    Samples of one ``rollout_id`` come from one rollout; where they have none, those of one list inside a group's.

    Raises ValueError for what is no sample, or belongs to no group.
    """
    groups: dict[int, ReturnedGroup] = {}
    rollouts: dict[int, dict[object, int]] = {}
    for path, sample in _leaves(samples, ()):
        if not isinstance(sample, HookSample):
            raise ValueError(f"it returned a {type(sample).__name__} in the place of a sample")
        number = sample.group_index
        if not isinstance(number, int):
            raise ValueError(f"a sample's group_index is {number!r}; expected that of a sample of data_source.get_samples")
        group, ids = groups.setdefault(number, ReturnedGroup(number)), rollouts.setdefault(number, {})
        key = ("id", sample.rollout_id) if sample.rollout_id is not None else ("list", path) if len(path) > 1 else ("sample", id(sample))
        group.add(sample, ids.setdefault(key, len(ids)))
    return list(groups.values())


def _leaves(value: object, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yields what lies in nested lists, each with the indices of the lists around it (its own in the innermost left out)."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index) if isinstance(item, list | tuple) else path)
    else:
        yield path, value


@dataclass(frozen=True)
class ReturnedSet:
    """The rewards of one set, in the function's order. ``lengths``: of the responses that came along, in tokens.

    ``truncated``: how many ended at their length. ``versions``: the oldest and the newest that drew tokens, None where nothing says so.
    """

    rewards: list[float]
    lengths: list[int]
    truncated: int
    versions: tuple[int, int] | None

    def groups(self, n: int) -> list[list[float]]:
        """Returns the rewards of each prompt: of ``n`` samples that follow each other; of one, where they do not come out even."""
        size = n if len(self.rewards) % n == 0 else 1
        return [self.rewards[at : at + size] for at in range(0, len(self.rewards), size)]


def eval_output(returned: object) -> RolloutFnEvalOutput:
    """Returns what a function returned in its newest form; it may be the plain map of sets. Raises ValueError."""
    data, metrics = (
        (returned, None) if isinstance(returned, dict) else (getattr(returned, "data", None), getattr(returned, "metrics", None))
    )
    if not isinstance(data, dict) or not data:
        raise ValueError(f"it returned {_kind(returned)}; expected RolloutFnEvalOutput(data, metrics) with at least one set in data")
    return RolloutFnEvalOutput(data, metrics)


def returned_sets(data: Mapping[Any, Any]) -> dict[str, ReturnedSet]:
    """Returns the sets by their names. Raises ValueError, which names the field and what would be right."""
    found = {}
    for name, given in data.items():
        if not isinstance(name, str) or not re.match(NAME, name):
            raise ValueError(f"data has a set {name!r}; a set's name has 1 to 64 letters, digits, '-' and '_'")
        if not isinstance(given, Mapping):
            raise ValueError(f"data[{name!r}] is {_kind(given)}; expected a dict with rewards, and truncated and samples if it likes")
        found[name] = _set(f"data[{name!r}]", given)
    return found


def metric_numbers(metrics: object) -> dict[str, float]:
    """Returns the metrics that are numbers, by their names."""
    given: dict[Any, Any] = metrics if isinstance(metrics, dict) else {}
    found = {}
    for name, value in given.items():
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, int | float):
            found[str(name)] = float(value)
    return found


def eval_metrics(metrics: object) -> dict[str, float]:
    """Returns those of a function's metrics that go along with its results: finite ones, the first 64, with names of 64 characters."""
    numbers = {name: value for name, value in metric_numbers(metrics).items() if is_part_name(name) and abs(value) < float("inf")}
    return dict(list(numbers.items())[:MAX_PARTS])


def _set(where: str, given: Mapping[str, Any]) -> ReturnedSet:
    rewards = [_reward(f"{where}['rewards'][{index}]", value) for index, value in enumerate(_listed(where, given, "rewards"))]
    if not rewards:
        raise ValueError(f"{where}['rewards'] is empty; expected a number for each sample")
    samples = _samples(where, _listed(where, given, "samples"))
    truncated = _listed(where, given, "truncated")
    if len(truncated) not in (0, len(rewards)):
        raise ValueError(f"{where}['truncated'] has {len(truncated)} entries for {len(rewards)} rewards")
    count = sum(map(bool, truncated)) if truncated else sum(status_of(sample.status) is Status.TRUNCATED for sample in samples)
    versions = [version for sample in samples for version in _versions(sample)]
    return ReturnedSet(
        rewards,
        [sample.response_length for sample in samples],
        min(count, len(rewards)),
        (min(versions), max(versions)) if versions else None,
    )


def _listed(where: str, given: Mapping[str, Any], field: str) -> list[Any]:
    value: Any = given.get(field)
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}[{field!r}] is {_kind(value)}; expected a list")
    return list(value)


def _reward(where: str, value: object) -> float:
    try:
        reward = reward_values.plain(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if isinstance(reward, dict):
        raise ValueError(f"{where} has several by name; expected the one that counts, as args.eval_reward_key or args.reward_key names it")
    return reward


def _samples(where: str, given: Sequence[Any]) -> list[HookSample]:
    """Returns the samples of a list, or of lists in it: of rollouts that gave several."""
    found: list[HookSample] = []
    for item in given:
        if isinstance(item, list | tuple):
            found += _samples(where, item)
        elif isinstance(item, HookSample):
            found.append(item)
        else:
            raise ValueError(f"{where}['samples'] holds {_kind(item)}; expected samples, slime.utils.types.Sample")
    return found


def _versions(sample: HookSample) -> list[int]:
    """Returns the versions that a sample names of its tokens: integers, or spans (start, end, version)."""
    found = []
    for entry in sample.weight_versions:
        entry = entry.get("version") if isinstance(entry, Mapping) else entry[-1] if isinstance(entry, list | tuple) and entry else entry
        text = str(entry)
        if text.isdecimal():
            found.append(int(text))
    return found


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
