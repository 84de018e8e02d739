"""An aborted request whose last token ends it has ended: SGLang, which looks for the end of requests that are not aborted only, would hand
out an end token or a whole stop string as if more were to follow, and whoever goes on from there would write beyond the end."""

import functools
from typing import Any

CHECKS = ("update_finish_state", "check_finished")
"""How SGLang calls what looks, after each token, whether a request has ended: in 0.5.20, and before."""


def find_ends_of_aborted(request: type[Any]) -> bool:
    """Makes SGLang's class of requests look for the end of aborted ones, too. Returns whether it could be; once is enough."""
    name = next((name for name in CHECKS if hasattr(request, name)), None)
    if name is None:
        return False
    check = getattr(request, name)

    @functools.wraps(check)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        abort = getattr(self, "to_finish", None)
        if abort is not None and self.output_ids and not self.finished():
            self.to_finish = None
            check(self, *arguments, **options)
            if self.finished():
                return None
            self.to_finish = abort
        return check(self, *arguments, **options)

    setattr(request, name, checked)
    return True
