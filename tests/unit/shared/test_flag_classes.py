"""Every flag of slime's and of its scripts is in one class."""

from collections import Counter

import pytest

from shared.config.flag_classes import classify
from tests.support.slime_scripts import FLAGS, SCRIPTS

GIVEN = sorted({word for words in SCRIPTS.values() for word in words if word.startswith("--")})


def name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_the_lists_are_whole() -> None:
    assert (len(SCRIPTS), len(GIVEN), len(FLAGS)) == (30, 203, 231)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_slimes_has_a_class_and_words_for_it(flag: str) -> None:
    found = classify(name(flag))
    assert found is not None and found.meaning, flag


@pytest.mark.parametrize("flag", GIVEN)
def test_every_flag_of_the_scripts_is_accepted(flag: str) -> None:
    found = classify(name(flag))
    assert found is not None and found.kind != "refused", flag


def test_all_classes_are_used() -> None:
    kinds = Counter(found.kind for flag in {*FLAGS, *GIVEN} if (found := classify(name(flag))))
    assert kinds.keys() == {"taken", "renamed", "no-op", "refused"}
    assert kinds["refused"] < 50 < kinds["taken"]


def test_what_is_no_flag_has_no_class() -> None:
    assert classify("balance_dat") is None
    assert classify("no_lr") is None
