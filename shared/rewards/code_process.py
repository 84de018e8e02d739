"""Runs tests in one process of a sandbox and the code that they test in another, so that the code cannot meddle with the tests.

Executed inside, in a fork of the sandbox's first process; `ScriptCase` sends it. The tests come over standard input and are read after the
code has its own process: they are nowhere in its memory. What the tests call of the code runs there, and what crosses is values of
Python's plain types, compared where the tests are: an ``__eq__`` of the code's own is asked only between two of its objects. Anything else
crosses as a `Remote`, whose calls, attributes and items are the owner's. What the code changes in a list, dictionary or set that it was
given is changed in the tests' one as well, and what it prints is printed by the tests. The tests' process alone can say how they went, and
is not dumpable: the code finds neither its memory nor its descriptors.

It imports little: each test starts it anew.
"""

from __future__ import annotations

import _io
import _json
import _operator
import builtins
import ctypes
import os
import sys
import types

TYPE_CHECKING = False  # typing takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PASSED = b"passed"  # What the tests' process reports when they have come to their end
_REPORT, _PR_SET_DUMPABLE = 3, 4
_CHUNK = 1 << 16

_CONTAINERS = (list, tuple, dict, set, frozenset)
_KINDS: tuple[type[Any], ...] = (bool, int, float, complex, str, bytes, *_CONTAINERS)
_SCALARS = {type(None), bool, int, float, str}
# The least integer that is sent in hexadecimal: Python reads decimals of any length on request only, and in quadratic time
_LONG = 1 << 4096
_TYPES: tuple[type[Any], ...] = (*_KINDS, bytearray, range)
_MADE: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in _CONTAINERS}
# Scalars that JSON does not have
_TEXTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "int": (hex, lambda text: int(text, 16)),
    "complex": (lambda sent: [sent.real, sent.imag], lambda parts: complex(*parts)),
    "bytes": (lambda sent: sent.decode("latin-1"), lambda text: text.encode("latin-1")),
    "ellipsis": (lambda _: None, lambda _: ...),
}
# Other types that cross by value: what is sent of them, and how they are made of it
_WRITTEN: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {
    ("builtins", "bytearray"): (bytes, lambda kind, held: kind(held)),
    ("builtins", "range"): (lambda sent: (sent.start, sent.stop, sent.step), lambda kind, held: kind(*held)),
    ("datetime", "timedelta"): (lambda sent: (sent.days, sent.seconds, sent.microseconds), lambda kind, held: kind(*held)),
    **{
        ("datetime", name): (lambda sent: sent.isoformat(), lambda kind, held: kind.fromisoformat(held))
        for name in ("date", "datetime", "time")
    },
    **{key: (str, lambda kind, held: kind(held)) for key in (("decimal", "Decimal"), ("fractions", "Fraction"))},
}
# Modules whose exceptions are classes of both ends, loaded or not. They say that a value is wrong; those of asyncio, concurrent.futures and
# unittest have a task dropped or a test skipped, and are made by their name, as all others are
_RAISED = ("json.decoder", "decimal", "subprocess", "dataclasses", "statistics", "struct", "binascii", "zlib", "re", "_csv", "sqlite3")
_OPEN = ("tests", "collections", "types")  # The modules of which the code may ask attributes of objects that the tests gave it
# What the owner of an object does with it
_OWNERS: dict[str, Callable[..., Any]] = {
    "__call__": lambda owned, *given, **named: owned(*given, **named),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__enter__": lambda owned: type(owned).__enter__(owned),
    "__exit__": lambda owned, *error: type(owned).__exit__(owned, None, None, None),
    "__instancecheck__": lambda owned, other: isinstance(other, owned),
    **{f"__{function.__name__}__": function for function in (len, iter, next, str, repr, bool, hash, reversed)},
    **{f"__{name}__": getattr(_operator, name) for name in ("getitem", "setitem", "delitem", "contains")},
}
# What the owner does with two of its objects; with one of them, its plain value is taken
_BETWEEN = {
    f"__{name.rstrip('_')}__": getattr(_operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
}
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_VALUES = {
    **{f"__{function.__name__}__": function for function in (abs, int, float, round)},
    **{f"__{name}__": getattr(_operator, name) for name in ("neg", "index")},
}


class _Reading:
    """The settings that the scanner of JSON asks for, as `json.JSONDecoder` has it; importing `json` takes longer than all else here."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.get


_scan = _json.make_scanner(_Reading)  # type: ignore[arg-type]
_write = _json.make_encoder(None, None, _json.encode_basestring_ascii, None, ":", ",", False, False, True)  # type: ignore[arg-type]


class Remote:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)


def _forwarded(name: str) -> Callable[..., Any]:
    def forwarded(self: Remote, *given: Any, **named: Any) -> Any:
        return self._peer.ask(name, self, *given, **named)  # type: ignore[attr-defined]

    return forwarded


def _between(name: str, operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def between(self: Remote, other: Any) -> Any:
        if type(other) is Remote:
            return self._peer.ask(name, self, other)  # type: ignore[attr-defined]
        try:
            return operation(_value(self), other)
        except TypeError:
            if name in ("__eq__", "__ne__"):
                return name == "__ne__"  # it has no plain value
            raise

    return between


async def _awaiting(reference: Remote) -> Any:
    return reference._peer.ask("await", reference)  # type: ignore[attr-defined]


def _value(reference: Remote) -> Any:
    return reference._peer.ask("value", reference)  # type: ignore[attr-defined]


for _name in _OWNERS:
    setattr(Remote, _name, _forwarded(_name))
for _name, _operation in _BETWEEN.items():
    setattr(Remote, _name, _between(_name, _operation))
for _name in _REFLECTED:
    setattr(Remote, f"__r{_name}__", lambda self, other, _operation=_BETWEEN[f"__{_name}__"]: _operation(other, _value(self)))
for _name, _operation in _OF_VALUES.items():
    setattr(Remote, _name, lambda self, *given, _operation=_operation: _operation(_value(self), *given))


def _plain(owned: Any) -> Any:
    """Returns the plain value of an object: of a plain type's subclass, or of a number or an array as numpy has them. Raises TypeError."""
    for kind in _KINDS:
        if isinstance(owned, kind):
            return kind(owned)
    if hasattr(owned, "tolist"):
        return float(owned) if hasattr(owned, "as_integer_ratio") else owned.tolist()
    if isinstance(owned, type({}.keys()) | type({}.items())):
        return set(owned)
    raise TypeError(f"a {type(owned).__name__} has no plain value")


class Peer:
    """One end of the two processes: asks the other for what it owns, and answers what it is asked meanwhile. ``read``, ``write``:
    descriptors. ``tests``: this is the tests' end, which lets no one look into what is not the tests' own."""

    def __init__(self, read: int, write: int, tests: bool) -> None:
        self._read, self._write, self._tests = read, write, tests
        self._owned: list[Any] = []
        self._errors: dict[str, type[BaseException]] = {}

    def ask(self, *asked: Any, **named: Any) -> Any:
        """Returns what the other end answers. Raises what it raised, and SystemExit where it has ended."""
        self._send(("asked", asked, named))
        while (message := self._receive())[0] == "asked":
            self._answer(message)
        _, value, error, given, printed = message
        if printed:
            print(printed, end="")
        _changed((*asked[1:], *named.values()), given)
        if error is not None:
            raise self._error(*error)
        return value

    def serve(self) -> None:
        """Answers until the other end is gone."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: Any) -> None:
        _, (name, *given), named = message
        outside, printed = sys.stdout, _io.StringIO()
        value = error = None
        sys.stdout = outside if self._tests else printed
        try:
            value = self._done(name, given, named)
        except BaseException as raised:
            error = _sent_error(raised)
        finally:
            sys.stdout = outside
        mutable = [each if type(each) in (list, dict, set, bytearray) else None for each in (*given, *named.values())]
        try:
            self._send(("answered", value, error, mutable, printed.getvalue()))
        except Exception as raised:  # of an error then its class and text
            error = (error[0], (), {"__text__": error[2].get("__text__", "")}) if error else _sent_error(raised)
            self._send(("answered", None, error, [], printed.getvalue()))

    def _done(self, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        owned = given[0]
        if self._tests and name.endswith("attr__") and (given[1].startswith("_") or type(owned).__module__ not in _OPEN):
            raise AttributeError(f"{given[1]} is the tests' own")
        if name == "value":
            return _plain(owned)
        if name == "await":
            return _imported("asyncio").run(owned)
        if name in _BETWEEN:
            return _BETWEEN[name](*given)
        return _OWNERS[name](*given, **named)

    def _send(self, message: tuple[Any, ...]) -> None:
        data = "".join(_write(self._encoded(message), 0)).encode()
        rest = memoryview(len(data).to_bytes(8, "big") + data)
        while rest:
            rest = rest[os.write(self._write, rest) :]

    def _receive(self) -> Any:
        """Returns the other end's message. Raises ValueError, or what its parts raise, for any other bytes: they change nothing here."""
        data = self._bytes(int.from_bytes(self._bytes(8), "big")).decode()
        try:
            message, end = _scan(data, 0)
        except StopIteration:
            raise ValueError("the code that is tested has sent what is no message") from None
        if end != len(data):
            raise ValueError("the code that is tested has sent more than a message")
        return self._decoded(message)

    def _bytes(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            if not (part := os.read(self._read, min(size - len(data), _CHUNK))):
                sys.exit("the code that is tested has ended its process")
            data += part
        return data

    def _encoded(self, sent: Any) -> Any:
        """Returns what stands for an object in a message: itself where it is a scalar of JSON, else a pair of a word and what belongs to
        it."""
        kind = type(sent)
        if kind is int and not -_LONG < sent < _LONG:
            return "int", hex(sent)
        if kind in _SCALARS:
            return sent
        if kind.__name__ in _TEXTS and kind in (complex, bytes, type(...)):
            return kind.__name__, _TEXTS[kind.__name__][0](sent)
        if kind in _CONTAINERS:
            return kind.__name__, [self._encoded(member) for member in (sent.items() if kind is dict else sent)]
        if kind is Remote:
            return "returned", sent._number
        if (found := _WRITTEN.get((kind.__module__, kind.__name__))) is not None:
            return "written", (kind.__module__, kind.__name__, self._encoded(found[0](sent)))
        if (named := _named(sent, kind)) is not None:
            return named
        self._owned.append(sent)
        return "coroutine" if kind is types.CoroutineType else "owned", len(self._owned) - 1

    def _decoded(self, received: Any) -> Any:
        """Returns the object that stands in a message. Nothing is made but what these lines name, whatever the other end sent."""
        if type(received) is not list:
            return received
        word, held = received
        if word in _TEXTS:
            return _TEXTS[word][1](held)
        if word in _MADE:
            return _MADE[word](map(self._decoded, held))
        if word == "owned":
            return Remote(self, held)
        if word == "coroutine":
            return _awaiting(Remote(self, held))
        if word == "returned":
            return self._owned[held]
        if word == "module":
            return _imported(held)
        if word == "error":
            return self.error_class(held)
        if word == "type":
            return next(kind for kind in _TYPES if kind.__name__ == held)
        module, name, text = held
        return _WRITTEN[module, name][1](getattr(_imported(module), name), self._decoded(text))

    def error_class(self, names: tuple[tuple[str, str], ...]) -> type[BaseException]:
        """Returns the class of this process for one of the other's: that of builtins or of `_RAISED`, or one of its name below the nearest
        of these, whose text is the other's."""
        (module, name), *above = names
        for place in (builtins, _imported(module) if module in _RAISED else None):
            known = getattr(place, name, None)
            if isinstance(known, type) and issubclass(known, BaseException):
                return known
        base = self.error_class(tuple(above))
        made = {"__module__": "solution", "__str__": lambda own: vars(own)["__text__"] if "__text__" in vars(own) else base.__str__(own)}
        return self._errors.setdefault(name, type(name, (base,), made))

    def _error(self, names: tuple[tuple[str, str], ...], given: tuple[Any, ...], held: dict[str, Any]) -> BaseException:
        kind = self.error_class(names)
        try:
            error = kind(*given)
        except Exception:
            try:
                error = kind.__new__(kind, *given)
            except Exception:  # its module alone can make one
                return self._error(names[1:], given, held)
        error.__dict__.update(held)
        return error


def _named(sent: Any, kind: type[Any]) -> tuple[str, Any] | None:
    """Returns what stands for an object that both ends have under its name."""
    if kind is types.ModuleType and not (getattr(sent, "__file__", None) or "").startswith(os.getcwd()):
        return "module", sent.__name__
    if not isinstance(sent, type):
        return None
    if issubclass(sent, BaseException):
        return "error", _names(sent)
    return ("type", sent.__name__) if sent in _TYPES else None


def _names(kind: type[BaseException]) -> tuple[tuple[str, str], ...]:
    return tuple((each.__module__, each.__name__) for each in kind.__mro__[: kind.__mro__.index(BaseException) + 1])


def _sent_error(raised: BaseException) -> tuple[tuple[tuple[str, str], ...], tuple[Any, ...], dict[str, Any]]:
    """Returns an exception as it is sent: its classes, its arguments, and its attributes with its text and the line that raised it."""
    held, notes, trace = {**vars(raised)}, vars(raised).get("__notes__", ()), raised.__traceback__
    if not hasattr(builtins, type(raised).__name__):
        held["__text__"] = str(raised)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "main.py":
            held["__notes__"] = [*notes, f'File "main.py", line {trace.tb_lineno}, in {trace.tb_frame.f_code.co_name}']
        trace = trace.tb_next
    return _names(type(raised)), raised.args, held


def _changed(passed: tuple[Any, ...], given: list[Any]) -> None:
    """Makes lists and the like that were passed as the call has left them."""
    for mine, theirs in zip(passed, given, strict=False):
        if theirs is None or type(mine) is not type(theirs) or mine == theirs:
            continue
        mine.clear()
        (mine.extend if isinstance(mine, list | bytearray) else mine.update)(theirs)


def _imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _load(code: str) -> dict[str, Any]:
    """Executes the code as the module ``solution``. Returns its global names."""
    solution = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "main.py", "exec", dont_inherit=True), solution.__dict__)
    return {name: value for name, value in solution.__dict__.items() if not name.startswith("__")}


def run(code: str, entry: str) -> None:
    """Runs the tests on standard input on the code, and reports `PASSED` where they come to their end. ``entry``: the name of the function
    that is tested. Other names of builtins keep their meaning in the tests, whatever the code defines."""
    libc, work = ctypes.CDLL(None), os.getcwd()
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    (asked_read, asked_write), (answered_read, answered_write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        for descriptor in (_REPORT, asked_write, answered_read):
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        peer = Peer(asked_read, answered_write, tests=False)
        _OWNERS["load"] = _load
        sys.path.insert(0, work)
        try:
            peer.serve()
        finally:
            os._exit(1)
    for descriptor in (asked_read, answered_write):
        os.close(descriptor)
    sys.path[:] = [path for path in sys.path if not (path or work).startswith((work, "/tmp"))]
    tests, peer = types.ModuleType("tests"), Peer(answered_read, asked_write, tests=True)
    sys.modules["tests"] = tests
    found = peer.ask("load", code)
    tests.__dict__.update({name: value for name, value in found.items() if name == entry or not hasattr(builtins, name)})
    exec(compile(sys.stdin.read(), "tests.py", "exec", dont_inherit=True), tests.__dict__)
    os.write(_REPORT, PASSED)
