"""Scores groups in a process of its own, which the service kills when a call blocks it.

``python -m services.reward.worker``; it speaks as `shared.process.call_server` says. Its setup: ``{"verifiers": [name, …], "sandbox": the
fields of [sandbox] or None}``, or ``{"config": JSON}`` for the user's own functions. A request: what `VerifierCalls.answer` or
`services.reward.custom_functions.Functions.answer` takes; an answer: ``{"scores": [score, …]}``, for functions with ``"filtered"``, or
``{"error": text}``, with ``"unable"`` where the fault is the machine's.

A computation ends in the main thread at its deadline, wherever it is: in Python, in sympy, in a regular expression. The alarm's exception
may come in the middle of a destructor or a callback, where Python drops it; so it is raised again until it is heeded. What holds up the
interpreter itself (C code that never looks for signals) is not ended: who waits for the process has to kill it.
"""

import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from shared.hooks import reward_values
from shared.process.call_server import Calls, serve_calls
from shared.rewards.names import RUNS_CODE, base, missing_package, wrong
from shared.rewards.reference import Reference
from shared.rewards.verifiers import Value, load, open_sandboxes, pattern_answer, read_label, verify
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import error_words
from shared.sandbox.sandbox import SandboxUnavailable

Result = TypeVar("Result")

REPEAT_SECONDS = 0.2  # The pause between the alarms of a computation that continues after its deadline


class OutOfTime(BaseException):
    """The time of a computation is over. No Exception: libraries that continue after any error must not continue after this one."""


_armed = False


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Returns the result of ``work``. Raises OutOfTime where it takes longer than ``seconds``. It uses the process's only alarm."""
    try:
        try:
            _arm(seconds)
            return work()
        finally:
            _disarm()
    finally:
        _disarm()  # for the alarm that came in the middle of the first one


def _arm(seconds: float) -> None:
    global _armed
    signal.signal(signal.SIGALRM, _on_alarm)
    _armed = True
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_SECONDS)


def _disarm() -> None:
    global _armed
    _armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)


def _on_alarm(*_: object) -> None:
    if _armed:
        raise OutOfTime


# The most memory of a verifier's process. A tower of powers should end as an error in it, and not with the end of its neighbours.
MEMORY_BYTES = 4 << 30


NAMED = {"dapo": "score", "unit_tests": "score"}  # The reward that counts of verifiers that give several, where the run names none
LONGEST_PROBLEM = 200  # The most characters of why a response or a label was not read: a library's error may repeat it whole


class VerifierCalls(Calls):
    """Answers calls by verifiers, one after the other. A response that they cannot verify, or not in time, gets the reward of a wrong one.
    ``names``: the verifiers that will be asked for. ``sandbox``: the fields of ``[sandbox]``, for those that run code. Raises ConfigError
    where one needs a package that is not installed, or a sandbox that cannot be started."""

    def __init__(self, names: list[str], sandbox: dict[str, Any] | None = None) -> None:
        for name in names:
            if (missing := missing_package(name)) is not None:
                raise ConfigError("reward.rm_type", name, missing)
        if any(base(name) in RUNS_CODE for name in names):
            from shared.config.service_sections import SandboxSection  # imports pydantic, which the others do without

            open_sandboxes(SandboxSection.model_validate(sandbox or {}).settings())
        load(names)  # now: sympy takes seconds, which no call's deadline should include
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns a score for each response. Each may take its share of what is left of the call's ``seconds``.

        Args:
            request: ``{"name": verifier, "responses": [text, …], "references": [map, …], "pattern": text or None, "key": text or None,
                "seconds": number}``: a reference for each response, or one for all of them; the pattern takes the answer out of a response;
                the key names the reward that counts.
        """
        name, responses, end = request["name"], request["responses"], time.monotonic() + request["seconds"]
        pattern = request.get("pattern")
        references = [Reference(**fields) for fields in request["references"]]
        try:
            within(request["seconds"], lambda: [read_label(name, reference) for reference in references])
        except (Exception, OutOfTime) as error:
            return {"error": f"verifier {name}: {_problem(error, 'the label was not read', request['seconds'])}"}
        scores: list[dict[str, object]] = []
        for index, text in enumerate(responses):
            seconds = (end - time.monotonic()) / (len(responses) - index)
            reference = references[index % len(references)]
            try:
                value = within(seconds, partial(_verified, name, text, pattern, reference))
                scores.append(asdict(reward_values.read(value, request.get("key") or NAMED.get(base(name)))))
            except SandboxUnavailable as error:  # no response has brought it about
                return {"error": f"verifier {name}: {error}", "unable": True}
            except (Exception, OutOfTime) as error:
                problem = _problem(error, f"a response of {len(text)} characters was not verified", seconds)
                scores.append({"reward": wrong(name, request.get("key")), "unread": f"verifier {name}: {problem}"})
        return {"scores": scores}


def _verified(name: str, response: str, pattern: str | None, reference: Reference) -> Value:
    return verify(name, pattern_answer(response, pattern), reference)


def _problem(error: BaseException, undone: str, seconds: float) -> str:
    return f"{undone} within {seconds:.1f} s" if isinstance(error, OutOfTime) else error_words(error)[:LONGEST_PROBLEM]


def main() -> None:
    """Answers requests until the service is gone."""
    serve_calls(_calls)


def _calls(setup: dict[str, Any]) -> Calls:
    if "verifiers" in setup:
        return VerifierCalls(setup["verifiers"], setup.get("sandbox"))
    from services.reward.custom_functions import Functions  # imports the whole config, which verifiers do without
    from shared.config.run_config import RunConfig

    return Functions(RunConfig.model_validate_json(setup["config"]))


if __name__ == "__main__":
    main()
