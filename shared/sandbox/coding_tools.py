"""The tools of an agent that writes code: files of a sandbox's work folder, and tests of what is in them.

The schemas are OpenAI's. What the model gets wrong (a tool that is none, arguments that do not fit) is answered in words, as a failing test
is: it is the model's to mend, and costs its rollout nothing.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from shared.agents.agent_options import arguments_of, shortened
from shared.rewards.unit_test_cases import Case
from shared.rewards.verifiers import CaseOutcome, run_tests
from shared.sandbox.program import Program, ProgramResult, SandboxSettings
from shared.sandbox.sandbox import Sandbox

SOLUTION = "solution.py"  # The file that tests are run on
LONGEST_ANSWER = 4000  # The most characters of an answer to the model: of a longer one the beginning and the end
_PATH = {"type": "string", "description": f"a path in the work folder, such as {SOLUTION}"}
_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "write_file": ("Writes a file, in place of what it held.", {"path": _PATH, "content": {"type": "string"}}),
    "read_file": ("Shows a file.", {"path": _PATH}),
    "edit_file": (
        "Replaces a piece of a file that occurs in it once.",
        {"path": _PATH, "old": {"type": "string", "description": "the piece, exactly"}, "new": {"type": "string"}},
    ),
    "run_file": ("Runs a Python file and shows what it prints.", {"path": _PATH, "stdin": {"type": "string", "description": "its input"}}),
    "run_tests": (f"Runs the tests on {SOLUTION} and shows which fail.", {}),
}
_OPTIONAL = ("stdin",)

# The tools as OpenAI's chat completions take them
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [field for field in properties if field not in _OPTIONAL],
                "additionalProperties": False,
            },
        },
    }
    for name, (description, properties) in _TOOLS.items()
]


class CodingTools(AbstractAsyncContextManager["CodingTools"]):
    """Answers calls of the tools in one sandbox, which lasts as long as the conversation. ``settings``: of the sandbox. ``cases``: the
    tests that `SOLUTION` has to pass."""

    def __init__(self, settings: SandboxSettings, cases: Sequence[Case]) -> None:
        self._sandbox, self._cases = Sandbox(settings), list(cases)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._sandbox.close)

    async def call(self, name: str, arguments: str) -> str:
        """Returns the answer to a call. ``arguments``: JSON text, as the model wrote it. Raises SandboxUnavailable and SandboxGone."""
        return shortened(await asyncio.to_thread(self._answer, name, arguments), LONGEST_ANSWER)

    async def passed(self) -> float:
        """Returns the share of the tests that `SOLUTION` passes as it is now; 0 where there is none."""
        outcomes = await asyncio.to_thread(self._outcomes)
        return sum(outcome.passed for outcome in outcomes) / len(self._cases) if self._cases else 0.0

    def _answer(self, name: str, arguments: str) -> str:
        try:
            if name not in _TOOLS:
                raise ValueError(f"there is no tool {name[:80]!r}; use {', '.join(_TOOLS)}")
            tool: Callable[..., str] = getattr(self, f"_{name}")
            return tool(**_fields(name, arguments))
        except ValueError as error:
            return f"error: {error}"

    def _write_file(self, path: str, content: str) -> str:
        return _problem(self._sandbox.write_file(path, content.encode(errors="replace"))) or f"wrote {path}"

    def _read_file(self, path: str) -> str:
        result = self._sandbox.read_file(path)
        return _problem(result) or result.stdout.decode(errors="replace")

    def _edit_file(self, path: str, old: str, new: str) -> str:
        result = self._sandbox.read_file(path)
        text = result.stdout.decode(errors="replace")
        if not result.ok:
            return _problem(result)
        if (count := text.count(old) if old else 0) != 1:
            return f"error: old occurs {count} times in {path}; it has to occur once"
        return self._write_file(path, text.replace(old, new))

    def _run_file(self, path: str, stdin: str = "") -> str:
        result = self._sandbox.run(
            Program(command=("python3", path if path.startswith("/") else f"./{path}"), stdin=stdin.encode(errors="replace"))
        )
        return f"{result.words()}\n{_output(result)}"

    def _run_tests(self) -> str:
        outcomes = self._outcomes()
        lines = [f"{sum(outcome.passed for outcome in outcomes)} of {len(self._cases)} tests passed"]
        for number, outcome in enumerate(outcomes, 1):
            if not outcome.passed:
                why = outcome.result.words() if outcome.result.status != "ok" else "gave another result"
                lines.append(f"test {number} {why}\n{_output(outcome.result)}".rstrip())
        missing = len(self._cases) - len(outcomes)
        return "\n".join([*lines, f"{missing} tests were not run"] if missing else lines)

    def _outcomes(self) -> list[CaseOutcome]:
        found = self._sandbox.read_file(SOLUTION)
        return run_tests(self._sandbox, found.stdout.decode(errors="replace"), self._cases) if found.ok else []


def _fields(name: str, arguments: str) -> dict[str, str]:
    """Returns the arguments of a call. Raises ValueError for what does not fit its schema."""
    given, properties = arguments_of(arguments), _TOOLS[name][1]
    if any(field not in properties for field in given):
        raise ValueError(f"expected an object with {', '.join(properties) or 'no fields'}")
    for field in properties:
        if field not in given and field not in _OPTIONAL:
            raise ValueError(f"{field} is missing")
        if not isinstance(given.get(field, ""), str):
            raise ValueError(f"{field} has to be text")
    if "\0" in given.get("path", ""):
        raise ValueError("a path holds no zero bytes")
    return given


def _problem(result: ProgramResult) -> str:
    """Returns what went wrong; nothing where nothing did."""
    return "" if result.ok else f"error: {result.stderr.decode(errors='replace').strip() or result.words()}"


def _output(result: ProgramResult) -> str:
    text = "".join(part.decode(errors="replace") for part in (result.stdout, result.stderr))
    return text + ("\n(cut off)" if result.truncated else "")
