"""Labels that are tests, and the code of a response."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shared.rewards import verifiers
from shared.rewards.reference import Reference, label_problem
from shared.rewards.unit_test_cases import _PLAIN, Case, OutputCase, ScriptCase, ValueCase, cases_of, fenced_code
from shared.runtime.errors import DeadlineExceeded
from shared.sandbox.program import ProgramResult, SandboxSettings
from shared.sandbox.sandbox import SandboxGone, SandboxPool
from tests.support.tables import table


@table(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```python\nx = 1\n```\nno:\n```py\nx = 2\n```\nso it is.", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2\n"),
        ("<think>```python\nx = 1\n```</think>\nNo code.", None),
        ("```python\nx = 1", None),
        ("```bash\nls\n```", None),
        ("x = 1", None),
        ('```python\ns = "```"\n```', 's = "```"\n'),
        ("", None),
    ],
)
def test_the_last_block_of_python_is_the_code(response: str, code: str | None) -> None:
    assert fenced_code(response) == code


@table(
    ("label", "cases"),
    [
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, [OutputCase("1 2\n", "3\n")]),
        ({"inputs": [["1", "2"]], "outputs": [3]}, [OutputCase("1\n2", "3")]),
        ([{"input": "a", "output": "b"}], [OutputCase("a", "b")]),
        ('[{"input": "a", "output": "b"}]', [OutputCase("a", "b")]),
        ("assert f(1) == 2", [ValueCase("f(1)", 2)]),
        ("assert [2, (1,)] == f(1)", [ValueCase("f(1)", [2, (1,)])]),
        ("assert f(1) == -2, 'reason'", [ValueCase("f(1)", -2)]),
        (["assert f(1) == 2", "assert f(2) == {1: {2}}"], [ValueCase("f(1)", 2), ValueCase("f(2)", {1: {2}})]),
        ("import math\nassert f(math.pi) == 2", [ValueCase("f(math.pi)", 2, "import math")]),
        ({"tests": ["assert f(1) == 2"], "setup": "import re"}, [ValueCase("f(1)", 2, "import re")]),
        ("assert f(1)", [ScriptCase("assert f(1)")]),
        ("assert f(1) == g(1)", [ScriptCase("assert f(1) == g(1)")]),
        ("assert 1 < f(1) == 2", [ScriptCase("assert 1 < f(1) == 2")]),
        ("x = f(1)\nassert x == 2", [ScriptCase("x = f(1)\nassert x == 2")]),
        ("[f(1)]\nassert f(1) == 2", [ScriptCase("[f(1)]\nassert f(1) == 2")]),
    ],
)
def test_labels_and_their_tests(label: Any, cases: list[Case]) -> None:
    assert cases_of(label) == cases


def test_test_functions_and_classes_are_run() -> None:
    cases = cases_of("import unittest\ndef test_a(): assert f(1)\nclass B(unittest.TestCase):\n    def test_b(self): pass\nunittest.main()")
    assert [isinstance(case, ScriptCase) for case in cases] == [True, True]
    codes = [case.code for case in cases if isinstance(case, ScriptCase)]
    assert codes[0].endswith("\ntest_a()") and "loadTestsFromTestCase(B)" in codes[1] and "unittest.main()" not in "".join(codes)


CLASSES = """
import unittest
class Base(unittest.TestCase):
    def setUp(self): self.x = 1
class TestA(Base):
    def test_a(self): assert f(1)
class TestB(TestA): pass
class TestMixin:
    def test_c(self): assert f(1)
