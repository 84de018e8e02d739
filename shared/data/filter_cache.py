"""What sifting a run's prompts came to, kept in the run's directory and in the user's cache: who starts a run again, or for the first time
after ``--dry-run``, need not read ten million prompts anew.

Only ever a shortcut: where the file is missing, is of other input, or cannot be written, prompts are sifted again, to the same end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.config.run_config import RunConfig
from shared.data.data_files import DataFile
from shared.data.row_bitmap import RowBitmap
from shared.runtime import user_cache
from shared.runtime.atomic_files import replace_file
from shared.runtime.errors import ConfigError

_FORMAT = 2
_MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class FilteredRows:
    """``kept``: the rows that are used. ``left_out``: how many are not, by reason. ``first``: what is wrong with the first of them.
    ``longest``: tokens of the longest prompt that is used."""

    kept: RowBitmap
    left_out: dict[str, int]
    first: ConfigError | None
    longest: int


class FilterCache:
    """Where the result for some files is kept, and what it depends on.

    Args:
        name: of the set, for example ``training``. files: its files.
    """

    def __init__(self, config: RunConfig, name: str, files: list[DataFile]) -> None:
        self._root = config.run.root
        limits = (config.rollout.rollout_max_prompt_len, config.reward.rm_type, config.reward.environment_names())
        self._key = fingerprint(config.model.hf_checkpoint, files, [_FORMAT, name, limits, config.data.model_dump(mode="json")])
        self._path, self._cached = self._root / "prompts" / f"{name}.kept", f"{self._key}.kept"

    def read(self) -> FilteredRows | None:
        """The result, if it is there and of this very input."""
        if (own := _content(self._path)) is not None and (sifted := self._parsed(own)) is not None:
            return sifted
        if (cached := user_cache.read(self._cached)) is not None and (sifted := self._parsed(cached)) is not None:
            self._write(cached)
            return sifted
        return None

    def _parsed(self, content: bytes) -> FilteredRows | None:
        try:
            head, _, bits = content.partition(b"\n")
            known = json.loads(head)
            if known["key"] != self._key or len(bits) != (known["size"] + 7) // 8:
                return None
            first = None if known["first"] is None else ConfigError(*known["first"])
            return FilteredRows(RowBitmap(np.frombuffer(bits, np.uint8), known["size"]), known["left_out"], first, known["longest"])
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, sifted: FilteredRows) -> None:
        """Keeps the result: for any run in the user's cache, and where this one has a directory that can be written, there."""
        first = None if sifted.first is None else (sifted.first.field, str(sifted.first.value), sifted.first.expected)
        head = {"key": self._key, "size": sifted.kept.size, "left_out": sifted.left_out, "first": first, "longest": sifted.longest}
        content = json.dumps(head).encode() + b"\n" + sifted.kept.bits.tobytes()
        user_cache.write(self._cached, content)
        self._write(content)

    def _write(self, content: bytes) -> None:
        if self._root.is_dir():  # nothing of a run is made before it starts
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                replace_file(self._path, content)


def fingerprint(model: Path, files: Sequence[DataFile], settings: object) -> str:
    """Returns what tells one input from another: files by path, size and time, the model's tokenizer and template by their content.

    Args:
        settings: a JSON value. Raises OSError for a file that is not there.
    """
    stated = [(str(file), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    tokenizer = [hashlib.sha256(path.read_bytes()).hexdigest() for name in _MODEL_FILES if (path := model / name).is_file()]
    return hashlib.sha256(json.dumps([stated, tokenizer, settings], sort_keys=True).encode()).hexdigest()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
