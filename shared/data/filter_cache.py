"""The prompts of files that a run uses, by row, cached in the run's directory and in the user's cache.

The cache is only a shortcut for a run that is started again: where a file of it is missing, is of other input, or cannot be written, the
prompts are filtered again, to the same end.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.config.run_config import RunConfig
from shared.data.data_files import DataFile
from shared.model.hf_checkpoint import SIDE_FILES, TEMPLATE_FOLDER
from shared.runtime import user_cache
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import replace_file

_FORMAT = 6


class FilteredRows(NamedTuple):
    """The result of filtering prompts.

    rows: those that are used, ascending. left_out: how many are not, by reason. first: what is wrong with the first of them.
    longest: tokens of the longest prompt that is used.
    """

    rows: range | NDArray[np.uint32]
    left_out: dict[str, int]
    first: ConfigError | None
    longest: int


class FilterCache:
    """Keeps the result for the files of a config's ``field``, of ``size`` rows together, under what it depends on: for any run in the
    user's cache and, once this run has a directory, there."""

    def __init__(self, config: RunConfig, field: str, files: list[DataFile], size: int, metadata: Mapping[str, Any] | None = None) -> None:
        self._root, self._size = config.run.root, size
        rollout, reward = config.rollout, config.reward
        limits = (rollout.rollout_max_prompt_len, config.may_give_rewards, reward.rm_type, reward.environment_names())
        self._key = fingerprint(
            config.model.hf_checkpoint, files, [_FORMAT, field, limits, dict(metadata or {}), config.data.model_dump(mode="json")]
        )
        self._path, self._cached = self._root / "prompts" / f"{field}.kept", f"{self._key}.kept"

    def get(self, make: Callable[[], FilteredRows]) -> FilteredRows:
        """Returns the result that is kept for exactly this input; where there is none, makes it and keeps it."""
        with contextlib.suppress(OSError):
            if (filtered := self._parsed(self._path.read_bytes())) is not None:
                return filtered
        content = user_cache.read(self._cached) or b""
        if (filtered := self._parsed(content)) is None:
            filtered = make()
            content = self._content(filtered)
            user_cache.write(self._cached, content)
        if self._root.is_dir():  # a run gets its directory when it starts, not before
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(exist_ok=True)
                replace_file(self._path, content)
        return filtered

    def _content(self, filtered: FilteredRows) -> bytes:
        """Returns a line of JSON and the used rows as a bitmap, the first row in the highest bit of the first byte."""
        first = filtered.first and (filtered.first.field, str(filtered.first.value), filtered.first.expected)
        head = {"key": self._key, "left_out": filtered.left_out, "first": first, "longest": filtered.longest}
        used = np.zeros(self._size, np.bool_)
        used[filtered.rows] = True
        return json.dumps(head).encode() + b"\n" + np.packbits(used).tobytes()

    def _parsed(self, content: bytes) -> FilteredRows | None:
        try:
            head, _, bits = content.partition(b"\n")
            known = json.loads(head)
            if known["key"] != self._key or len(bits) != (self._size + 7) // 8:
                return None
            rows = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=self._size)).astype(np.uint32)
            return FilteredRows(rows, known["left_out"], known["first"] and ConfigError(*known["first"]), known["longest"])
        except (ValueError, KeyError, TypeError):
            return None


def fingerprint(model: Path, files: Sequence[DataFile], settings: object) -> str:
    """Returns a digest of files by path, size and time, of the model's tokenizer and templates by content, and of settings, a JSON value.

    Raises OSError for a file that is not there.
    """
    stated = [(str(file), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    side = [model / name for name in SIDE_FILES] + sorted((model / TEMPLATE_FOLDER).glob("*.jinja"))
    tokenizer = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in side if path.is_file()]
    return hashlib.sha256(json.dumps([stated, tokenizer, settings], sort_keys=True).encode()).hexdigest()
