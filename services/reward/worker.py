"""A verifier in a process of its own: one JSON line in, one JSON line out. Killed from outside when it takes too long.

``python -m services.reward.worker math``; out, once, when everything is loaded: ``{"ready": true}``; in:
``{"responses": [text, …], "label": text}``; out: ``{"rewards": [float, …]}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import sys

from services.reward.verifiers import VERIFIERS
from shared.embedded import die_with_parent


def main() -> None:
    """Answers lines until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not mix with the answers
    verifier = VERIFIERS[sys.argv[1]]
    verifier("", "x")  # loads what it imports on first use: sympy takes seconds, and no call's deadline should pay them
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, object] = {"rewards": [float(verifier(text, request["label"])) for text in request["responses"]]}
        except Exception as error:  # whatever a verifier raises is the sample's fate, not this process's
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
