"""Two additions to SGLang's check, after each token of a request, whether it has ended.

An aborted request whose last token ends it has ended: SGLang, which looks for the end of requests that are not aborted only, would hand
out an end token or a whole stop string as if more were to follow, and whoever goes on from there would write beyond the end.

The weight version of each token is reported: SGLang before 0.5.20 reports that of a request's end alone, so a sample that was generated
across pushes would count as wholly of the version that it began under, and be too old as a whole.
"""

import functools
from collections.abc import Callable
from typing import Any

from shared.schema.versions import TOKEN_VERSIONS

CHECKS = ("update_finish_state", "check_finished")
"""How SGLang calls what looks, after each token, whether a request has ended: in 0.5.16 and later, and before."""


def find_ends_of_aborted(request: type[Any]) -> bool:
    """Makes SGLang's class of requests look for the end of aborted ones, too. Returns whether it could be; once is enough."""

    def find(self: Any, check: Callable[[], Any]) -> Any:
        abort = getattr(self, "to_finish", None)
        if abort is not None and self.output_ids and not self.finished():
            self.to_finish = None
            check()
            if self.finished():
                return None
            self.to_finish = abort
        return check()

    return _around_check(request, find)


def report_token_versions(request: type[Any], version: Callable[[], int]) -> bool:
    """Makes SGLang's class of requests note each token's version in the per-token fields it hands out. ``version``: returns that of the
    weights that the engine holds; negative where it is unknown. Returns whether it could be; once is enough."""

    def note(self: Any, check: Callable[[], Any]) -> Any:
        self.customized_info = getattr(self, "customized_info", None) or {}
        known, held = self.customized_info.setdefault(TOKEN_VERSIONS, []), version()
        known.extend([held if held >= 0 else None] * (len(self.output_ids) - len(known)))
        return check()

    return _around_check(request, note)


def _around_check(request: type[Any], around: Callable[[Any, Callable[[], Any]], Any]) -> bool:
    name = next((name for name in CHECKS if hasattr(request, name)), None)
    if name is None:
        return False
    check = getattr(request, name)

    @functools.wraps(check)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        return around(self, functools.partial(check, self, *arguments, **options))

    setattr(request, name, checked)
    return True
