"""A benchmark's table in a page of the documentation, between marks that name the command which writes it."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def put_table(page: Path, benchmark: str, table: str, name: str = "") -> None:
    """Puts a table into the page, in the place of what stands between the marks of ``benchmarks.<benchmark>``; ``name``: one of several."""
    name = name or benchmark
    start, end = f"<!-- {name}: python -m benchmarks.{benchmark} --write -->\n", f"<!-- /{name} -->"
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(end)
    page.write_text(before + start + table + "\n" + end + after)
