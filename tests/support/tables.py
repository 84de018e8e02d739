"""Tables of hundreds of cases as one test each, and cases of what is to be refused."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shared.runtime.errors import ConfigError


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, but one test: it tries all rows, and fails with those that failed.

    Fixtures are those of all rows, but for ``tmp_path``: each row has a directory of its own.
    """
    of_row = (names,) if isinstance(names, str) else names
    tried_rows = [(row,) if isinstance(names, str) else row for row in rows]
    assert tried_rows

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(**fixtures: Any) -> None:
            failures = []
            for number, row in enumerate(tried_rows):
                own = {}
                if "tmp_path" in fixtures:
                    own["tmp_path"] = fixtures["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                try:
                    test(**{**fixtures, **own, **dict(zip(of_row, row, strict=True))})
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{row!r}: {type(error).__name__}: {error}")
            assert not failures, f"{len(failures)} of {len(tried_rows)}:\n" + "\n".join(failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in of_row]
        tried.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return tried

    return decorated


def rare(*values: Any, id: str | None = None) -> Any:
    """A row of ``pytest.mark.parametrize`` that is marked extra."""
    return pytest.param(*values, marks=pytest.mark.extra, id=id)


def not_refused(make: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> list[str]:
    """Returns the cases (arguments of ``make``, and a list of words) that it does not refuse with a ConfigError of these words."""
    found = []
    for *given, words in cases:
        try:
            make(*given)
            found.append(f"{given}: accepted")
        except ConfigError as error:
            found += [f"{given}: {error}; no {word!r}" for word in words if word not in str(error)]
    return found
