"""What a rollout function returns, in every form that slime takes: by group, and by rollout."""

import copy
from typing import Any

import pytest

from shared.hooks import Sample
from shared.hooks.returned_output import RolloutFnTrainOutput, returned_groups, train_output
from tests.support.tables import table


def sample(group: int, rollout: int | None = None, **changes: Any) -> Sample:
    return Sample(group_index=group, rollout_id=rollout, **changes)


def shape(returned: list[Any]) -> list[tuple[int, list[int]]]:
    return [(group.number, group.rollouts) for group in returned_groups(returned)]


def test_groups_of_samples() -> None:
    a, b, c, d = sample(4), sample(4), sample(7), sample(7)
    groups = returned_groups([[a, b], [c, d]])
    assert [(group.number, group.rollouts) for group in groups] == [(4, [0, 1]), (7, [0, 1])]
    assert [one for group in groups for one in group.samples] == [a, b, c, d]
    assert shape([a, b, c, d]) == shape([[c, d], [a, b]])[::-1] == shape(([a, c], [b, d])), "flat, or mixed: group_index says it"


def test_a_rollout_that_fans_out() -> None:
    assert shape([[[sample(4), sample(4)], [sample(4)]]]) == [(4, [0, 0, 1])], "by the lists inside the group"
    assert shape([[sample(4, 8), sample(4, 8), sample(4, 9)]]) == [(4, [0, 0, 1])], "by rollout_id"
    one = sample(4, 8)
    assert shape([[[one, copy.deepcopy(one)], [sample(4, 9)]]]) == [(4, [0, 0, 1])], "a copy has its id"
    assert shape([[[sample(4, 8), sample(4, 9)]]]) == [(4, [0, 1])], "ids win over lists, as with a list too many around the groups"


def test_the_output_and_its_older_forms() -> None:
    groups = [[sample(1)]]
    assert train_output(groups) == RolloutFnTrainOutput(groups)
    assert train_output(RolloutFnTrainOutput(groups, {"a": 1})).metrics == {"a": 1}
    assert train_output([]).samples == []


@table(
    ("returned", "words"),
    [
        (None, "it returned a NoneType; expected RolloutFnTrainOutput"),
        ({"samples": []}, "it returned a dict"),
        ([[3]], "a int in the place of a sample"),
        ([[Sample()]], "group_index is None; expected that of a sample of data_source.get_samples"),
    ],
)
def test_what_is_no_output_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        returned_groups(train_output(returned).samples)
