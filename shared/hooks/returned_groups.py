"""Reads what a rollout function in slime's manner returns: the samples of its groups, in any nesting of lists."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.hooks.hook_sample import HookSample
from shared.hooks.slime.rollout_output import RolloutFnTrainOutput


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
