"""``python -m services.reward.label_trial SECONDS``: tries before a run starts which labels the verifiers can match at all.

In, all at once: a JSON line ``[verifier, label]`` for each. Out, for each in the same order, as long as SECONDS of processor time last:
``{"matches": bool, "reads": text, "why": text}``. A label matches where the verifier gives full reward to an answer that says just it;
``reads`` is what the verifier compares answers with, ``why`` says why it can compare with none. A missing package ends it with code 3.
"""

import json
import sys
import time
from typing import Any

from services.reward.time_limit import OutOfTime, within
from services.reward.verifiers import READ_LABEL, VERIFIERS

LABEL_SECONDS = 5.0
"""The time for a label. One that needs more would take it from every response that is compared with it."""

MISSING = 3
"""Exit code where a verifier's package is not installed."""


def answers(verifier: str, label: str) -> list[str]:
    """Returns answers that consist of the label alone, in the forms that this verifier reads, those that compare fastest first."""
    if verifier != "math":
        return [label]
    boxed = f"\\boxed{{{label}}}"
    return [label, boxed] if label[-1:].isdigit() else [boxed, label]


def tried(verifier: str, label: str) -> dict[str, Any]:
    """Returns the result of trying a label. An empty label does not match, since no answer is empty."""
    try:
        return within(LABEL_SECONDS, lambda: _tried(verifier, label))
    except OutOfTime:
        return {"matches": False, "reads": "", "why": f"the label takes more than {LABEL_SECONDS:g} s to compare with itself"}
    except ValueError as error:
        return {"matches": False, "reads": "", "why": str(error)}


def _tried(verifier: str, label: str) -> dict[str, Any]:
    reads = READ_LABEL.get(verifier, str)(label)
    matches = bool(label.strip()) and any(VERIFIERS[verifier](answer, label) >= 1 for answer in answers(verifier, label))
    return {"matches": matches, "reads": reads, "why": ""}


def needs_parser(verifier: str, label: str) -> bool:
    """Returns whether math-verify reads the label."""
    number = label.strip().lstrip("+-")
    return verifier == "math" and bool(number) and not (number.isascii() and number.isdecimal())


def main() -> int:
    """Runs the command line and returns the exit code."""
    asked = [json.loads(line) for line in sys.stdin]
    try:
        if any(needs_parser(*question) for question in asked):
            VERIFIERS["math"]("x", "x")  # loads lazy imports now, so that no label's time includes them
        end = time.process_time() + float(sys.argv[1])
        for verifier, label in asked:
            print(json.dumps(tried(verifier, label)), flush=True)
            if time.process_time() > end:
                break
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed", file=sys.stderr)
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
