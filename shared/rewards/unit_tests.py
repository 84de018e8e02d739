"""Runs tests on the code of a response, in a sandbox of its own for each response.

docs/sandbox.md says which tests a label may hold, and what keeps a response from passing them without solving them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shared.rewards.reference import Reference
from shared.rewards.unit_test_cases import Case, cases_of, fenced_code
from shared.runtime.errors import ConfigError
from shared.sandbox.program import ProgramResult, SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.sandbox.sandbox_pool import SandboxPool

WARM = 2
"""Sandboxes that have started before a response needs them, in each process."""

_OVER = ("wall_time", "cpu_time", "memory", "processes")
"""After a test that reached one of these limits the others are not run: they would most likely reach it, too, each after its time."""

_pool: SandboxPool | None = None


def open_sandboxes(settings: SandboxSettings) -> None:
    """Starts the sandboxes of this process. Raises ConfigError where there can be none."""
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


def close_sandboxes() -> None:
    """Ends them."""
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


def unit_tests(response: str, reference: Reference) -> Mapping[str, float]:
    """Returns ``score``, 1.0 where the code of a response passes all tests of its label, and ``passed``, the share that it passes.

    Raises ValueError for a label that holds no tests.
    """
    cases, code = cases_of(reference.value), fenced_code(response)
    if code is None:
        return {"score": 0.0, "passed": 0.0}
    if _pool is None:
        open_sandboxes(SandboxSettings())
    assert _pool is not None
    with _pool.sandbox() as sandbox:
        passed = sum(outcome.passed for outcome in run_tests(sandbox, code, cases))
    return {"score": float(passed == len(cases)), "passed": passed / len(cases)}


class CaseOutcome(NamedTuple):
    """What came of one test."""

    passed: bool
    result: ProgramResult


def run_tests(sandbox: Sandbox, code: str, cases: Sequence[Case]) -> list[CaseOutcome]:
    """Runs tests on code, one after the other. After one that reached a limit the others are not run, and are missing."""
    outcomes = list[CaseOutcome]()
    for case in cases:
        result = sandbox.run(case.program(code))
        outcomes.append(CaseOutcome(case.passed(result), result))
        if result.status in _OVER or _never_runs(result):
            break
    return outcomes


def _never_runs(result: ProgramResult) -> bool:
    """Returns whether the code itself is no Python, so that every test ends alike."""
    return (
        result.status == "exit_code"
        and result.stderr.rpartition(b"\n  File ")[2].startswith(b'"main.py"')
        and b"\nSyntaxError: " in result.stderr
    )
