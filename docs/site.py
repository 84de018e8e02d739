"""The website's hooks, which `mkdocs.yml` names: pages link to files all over the repository, and on the website those stand there, too.

``mkdocs build --strict`` checks every link. A link that leaves ``docs/`` (an example's README, a test that shows a claim) leads to a page
under ``repository/``: the file itself where it is Markdown, else its text. Formulas become MathML. So the site is whole
without the network.
"""

import html
import itertools
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from latex2mathml import converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIES = "repository"
"""The folder of the site with what lies outside of ``docs/``."""

FIRST = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages that are on the site whoever links to them."""

SOURCE = """---
search: {{exclude: true}}
---
# {path}

~~~~~~~~~~ {{.{language} linenums=1}}
{text}
~~~~~~~~~~
"""
"""A page that shows a file's text."""

LONG = 60
"""The characters of a cell from which on its column is of words, and gets room."""

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_CELL = re.compile(r"<t([hd])((?: [^>]*)?)>(.*?)</t\1>", re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[])]</\1>', re.DOTALL)
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of ``docs/``, and what these pages link to."""
    waiting = [ROOT / name for name in FIRST]
    waiting += [path for file in files.documentation_pages() for path in _outside(DOCS / file.src_uri)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(_on_site(path)) is None:
            files.append(File.generated(config, _on_site(path), content=_page(path)))
            waiting += _outside(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has a page's links lead to where the files are on the site; a link to what is not there stays, and mkdocs reports it."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else DOCS / uri

    def changed(found: re.Match[str]) -> str:
        path = _linked(source, found[2])
        return found[0] if path is None else found[1] + posixpath.relpath(_on_site(path), posixpath.dirname(uri) or ".")

    return _LINK.sub(changed, markdown) if source.is_file() else markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes MathML of formulas, which browsers show by themselves, and says of tables what docs/website.css asks for."""

    def mathml(found: re.Match[str]) -> str:
        formula = converter.convert(html.unescape(found[2]), display="inline" if found[1] == "span" else "block")
        return f'<{found[1]} class="formula">{formula}</{found[1]}>'

    return _TABLE.sub(lambda found: _described(found[0]), _FORMULA.sub(mathml, content))


def _described(table: str) -> str:
    """Returns a table that tells the number of its columns, and each cell its column's name and whether it holds many words."""
    heads = [html.escape(html.unescape(re.sub("<[^>]*>", "", text)).strip()) for kind, _, text in _CELL.findall(table) if kind == "h"]
    columns = itertools.cycle(heads or [""])

    def cell(found: re.Match[str]) -> str:
        if found[1] == "h":
            return found[0]
        label, words = next(columns), len(re.sub("<code>.*?</code>|<[^>]*>", "", found[3])) >= LONG
        label = f' data-label="{label}"' if label else ""
        kind = ' class="words"' if words else ""
        return f"<td{found[2]}{label}{kind}>{found[3]}</td>"

    return _CELL.sub(cell, table).replace("<table>", f'<table data-columns="{len(heads)}">', 1)


def _outside(source: Path) -> Iterator[Path]:
    """Yields the repository's files outside of ``docs/`` that a page links to."""
    for _, link in _LINK.findall(source.read_text()) if source.suffix == ".md" else ():
        path = _linked(source, link)
        if path is not None and not path.is_relative_to(DOCS):
            yield path


def _linked(source: Path, link: str) -> Path | None:
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _on_site(path: Path) -> str:
    """Returns where a file of the repository is, from the site's root."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{COPIES}/{path.relative_to(ROOT).as_posix()}" + ("" if path.suffix == ".md" else ".md")


def _page(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    language = {".mjs": "javascript", ".py": "python"}.get(path.suffix, path.suffix.lstrip(".") or "text")
    return SOURCE.format(path=path.relative_to(ROOT).as_posix(), language=language, text=path.read_text().rstrip())
