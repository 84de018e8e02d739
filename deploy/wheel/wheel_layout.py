"""Lays out the tree that a wheel is built from: all of it below the one top-level package ``myxo``.

In the repository ``shared`` and ``services`` are packages beside ``myxo``. Installed under such names they would meet other people's: pip
writes two projects' ``shared`` into one directory, and a user's own ``services`` beside a reward function would hide ours. So the wheel has
``myxo.shared`` and ``myxo.services``, and every name of a module in the code is changed on the way:

* ``from shared.bus import runs``, ``import shared``: imports;
* ``"services.reward.worker"``: a string that is the name of a module, or of a module's attribute, that there is;
* ``python -m services.rollout`` in texts, help and errors.

Names of functions as configs have them, ``shared.agents.mcp_agent:play``, stay: `shared.hooks.import_names` finds them in both layouts.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "myxo"
MOVED = ("shared", "services")
"""The packages that go below `PACKAGE`."""

BUNDLED = ("constraints.txt", "examples/arithmetic")
"""Files and folders that `myxo quickstart` needs; they go below `PACKAGE` as they are."""

KEPT = ("pyproject.toml", "README.md", "LICENSE")
"""What setuptools reads."""

_ROOTS = "|".join(MOVED)
_FROM = re.compile(rf"\bfrom\s+(?=(?:{_ROOTS})\b)")
_IMPORT = re.compile(rf"\bimport\s+(?=(?:{_ROOTS})\b)")
_COMMAND = re.compile(rf"(python3? -m )(?=(?:{_ROOTS})\b)")
_NAME = re.compile(rf"(?:{_ROOTS})(?:\.\w+)+")
_NAME_BEGINS = re.compile(rf"\b(?=(?:{_ROOTS})\.)")


class CannotBeMoved(Exception):
    """A name of a module is made in a way that no change of the text can follow."""


@dataclass(frozen=True)
class _Edit:
    """``text`` in the place of the bytes from ``begin`` to ``end`` of a source."""

    begin: int
    end: int
    text: str


def lay_out(project: Path, tree: Path) -> None:
    """Writes the wheel's tree, an empty directory before. Raises CannotBeMoved."""
    for name in KEPT:
        shutil.copy(project / name, tree)
    (tree / "README.md").write_text(without_relative_links((project / "README.md").read_text()))
    described = tree / "pyproject.toml"
    described.write_text(re.sub(rf'"(?=(?:{_ROOTS})\.)', f'"{PACKAGE}.', described.read_text()))
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    shutil.copytree(project / PACKAGE, tree / PACKAGE, ignore=ignored)
    for name in MOVED:
        shutil.copytree(project / name, tree / PACKAGE / name, ignore=ignored)
    for path in (tree / PACKAGE).rglob("*.py"):
        try:
            path.write_text(moved(path.read_text(), project))
        except CannotBeMoved as error:
            raise CannotBeMoved(f"{path.relative_to(tree / PACKAGE)}:{error}") from None
    for name in BUNDLED:
        source, target = project / name, tree / PACKAGE / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)


def without_relative_links(readme: str) -> str:
    """Returns the package's description: a package index shows it where there is no repository around it that links could lead into.

    Pictures of the repository go, links into it leave their words.
    """
    text = re.sub(r"^\[!\[[^\]]*\]\((?!https?:)[^)]*\)\]\([^)]*\)\n+", "", readme, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


def moved(source: str, project: Path) -> str:
    """Returns a module's source as it reads in the wheel; ``project`` has the modules that there are. Raises CannotBeMoved."""
    tree = ast.parse(source)
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    text = source.encode()
    for edit in sorted(_edits(tree, text, lines, project), key=lambda edit: edit.begin, reverse=True):
        text = text[: edit.begin] + edit.text.encode() + text[edit.end :]
    return text.decode()


def _edits(tree: ast.AST, text: bytes, lines: list[int], project: Path) -> Iterator[_Edit]:
    for node in _outermost(tree):
        begin, end = lines[node.lineno - 1] + node.col_offset, lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = text[begin:end].decode()
        try:
            after = _changed(node, before, project)
        except CannotBeMoved as error:
            raise CannotBeMoved(f"{node.lineno}: {error}") from None
        if after != before:
            yield _Edit(begin, end, after)


Node = ast.Import | ast.ImportFrom | ast.Constant | ast.JoinedStr


def _outermost(tree: ast.AST) -> Iterator[Node]:
    """Yields imports and strings; an f-string whole, without what it is made of."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Node):
            yield node
        else:
            yield from _outermost(node)


def _changed(node: Node, before: str, project: Path) -> str:
    """Returns the text in the place of a node's."""
    if isinstance(node, ast.ImportFrom):
        return _FROM.sub(rf"\g<0>{PACKAGE}.", before, count=1) if node.level == 0 else before
    if isinstance(node, ast.Import):
        return _changed_import(node, before)
    if isinstance(node, ast.JoinedStr):
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and _NAME_BEGINS.match(first.value):
            raise CannotBeMoved(f"{before}: give the name of a module as one plain string")
    elif not isinstance(node.value, str):
        return before
    elif _is_there(node.value, project):
        return _NAME_BEGINS.sub(f"{PACKAGE}.", before, count=1)
    return _COMMAND.sub(rf"\g<1>{PACKAGE}.", before)


def _changed_import(node: ast.Import, before: str) -> str:
    ours = [alias for alias in node.names if alias.name.partition(".")[0] in MOVED]
    if not ours:
        return before
    if len(node.names) > 1:
        raise CannotBeMoved(f"{before}: import one module a line")
    if node.names[0].asname is not None:
        return _IMPORT.sub(rf"\g<0>{PACKAGE}.", before)
    root, dot, _ = ours[0].name.partition(".")
    bound = f"from {PACKAGE} import {root}"
    return f"import {PACKAGE}.{ours[0].name}; {bound}" if dot else bound


def _is_there(name: str, project: Path) -> bool:
    """Returns whether a text is the name of one of the project's modules, or of a module's attribute."""
    if not _NAME.fullmatch(name):
        return False
    path = project.joinpath(*name.split("."))
    return any(module.exists() for module in (path, path.with_suffix(".py"), path.parent.with_suffix(".py")))
