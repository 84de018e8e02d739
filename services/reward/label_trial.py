"""``python -m services.reward.label_trial SECONDS``: tries before a run starts which labels the verifiers can match at all.

In, all at once: a JSON line ``[verifier, label]`` for each. Out, for each in the same order, as long as SECONDS of processor time last:
``{"matches": bool, "reads": text, "why": text}``. A label matches where the verifier gives full reward to an answer that says just it;
``reads`` is what the verifier compares answers with, ``why`` says why it can compare with none. A missing package ends it with code 3.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from services.reward.worker import OutOfTime, within
from shared.rewards.names import QUEUES, RUNS_CODE, TEXT, base, needs_label
from shared.rewards.reference import Reference
from shared.rewards.verifiers import load, read_label, verify

LABEL_SECONDS = 5.0  # The time for a label. One that needs more would take it from every response that is compared with it.
MISSING = 3  # Exit code where a verifier's package is not installed


def answers(verifier: str, label: str) -> list[str]:
    """Returns answers that consist of the label alone, in the forms that this verifier reads, those that compare fastest first."""
    boxed, name = f"\\boxed{{{label}}}", base(verifier)
    if name == "math_verify":
        return [label, boxed] if label[-1:].isdigit() else [boxed, label]
    said = {"dapo": f"Answer: {label}", "deepscaler": f"</think>{boxed}", "math": boxed}.get(name, label)
    return [said if name == verifier else f"\\boxed{{{said}}}"]


def tried(verifier: str, label: str) -> dict[str, Any]:
    """Returns the result of trying a label. An empty label does not match where one is needed, since no answer is empty."""
    try:
        return within(LABEL_SECONDS, lambda: _tried(verifier, label))
    except OutOfTime:
        return {"matches": False, "reads": "", "why": f"the label takes more than {LABEL_SECONDS:g} s to compare with itself"}
    except ValueError as error:
        return {"matches": False, "reads": "", "why": str(error)}


def _tried(verifier: str, label: str) -> dict[str, Any]:
    reference = Reference(label)
    reads = read_label(verifier, reference)
    if not needs_label(verifier) or base(verifier) in RUNS_CODE:
        return {"matches": True, "reads": reads, "why": ""}
    values = (verify(verifier, answer, reference) for answer in answers(verifier, label) if label.strip())
    matches = any((value["score"] if isinstance(value, Mapping) else value) >= 1 for value in values)
    return {"matches": matches, "reads": reads, "why": ""}


def needs_parser(verifier: str, label: str) -> bool:
    """Returns whether a library reads the label."""
    number = label.strip().lstrip("+-")
    return QUEUES[base(verifier)] != TEXT and bool(number) and not (number.isascii() and number.isdecimal())


def main() -> int:
    """Runs the command line and returns the exit code."""
    asked = [json.loads(line) for line in sys.stdin]
    try:
        for verifier in {verifier for verifier, label in asked if needs_parser(verifier, label)}:
            load([verifier])  # now, so that no label's time includes it
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