class TestC(TestMixin, Base): pass
class TestD(unittest.TestCase): pass
async def test_e(): assert f(1)
"""


def test_of_test_classes_those_are_run_that_have_tests_or_may_get_them() -> None:
    found = [case.code.rsplit("loadTestsFromTestCase(")[-1][:7] for case in cases_of(CLASSES) if isinstance(case, ScriptCase)]
    assert found[1:] == ["TestA))", "TestB))", "TestC))", "TestD))"]
    [first, *_] = cases_of(CLASSES)
    assert isinstance(first, ScriptCase) and first.code.endswith("\n__import__('asyncio').run(test_e())")


@table(
    ("report", "passed"),
    [
        ("{1: [1, 2]}", True),
        ("{'1': (1, 2)}", True),
        ("{2: [1, 2]}", False),
        ("{1: [2, 1]}", False),
        ("[[1, [1, 2]]]", False),
        ("{1}", False),
    ],
)
def test_a_value_is_compared_as_json_has_it_whose_keys_are_texts(report: str, passed: bool) -> None:
    [case] = cases_of({"inputs": [["a"]], "outputs": [{"1": [1, 2]}], "fn_name": "f"})
    assert case.passed(ProgramResult("ok", 0, None, b"", b"", report.encode(), False, 0.1, 0.1, 1)) == passed


def test_numbers_of_numpy_are_compared_as_pythons_and_arrays_are_not() -> None:
    inside: dict[str, Any] = {}
    exec(_PLAIN, inside)
    given = [np.int64(3), np.bool_(True), np.float32(0.5), np.complex64(1), (np.array(2),), np.longdouble(2.5)]
    assert repr(inside["_myxo_plain"](given)) == "[3, True, 0.5, (1+0j), (2,), 2.5]"
    for other in (np.array([1, 2]), np.datetime64("2020")):
        with pytest.raises((TypeError, ValueError)):
            inside["_myxo_plain"](other)


def test_functions_and_classes_run_behind_the_setup() -> None:
    unit = "class B(unittest.TestCase):\n    def test_b(self): assert f(X)"
    label = {"tests": ["def test_a(): assert f(X)", unit, "assert f(X)"], "setup": "import unittest\nX = 3"}
    codes = [case.code for case in cases_of(label) if isinstance(case, ScriptCase)]
    assert len(codes) == 3 and all(code.startswith("import unittest\nX = 3\n") for code in codes)


def test_an_import_of_the_future_of_a_whole_test_stands_before_the_setup() -> None:
    test = "from __future__ import annotations\ndef check(f): assert f(X)"
    [case] = cases_of({"test": test, "entry_point": "f", "setup": "X = 3"})
    assert isinstance(case, ScriptCase)
    compile(case.code, "tests", "exec")


@table("text", ["def test_a(): assert f(X)", "assert f(X) == f(3)", "assert any(map(f, [X]))"])
def test_an_import_of_the_future_stands_before_the_setup(text: str) -> None:
    for case in cases_of({"tests": f"from __future__ import annotations\n{text}", "setup": "X = 3"}):
        code = case.code if isinstance(case, ScriptCase) else case.setup
        assert code.startswith("from __future__ import annotations\nX = 3")
        compile(code, "tests", "exec")


@table(
    "label",
    [
        "class TestB:\n    def test_b(self): assert f(1)\nTestB().test_b()",
        "def test_f(a, b): assert f(a) == b\nfor a in range(3):\n    test_f(a, 2 * a)",
    ],
)
def test_a_text_may_run_its_tests_itself(label: str) -> None:
    assert cases_of(label) == [ScriptCase(label)]


def test_a_test_function_is_called_with_the_entry_point() -> None:
    [case] = cases_of({"test": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"})
    assert isinstance(case, ScriptCase) and case.code.endswith("\ncheck(f)")


@table(
    ("label", "problem"),
    [
        (3, "expected tests"),
        ("", "found none"),
        ([], "found none"),
        ("what is 1 + 1?", "found text that is no Python"),
        ([{"input": "a"}], "found \"{'input': 'a'}"),
        ({"inputs": ["a"], "outputs": []}, "lists of one length"),
        ({"inputs": ["a"], "outputs": [{}]}, "expected text as input and output"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f(); import os"}, "the name of a function"),
        ({"question": "a"}, "found an object with question"),
        ("42", "tests nothing"),
        ("def check(candidate):\n    assert candidate(1) == 2", "tests nothing"),
        ("def helper(): assert f(1)\nclass Other:\n    def test_f(self): assert f(1)", "tests nothing"),
        ("def test_f(tmp_path): assert f(1)", "test_f takes arguments"),
        ("def test_a(): assert f(1)\nclass TestB:\n    def test_b(self): assert f(1)", "the test class TestB"),
        ("async def test_f(tmp_path): assert f(1)", "test_f takes arguments"),
        ("def test_f(a): assert f(a)\nif __name__ == '__main__':\n    test_f(1)", "test_f takes arguments"),
        ('{"inputs": ["\\ud800"], "outputs": ["1"]}', "surrogates not allowed"),
        ("[" * 100_000, "no Python"),
        ("\0", "no Python"),
        ("(" * 5000, "no Python"),
    ],
)
def test_labels_that_are_no_tests_are_refused(label: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        cases_of(label)


def test_the_label_of_a_prompt_may_be_an_object_here_and_is_checked_before_the_start() -> None:
    label = '{"inputs": ["1"], "outputs": ["1"]}'
    assert label_problem("unit_tests", Reference(label, is_json=True)) is None
    assert label_problem("unit_tests", Reference(label)) is None
    assert "found an object with a" in str(label_problem("unit_tests", Reference('{"a": 1}', is_json=True)))
    assert "found None" in str(label_problem("unit_tests", Reference(None)))


def test_a_warm_sandbox_that_ends_as_it_is_taken_costs_no_response_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is not warm, since others may be as old; a second such end may be the response's doing."""
    gone, late = SandboxGone("its lease ran out"), DeadlineExceeded("its result", "a sandbox", 10.0, "it is ended")
    printed, label = ProgramResult("ok", 0, None, b"1\n", b"", b"", False, 0.1, 0.1, 1), {"inputs": [""], "outputs": ["1"]}
    for warm, new in ((gone, printed), (late, printed), (gone, gone)):
        pool = SandboxPool(SandboxSettings(), 0)
        pool._waiting.extend(Mock(run=Mock(side_effect=[warm])) for _ in range(2))
        monkeypatch.setattr(verifiers, "_pool", pool)
        monkeypatch.setattr("shared.sandbox.sandbox.Sandbox", Mock(return_value=Mock(run=Mock(side_effect=[new]))))
        if new is printed:
            assert verifiers.unit_tests("```python\nprint(1)\n```", Reference(label)) == {"score": 1.0, "passed": 1.0}
        else:
            with pytest.raises(SandboxGone):
                verifiers.unit_tests("```python\nprint(1)\n```", Reference(label))
