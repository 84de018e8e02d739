"""Tests of generated code: what a label says, what of it is run in a sandbox, and what counts as passed.

Expected outputs and values stay outside: inside runs what gives them, so that no program sees what it is compared with. What is more than
one comparison (a test function, several statements) runs inside too, in a process that the program cannot look into
(`shared.rewards.code_process`), and says that it came to its end.
"""

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.rewards import code_process
from shared.sandbox.program import REPORT, Program, ProgramResult

_FENCE = re.compile(r"^```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_THOUGHT = "</think>"
_HARNESS = Path(code_process.__file__).read_text()

EXPECTED = (
    "expected tests: Python text with assertions, a list of them, a list of {input, output}, an object {inputs, outputs}, with fn_name for "
    "calls, or {test, entry_point}"
)

# Makes a value of Python's plain types: what it prints as says all of it
_PLAIN = """
def _myxo_plain(value):
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {_myxo_plain(key): _myxo_plain(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            found = [_myxo_plain(item) for item in value]
            return set(found) if kind is frozenset else kind(found)
    if value is None:
        return None
    if hasattr(value, "as_integer_ratio"):
        return float(value)
    if hasattr(value, "item"):  # a number of numpy's, or an array of one
        return _myxo_plain(value.item())
    raise TypeError(f"a value of type {type(value).__name__} is not compared")
"""


@dataclass(frozen=True)
class OutputCase:
    """A program reads ``stdin`` and has to print ``expected``, white space at the ends of lines and of the text aside."""

    stdin: str
    expected: str

    def program(self, code: str) -> Program:
        return Program(sources=(code,), stdin=self.stdin.encode())

    def passed(self, result: ProgramResult) -> bool:
        """Returns whether the program ended with exit code 0 and printed what it should."""
        return result.ok and _lines(result.stdout.decode(errors="replace")) == _lines(self.expected)


@dataclass(frozen=True)
class ValueCase:
    """An expression has to have the value ``expected``, of Python's plain types. ``setup``: runs before it. as_json: or as JSON has
    it."""

    expression: str
    expected: Any
    setup: str = ""
    as_json: bool = False

    def program(self, code: str) -> Program:
        asked = f"{_PLAIN}\nimport os as _myxo_os\n_myxo_os.write({REPORT}, repr(_myxo_plain({self.expression})).encode())"
        return Program(sources=(_AS_MODULE, code, self.setup, asked))

    def passed(self, result: ProgramResult) -> bool:
        """Returns whether the value is the expected one."""
        try:
            found = ast.literal_eval(result.report.decode(errors="replace"))
            return bool(found == self.expected or (self.as_json and _as_json(found) == _as_json(self.expected)))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # what the program makes of it is no value
            return False


@dataclass(frozen=True)
class ScriptCase:
    """A test that has to come to its end. entry: the function that it tests. together: it runs in the code's own interpreter, where code
    that looks for the test finds it and can change what it says."""

    code: str
    entry: str = ""
    together: bool = False

    def program(self, code: str) -> Program:
        if self.together:
            return Program(sources=(_AS_MODULE, code, self.code, f"__import__('os').write({REPORT}, {code_process.PASSED!r})"))
        return Program((), (f"run({code!r}, {self.entry!r})",), self.code.encode(errors="replace"), _HARNESS)

    def passed(self, result: ProgramResult) -> bool:
        """Returns whether it did."""
        return result.ok and result.report == code_process.PASSED


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_FUTURE = re.compile(r"^from __future__ import .+$", re.MULTILINE)
_RUN_CLASS = """
import unittest as _myxo_unittest
_myxo_ran = _myxo_unittest.TextTestRunner().run(_myxo_unittest.defaultTestLoader.loadTestsFromTestCase({}))
assert _myxo_ran.testsRun and _myxo_ran.wasSuccessful()
"""

Case = OutputCase | ValueCase | ScriptCase

_AS_MODULE = "__name__ = 'solution'"  # What stands under ``if __name__ == "__main__"`` is for programs that are run, and waits for an input


def fenced_code(response: str) -> str | None:
    """Returns the last fenced block of Python in a response, after its thoughts; of one without such, the last block without a language."""
    blocks = _FENCE.findall(response.rpartition(_THOUGHT)[2])
    for languages in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language.lower() in languages]
        if found:
            return str(found[-1])
    return None


