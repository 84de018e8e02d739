"""Where in the user's own code an error came from."""

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from shared.hooks import HookSample
from shared.runtime.tasks import defined_at, error_text

CODE = """import asyncio, json


def helper(text):
    return json.loads(text)


def score(args, sample):
    return helper("{")


def bare(args, sample):
    assert sample is None


def through_myxo(args, sample):
    return sample.get_reward_value(args)


async def several(args, sample):
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())


async def fails():
    await asyncio.sleep(0)
    raise ValueError("two\\nlines")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


def silent(args, sample):
    raise Silent


class Scorer:
    def __call__(self, args, sample):
        return None


def together():
    raise ExceptionGroup("all", [ExceptionGroup("some", [ValueError("inner")])])


def through_a_package():
    import their_package
    their_package.call(their_package.fail)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "my_reward.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_reward", None)
    import my_reward  # type: ignore[import-not-found]

    monkeypatch.chdir(tmp_path)
    return my_reward


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return error_text(error)
    raise AssertionError("it raised nothing")


def test_the_line_is_the_users_own_and_not_the_librarys_below_it(mine: ModuleType) -> None:
    said = raised(lambda: mine.score(None, 1))
    assert said.startswith("my_reward.py:5, in helper: JSONDecodeError: Expecting property name")
    assert json.decoder.__file__ not in said


def test_an_error_without_words_shows_its_line_of_code(mine: ModuleType) -> None:
    assert raised(lambda: mine.bare(None, 1)) == "my_reward.py:13, in bare: AssertionError: assert sample is None"


def test_a_frame_of_myxos_is_not_the_users(mine: ModuleType) -> None:
    said = raised(lambda: mine.through_myxo(None, HookSample()))
    assert said == "my_reward.py:17, in through_myxo: ValueError: the sample has no reward yet"


def test_of_a_group_of_tasks_the_first_that_failed_is_named(mine: ModuleType) -> None:
    assert raised(lambda: asyncio.run(mine.several(None, 1))) == "my_reward.py:27, in fails: ValueError: two lines"


def test_an_error_whose_words_fail(mine: ModuleType) -> None:
    assert raised(lambda: mine.silent(None, 1)).startswith("my_reward.py:36, in silent: Silent: its text")


def test_a_function_is_named_by_where_it_is_defined(mine: ModuleType) -> None:
    assert defined_at(mine.score) == defined_at(functools.partial(mine.score, 1)) == " (my_reward.py:8, score)"
    assert defined_at(mine.Scorer()) == " (my_reward.py:40, __call__)"
    assert defined_at(len) == defined_at(None) == ""
    assert error_text(ValueError("gave nothing"), mine.score) == "ValueError: gave nothing (my_reward.py:8, score)"


def test_a_group_of_errors_that_were_never_raised_is_where_the_group_was(mine: ModuleType) -> None:
    assert raised(lambda: mine.together()) == "my_reward.py:45, in together: ValueError: inner"


def test_a_file_that_cannot_be_read_is_named_itself_and_not_who_imports_it(mine: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text("\ndef score(:\n")
    assert raised(lambda: __import__("broken_reward")) == "broken_reward.py:2: SyntaxError: invalid syntax"


@pytest.mark.parametrize("packages", ["home/.local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages"])
def test_packages_of_the_user_and_of_the_system_are_not_the_users_own(
    packages: str, mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / packages).mkdir(parents=True)
    (tmp_path / packages / "their_package.py").write_text(
        "def call(function):\n    return function(1)\n\ndef fail(x):\n    raise ValueError('no')\n"
    )
    monkeypatch.syspath_prepend(tmp_path / packages)
    sys.modules.pop("their_package", None)
    assert raised(lambda: mine.through_a_package()) == "my_reward.py:50, in through_a_package: ValueError: no"
