"""Verifiers: a response and what it is compared with in, a score out. Synchronous; the reward service runs them in a process apart.

Tests of code run in a sandbox of its own for each response; docs/sandbox.md says which tests a label may hold, and what keeps a response
from passing them without solving them.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shared.rewards.boxed_math import extract_answer, get_deepscaler_rule_based_reward, grade_answer_verl
from shared.rewards.math_verify import integer_label, math_labels, math_verify, read
from shared.rewards.names import BOXED, REASONING_GYM, RUNS_CODE
from shared.rewards.reference import Reference
from shared.rewards.text_rewards import (
    check_instructions,
    compute_gpqa_reward,
    compute_ifbench_reward,
    compute_reasoning_gym_reward,
    compute_score,
    f1_score,
)
from shared.rewards.unit_test_cases import Case, cases_of, fenced_code
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.sandbox.program import ProgramResult, SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxGone, SandboxPool, SandboxUnavailable

WARM = 2  # Sandboxes that have started before a response needs them, in each process
# After a test that reached one of these limits the others are not run: they would most likely reach it, too, each after its time
_OVER = ("wall_time", "cpu_time", "memory", "processes")
_pool: SandboxPool | None = None


def open_sandboxes(settings: SandboxSettings) -> SandboxPool:
    """Starts the sandboxes of this process, and returns them. Raises ConfigError where there can be none."""
    global _pool
    close_sandboxes()
    pool = SandboxPool(settings, WARM)
    try:
        with pool.sandbox() as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        pool.close()
        raise ConfigError("sandbox.sandbox", settings.kind, str(error)) from None
    _pool = pool
    return pool


def close_sandboxes() -> None:
    """Ends them."""
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


def unit_tests(response: str, reference: Reference) -> Mapping[str, float]:
    """Returns ``score``, 1.0 where the code of a response passes all tests of its label, and ``passed``, the share that it passes. Raises
    ValueError for a label that holds no tests."""
    cases, code = cases_of(reference.value), fenced_code(response)
    if code is None:
        return {"score": 0.0, "passed": 0.0}
    pool = _pool or open_sandboxes(SandboxSettings())
    with contextlib.suppress(SandboxGone, DeadlineExceeded):  # its lease ended as it was taken, or the machine is too busy
        return _tested(pool, code, cases)
    pool.close()  # those that wait may be as old
    return _tested(pool, code, cases)


def _tested(pool: SandboxPool, code: str, cases: Sequence[Case]) -> Mapping[str, float]:
    with pool.sandbox() as sandbox:
        passed = sum(outcome.passed for outcome in run_tests(sandbox, code, cases))
    return {"score": float(passed == len(cases)), "passed": passed / len(cases)}


class CaseOutcome(NamedTuple):
    """The outcome of one test."""

    passed: bool
    result: ProgramResult


def run_tests(sandbox: Sandbox, code: str, cases: Sequence[Case]) -> list[CaseOutcome]:
    """Runs tests on code, one after the other. After one that reached a limit the others are not run, and are missing."""
    outcomes = list[CaseOutcome]()
    for case in cases:
        result = sandbox.run(case.program(code))
        outcomes.append(CaseOutcome(case.passed(result), result))
        if result.status in _OVER or (
            result.status == "exit_code"
            and result.stderr.rpartition(b"\n  File ")[2].startswith(b'"main.py"')
            and b"\nSyntaxError: " in result.stderr
        ):
            break
    return outcomes


Value = float | Mapping[str, Any]  # One reward, or several by name
Verifier = Callable[[str, Reference], Value]  # (response text, what it is compared with) → reward


def exact(response: str, reference: Reference) -> float:
    """Returns 1.0 where the response is the label, white space at both ends aside; else 0.0."""
    return float(response.strip() == reference.text.strip())


def _any(graded: Callable[[str, str], bool | int], response: str, reference: Reference) -> float:
    return float(any(graded(response, label) for label in math_labels(reference.text)))


# The verifiers, by ``rm_type``
VERIFIERS: dict[str, Verifier] = {
    "dapo": lambda response, reference: compute_score(response, integer_label(reference.text)),
    "deepscaler": lambda response, reference: _any(get_deepscaler_rule_based_reward, response, reference),
    "exact": exact,
    "f1": lambda response, reference: f1_score(response, reference.text)[0],
    "gpqa": lambda response, reference: compute_gpqa_reward(response, reference.value, reference.metadata),
    "ifbench": lambda response, reference: compute_ifbench_reward(response, reference.value, reference.metadata),
    "math": lambda response, reference: _any(grade_answer_verl, response, reference),
    "math_verify": lambda response, reference: math_verify(response, reference.text),
    REASONING_GYM: lambda response, reference: compute_reasoning_gym_reward(response, reference.label, reference.metadata),
    "random": lambda response, reference: float(random.randint(0, 1)),
    "unit_tests": unit_tests,
}
READ_LABEL: dict[str, Callable[[str], str]] = {
    **{"dapo": integer_label, "math_verify": read},
    **dict.fromkeys(("deepscaler", "math"), lambda label: math_labels(label)[0]),
}
"""Readers of labels, by ``rm_type``; raises ValueError for one that it would compare wrongly, or with nothing.

The others take a label as it is."""


_RESPONSE, _LABEL = "</think>\\boxed{\\frac{2x}{2}}", "x"  # A response and a label over which verifiers load their libraries


def load(names: Iterable[str]) -> None:
    """Loads what the verifiers import late. Raises ImportError where a package is missing."""
    for name in names:
        with contextlib.suppress(ValueError):  # this is no label for all of them
            verify(name, _RESPONSE, Reference(_LABEL))


def verify(name: str, response: str, reference: Reference) -> Value:
    """Returns the reward of a response by the verifier ``name``, which gets what stands in the last box where it has slime's prefix for it.
    Raises ValueError for a label that it cannot compare with."""
    if name.startswith(BOXED):
        response, name = extract_answer(response) or "", name.removeprefix(BOXED)
    return VERIFIERS[name](response, reference)


def pattern_answer(response: str, pattern: str | None) -> str:
    """Returns the last match of ``reward.answer_pattern``, of a pattern with a group what that holds, "" of none. None: the response."""
    return response if pattern is None else next(iter(re.findall(pattern, response)[-1:]), "")


def read_label(name: str, reference: Reference) -> str:
    """Returns what the verifier ``name`` reads in the label. Raises ValueError as `READ_LABEL` says, and for an unknown instruction."""
    name = name.removeprefix(BOXED)
    if name == "ifbench":
        check_instructions(reference.metadata)
    if name in RUNS_CODE:
        cases_of(reference.value)
    return READ_LABEL[name](reference.text) if name in READ_LABEL else reference.label or ""
