"""A full-text index of a file of documents, in memory: SQLite's FTS5, ranked by BM25."""

import functools
import json
import re
import sqlite3
from pathlib import Path


class LocalIndex:
    """Searches documents. Several threads may use it."""

    def __init__(self, documents: list[str]) -> None:
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._base.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
        self._base.executemany("INSERT INTO documents VALUES (?)", [(document,) for document in documents])

    def search(self, words: str, most: int) -> list[str]:
        """Returns the documents that have any of the words, the best first."""
        terms = re.findall(r"\w+", words)  # what a model writes is no query: FTS5 has a language of its own
        if not terms:
            return []
        query = " OR ".join(f'"{term}"' for term in terms)
        found = self._base.execute(
            "SELECT text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?", (query, most)
        )
        return [text for (text,) in found]


@functools.cache
def index_of(path: str) -> LocalIndex:
    """Returns the index of a JSONL file whose lines have a ``text``; it is made once in a process."""
    return LocalIndex([json.loads(line)["text"] for line in Path(path).read_text().splitlines() if line])
