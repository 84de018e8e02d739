"""``python -m services.reward.labels SECONDS``: which labels the verifiers can match at all, tried before a run starts.

In, all at once: a JSON line ``[verifier, label]`` for each. Out, for each in the same order, as long as SECONDS of processor time last:
``{"matches": bool, "reads": text or null}``. A label matches where the verifier gives full reward to an answer that says just it;
``reads`` is what `math` takes the label for, null where it finds no expression in it. A package that is missing ends it with code 3.
"""

from __future__ import annotations

import json
import sys
import time

from services.reward.verifiers import VERIFIERS

MISSING = 3
"""Exit code where a verifier's package is not installed."""


def answers(verifier: str, label: str) -> list[str]:
    """Returns what says just the label, in the forms that answers to this verifier have; what is quickly compared comes first."""
    if verifier != "math":
        return [label]
    boxed = f"\\boxed{{{label}}}"
    return [label, boxed] if label[-1:].isdigit() else [boxed, label]


def matches(verifier: str, label: str) -> bool:
    """Returns whether an answer can get full reward. Nobody answers with nothing: an empty label does not match."""
    return bool(label.strip()) and any(VERIFIERS[verifier](answer, label) >= 1 for answer in answers(verifier, label))


def reads(verifier: str, label: str) -> str | None:
    """Returns what `math` takes a label for; of other verifiers, and of plain numbers, the label itself. None: no expression."""
    if not label.strip():
        return None
    if not needs_parser(verifier, label):
        return label
    from math_verify import parse  # sympy takes seconds to import: only where it is needed

    found = parse(f"${label}$") or parse(label)
    return str(found[0]) if found and not isinstance(found[0], str) else None


def needs_parser(verifier: str, label: str) -> bool:
    """Returns whether math-verify reads the label."""
    number = label.strip().lstrip("+-")
    return verifier == "math" and bool(number) and not (number.isascii() and number.isdecimal())


def main() -> int:
    """The command line. Returns the exit code."""
    asked = [json.loads(line) for line in sys.stdin]
    try:
        if any(needs_parser(*one) for one in asked):
            VERIFIERS["math"]("x", "x")  # loads what it imports on first use: no label's time
        end = time.process_time() + float(sys.argv[1])
        for verifier, label in asked:
            print(json.dumps({"matches": matches(verifier, label), "reads": reads(verifier, label)}), flush=True)
            if time.process_time() > end:
                break
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed", file=sys.stderr)
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
