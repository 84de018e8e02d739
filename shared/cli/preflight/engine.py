"""Whether the installed SGLang takes the flags of ``[rollout.sglang]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shared import sglang_flags
from shared.cli.preflight.inspection import Inspection
from shared.errors import ConfigError

LATER = "[rollout.sglang] is checked where the rollout service starts"


def check_flags(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields the flags that it does not take; says on standard error where it cannot be asked."""
    if not (given := inspection.config.rollout.sglang):
        return
    try:
        flags = sglang_flags.of_installed()
    except sglang_flags.NoCatalogue as error:
        print(f"myxo: {error}; {LATER}", file=sys.stderr)
        return
    if flags is None:
        print(f"myxo: SGLang is not installed here; {LATER}", file=sys.stderr)
        return
    yield from flags.problems(given)