def cases_of(label: Any) -> list[Case]:
    """Returns the tests of a label: a JSON value, or text, which may be JSON itself. Raises ValueError for what is none."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # Python may begin so, too
            return cases_of(json.loads(label))
    fields = label if isinstance(label, dict) else {"tests": label}
    entry, together = str(fields.get("entry_point") or ""), bool(fields.get("together"))
    cases = _object_cases(fields)
    found = [replace(case, entry=entry, together=together) if isinstance(case, ScriptCase) else case for case in cases]
    if not found:
        raise ValueError(f"{EXPECTED}; found none")
    return found


def _object_cases(label: dict[str, Any]) -> Iterator[Case]:
    setup = str(label.get("setup") or "")
    if "inputs" in label or "outputs" in label:
        yield from _paired_cases(label, setup)
    elif "tests" in label:
        tests = label["tests"]
        for item in tests if isinstance(tests, list) else [tests]:
            yield from _item_cases(item, setup)
    elif "test" in label:
        name = label.get("entry_point")
        if name is not None and not str(name).isidentifier():
            raise ValueError(f"expected the name of a function as entry_point, found {str(name)[:80]!r}")
        called = f"\ncheck({name})" if name is not None else ""
        yield from _python_cases(f"{setup}\n{label['test']}{called}", "")
    else:
        raise ValueError(f"{EXPECTED}; found an object with {', '.join(map(str, label))[:80]}")


def _paired_cases(label: dict[str, Any], setup: str) -> Iterator[Case]:
    inputs, outputs, name = label.get("inputs"), label.get("outputs"), label.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("expected lists of one length as inputs and outputs")
    if name is not None and not str(name).isidentifier():
        raise ValueError(f"expected the name of a function as fn_name, found {str(name)[:80]!r}")
    for given, expected in zip(inputs, outputs, strict=True):
        yield OutputCase(_text(given), _text(expected)) if name is None else _call(str(name), given, expected, setup)


def _item_cases(item: Any, setup: str) -> Iterator[Case]:
    if isinstance(item, str):
        yield from _python_cases(item, setup)
    elif isinstance(item, dict) and "input" in item and "output" in item:
        yield OutputCase(_text(item["input"]), _text(item["output"]))
    else:
        raise ValueError(f"{EXPECTED}; found {str(item)[:80]!r}")


def _python_cases(text: str, setup: str) -> Iterator[Case]:
    """Yields a case for each comparison, where a text consists of imports and comparisons; else one for all of it."""
    setup, text = "\n".join([*_FUTURE.findall(text), setup]), _FUTURE.sub("", text)  # these stand before all else
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{EXPECTED}; found text that is no Python: {error}") from None
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    before = "\n".join([setup, *map(ast.unparse, imports)]).strip()
    compared = [_comparison(node, before) for node in statements if node not in imports]
    if None in compared:
        yield from _script_cases(text, f"{setup}\n" if setup else "", statements)
    else:
        yield from (case for case in compared if case is not None)


def _script_cases(text: str, setup: str, statements: list[ast.stmt]) -> Iterator[Case]:
    """Yields a case for each test function and test class, which somebody has to call; of a text without such, one for all of it."""
    run = [node for node in statements if not isinstance(node, _DEFINITIONS) and not _runs_all(node)]
    if called := list(_test_calls(statements, run)):
        plain = "\n".join(ast.unparse(node) for node in statements if not _runs_all(node))
        yield from (ScriptCase(f"{setup}{plain}\n{call}") for call in called)
    elif any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for statement in run for node in ast.walk(statement)):
        yield ScriptCase(setup + text)
    else:
        raise ValueError(f"{EXPECTED}; found Python that tests nothing when it is run: {text.strip()[:80]!r}")


def _test_calls(statements: list[ast.stmt], run: list[ast.stmt]) -> Iterator[str]:
    """Yields how each test function and test class is run, as pytest and unittest do. Raises ValueError for one that nothing runs."""
    own = [node for statement in run if not isinstance(statement, ast.If) for node in ast.walk(statement)]  # not under ``__main__``
    used = {node.id for node in own if isinstance(node, ast.Name)}
    for test in _tests(statements):
        if not test.args.args and not test.args.posonlyargs:
            yield f"{test.name}()" if isinstance(test, ast.FunctionDef) else f"__import__('asyncio').run({test.name}())"
        elif test.name not in used:
            raise ValueError(f"the test function {test.name} takes arguments, and there are no fixtures")
    classes = {node: {ast.unparse(base) for base in node.bases} for node in statements if isinstance(node, ast.ClassDef)}
    yield from _class_calls(classes, set[str]().union(*classes.values()), used)


def _class_calls(classes: dict[ast.ClassDef, set[str]], inherited: set[str], used: set[str]) -> Iterator[str]:
    cases, tested = set[str](), set[str]()
    for node, bases in classes.items():  # those that one inherits from stand before it
        if bases & tested or _tests(node.body):
            tested.add(node.name)
        if bases & cases or "TestCase" in " ".join(bases):
            cases.add(node.name)
            if node.name in tested or node.name not in inherited:
                yield _RUN_CLASS.format(node.name)
        elif node.name in tested - inherited - used and node.name.startswith("Test"):
            raise ValueError(f"the test class {node.name} is none of unittest.TestCase, and its tests would not be run")


def _tests(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")]


def _runs_all(node: ast.stmt) -> bool:
    """Returns whether a statement has a library run all tests, which ends the program before it says how they went."""
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("unittest.main(", "pytest.main("))


def _comparison(node: ast.stmt, setup: str) -> ValueCase | None:
    """Returns ``assert expression == literal``, either way round, as a case; None of another statement."""
    match node:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            for expression, literal in ((left, right), (right, left)):
                with contextlib.suppress(ValueError, TypeError):
                    return ValueCase(ast.unparse(expression), ast.literal_eval(literal), setup)
    return None


def _call(name: str, given: Any, expected: Any, setup: str) -> ValueCase:
    arguments = given if isinstance(given, list) else [given]
    found = f"(getattr(Solution(), {name!r}) if 'Solution' in globals() else {name})"
    return ValueCase(f"{found}(*{arguments!r})", expected, setup, as_json=True)


def _as_json(value: Any) -> Any:
    """Returns a value as JSON has it, with lists in the place of tuples and with texts as keys. Raises TypeError where it has no such."""
    return json.loads(json.dumps(value))


def _text(value: Any) -> str:
    """Returns standard input or output as text; a list holds its lines. Raises ValueError, also for halves of characters."""
    if not isinstance(value, list | str | int | float):
        raise ValueError(f"expected text as input and output, found {str(value)[:80]!r}")
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    text.encode()
    return text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
