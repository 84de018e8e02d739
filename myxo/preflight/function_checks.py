"""Whether the user's own functions can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from myxo.preflight.inspection import Inspection
from shared import hooks
from shared.runtime.errors import ConfigError

IMPORT_SECONDS = 120.0
"""How long importing the user's own functions may take."""

LONGEST_WORDS = 1000
"""Characters that are shown of what an import printed."""


def check(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what keeps a function of the user's own from being imported; a process of its own imports it."""
    functions = hooks.paths(inspection.config)
    if not functions:
        return
    field, path = next(iter(functions.items()))
    command, words = [sys.executable, "-m", "shared.hooks"], inspection.config.model_dump_json()
    try:
        importing = subprocess.run(command, input=words, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        yield ConfigError(field, path, f"importing {', '.join(functions.values())} did not end within {IMPORT_SECONDS:g} s")
        return
    if importing.returncode == 2:
        yield ConfigError(*json.loads(importing.stdout.splitlines()[-1]))
    elif importing.returncode != 0:
        words = " ".join(importing.stderr.split())[-LONGEST_WORDS:]
        yield ConfigError(field, path, f"importing {', '.join(functions.values())} ended with {importing.returncode}: {words}")
