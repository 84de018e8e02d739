"""Every flag of slime's and of its scripts is in one class."""

from collections import Counter

from docs.slime_page import classify
from tests.support.slime_scripts import FLAGS, SCRIPTS

GIVEN = sorted({word for words in SCRIPTS.values() for word in words if word.startswith("--")})


def name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_the_lists_are_whole() -> None:
    assert (len(SCRIPTS), len(GIVEN), len(FLAGS)) == (40, 219, 231)


def test_every_flag_of_slimes_has_a_class_and_words_for_it_and_those_of_its_scripts_are_accepted() -> None:
    assert [flag for flag in FLAGS if (found := classify(name(flag))) is None or not found.meaning] == []
    assert [flag for flag in GIVEN if (found := classify(name(flag))) is None or found.kind == "refused"] == []


def test_all_classes_are_used() -> None:
    kinds = Counter(found.kind for flag in {*FLAGS, *GIVEN} if (found := classify(name(flag))))
    assert kinds.keys() == {"taken", "renamed", "no-op", "refused"}
    assert kinds["refused"] < 50 < kinds["taken"]


def test_what_is_no_flag_has_no_class() -> None:
    assert classify("balance_dat") is None
    assert classify("no_lr") is None
