"""Scores groups in a process of its own, which the service kills when a call blocks it.

``python -m services.reward.worker``; it speaks as `shared.workers.call_server` says. Its setup: ``{"verifier": name}``, or
``{"config": JSON}`` for the user's own functions. A request: ``{"responses": [text, …], "label": text, "seconds": number}`` for a verifier,
else what `services.reward.custom_functions.Functions.answer` takes; an answer: ``{"scores": [score, …]}``, for functions with
``"filtered"``, or ``{"error": text}``.
"""

import resource
import time
from functools import partial
from typing import Any

from services.reward.time_limit import OutOfTime, within
from services.reward.verifiers import READ_LABEL, VERIFIERS
from shared.workers.call_server import Calls, serve_calls

MEMORY_BYTES = 4 << 30
"""The most memory of a verifier's process. A tower of powers should end as an error in it, and not with the end of its neighbours."""


LONGEST_PROBLEM = 200
"""The most characters of why a response or a label was not read: a library's error may repeat it whole."""


class VerifierCalls:
    """Answers calls by one verifier, one after the other. A response that it cannot verify, or not in time, gets 0 and costs no other."""

    def __init__(self, name: str) -> None:
        self._name, self._verifier, self._read_label = name, VERIFIERS[name], READ_LABEL.get(name, str)
        self._verifier("", "x")  # loads lazy imports now: sympy takes seconds, which no call's deadline should include
        self.waits: list[str] = []
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns a score for each response. Each may take its share of what is left of the call's ``seconds``."""
        responses, label, end = request["responses"], request["label"], time.monotonic() + request["seconds"]
        try:
            within(request["seconds"], lambda: self._read_label(label))
        except (Exception, OutOfTime) as error:
            return {"error": f"verifier {self._name}: {_problem(error, 'the label was not read', request['seconds'])}"}
        scores: list[dict[str, object]] = []
        for index, text in enumerate(responses):
            seconds = (end - time.monotonic()) / (len(responses) - index)
            try:
                scores.append({"reward": float(within(seconds, partial(self._verifier, text, label)))})
            except (Exception, OutOfTime) as error:
                problem = _problem(error, f"a response of {len(text)} characters was not verified", seconds)
                scores.append({"reward": 0.0, "unread": f"verifier {self._name}: {problem}"})
        return {"scores": scores}


def _problem(error: BaseException, undone: str, seconds: float) -> str:
    return f"{undone} within {seconds:.1f} s" if isinstance(error, OutOfTime) else f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]


def main() -> None:
    """Answers requests until the service is gone."""
    serve_calls(_calls)


def _calls(setup: dict[str, Any]) -> Calls:
    if "verifier" in setup:
        return VerifierCalls(setup["verifier"])
    from services.reward.custom_functions import Functions  # imports the whole config, which verifiers do without
    from shared.config.run_config import RunConfig

    return Functions(RunConfig.model_validate_json(setup["config"]))


if __name__ == "__main__":
    main()
