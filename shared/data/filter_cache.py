"""The prompts of files that a run uses, as a bitmap of rows, cached in the run's directory and in the user's cache.

The cache is only a shortcut, so that a run that is started again need not read ten million prompts anew: where a file of it is missing, is
of other input, or cannot be written, the prompts are filtered again, to the same end.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.config.run_config import RunConfig
from shared.data.data_files import DataFile
from shared.runtime import user_cache
from shared.runtime.atomic_files import replace_file
from shared.runtime.errors import ConfigError

_FORMAT = 2
_MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_BLOCK = 512
"""Bytes between two counts of a bitmap: the k-th row is found by a search over counts and a look at one block."""


class RowBitmap:
    """Rows of ``size`` that are used. ``bits``: uint8 [ceil(size / 8)], row r in bit 7 - r % 8 of byte r // 8."""

    def __init__(self, bits: NDArray[np.uint8], size: int) -> None:
        self.bits, self.size = bits, size
        blocks = [int(np.count_nonzero(self._block(index))) for index in range(-(-len(bits) // _BLOCK))]
        self._before: NDArray[np.int64] = np.cumsum([0, *blocks], dtype=np.int64)

    @classmethod
    def of(cls, used: NDArray[np.bool_]) -> "RowBitmap":
        """Packs one flag for each row."""
        return cls(np.packbits(used), len(used))

    def _block(self, index: int) -> NDArray[np.uint8]:
        return np.unpackbits(self.bits[index * _BLOCK : (index + 1) * _BLOCK])

    def __len__(self) -> int:
        return int(self._before[-1])

    def row(self, index: int) -> int:
        """Returns the row that is used as number ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = int(np.searchsorted(self._before, index, side="right")) - 1
        return block * _BLOCK * 8 + int(np.flatnonzero(self._block(block))[index - int(self._before[block])])

    def below(self, row: int) -> int:
        """Returns how many rows before ``row`` are used."""
        block, rest = divmod(min(row, self.size), _BLOCK * 8)
        return int(self._before[block]) + int(self._block(block)[:rest].sum())


@dataclass(frozen=True)
class FilteredRows:
    """The result of filtering a run's prompts.

    rows: those that are used. left_out: how many are not, by reason. first: what is wrong with the first of them. longest: tokens of the
    longest prompt that is used.
    """

    rows: RowBitmap
    left_out: dict[str, int]
    first: ConfigError | None
    longest: int


class FilterCache:
    """Keeps the result for some files, under what it depends on.

    Args:
        name: of the set, for example ``training``. files: its files.
    """

    def __init__(self, config: RunConfig, name: str, files: list[DataFile]) -> None:
        self._root = config.run.root
        limits = (config.rollout.rollout_max_prompt_len, config.reward.rm_type, config.reward.environment_names())
        self._key = fingerprint(config.model.hf_checkpoint, files, [_FORMAT, name, limits, config.data.model_dump(mode="json")])
        self._path, self._cached = self._root / "prompts" / f"{name}.kept", f"{self._key}.kept"

    def read(self) -> FilteredRows | None:
        """Returns the result if it is cached for exactly this input, else None."""
        with contextlib.suppress(OSError):
            if (filtered := self._parsed(self._path.read_bytes())) is not None:
                return filtered
        cached = user_cache.read(self._cached)
        filtered = None if cached is None else self._parsed(cached)
        if cached is not None and filtered is not None:
            self._write(cached)
        return filtered

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

    def write(self, filtered: FilteredRows) -> None:
        """Keeps the result for any run in the user's cache and, once this run has a directory, there."""
        first = None if filtered.first is None else (filtered.first.field, str(filtered.first.value), filtered.first.expected)
        head = {"key": self._key, "size": filtered.rows.size, "left_out": filtered.left_out, "first": first, "longest": filtered.longest}
        content = json.dumps(head).encode() + b"\n" + filtered.rows.bits.tobytes()
        user_cache.write(self._cached, content)
        self._write(content)

    def _write(self, content: bytes) -> None:
        if self._root.is_dir():  # a run gets its directory when it starts, not before
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                replace_file(self._path, content)


def fingerprint(model: Path, files: Sequence[DataFile], settings: object) -> str:
    """Returns a digest of files by path, size and time, of the model's tokenizer and template by content, and of the settings.

    Args:
        settings: a JSON value.

    Raises OSError for a file that is not there.
    """
    stated = [(str(file), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    tokenizer = [hashlib.sha256(path.read_bytes()).hexdigest() for name in _MODEL_FILES if (path := model / name).is_file()]
    return hashlib.sha256(json.dumps([stated, tokenizer, settings], sort_keys=True).encode()).hexdigest()
