"""What sifting a run's prompts came to, kept in the run's directory: a buffer that starts again need not read ten million prompts anew.

Only ever a shortcut: where the file is missing, is of other input, or cannot be written, prompts are sifted again, to the same end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.config import RunConfig
from shared.data_files import DataFile
from shared.errors import ConfigError
from shared.kept import Kept

_FORMAT = 1
_MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Sifted:
    """``kept``: the rows that are used. ``left_out``: how many are not, by reason. ``first``: what is wrong with the first of them."""

    kept: Kept
    left_out: dict[str, int]
    first: ConfigError | None


class Remembered:
    """Where the result for some files is kept, and what it depends on.

    Args:
        name: of the set, for example ``training``. files: its files.
    """

    def __init__(self, config: RunConfig, name: str, files: list[DataFile]) -> None:
        self._root = config.run.root
        self._path = self._root / "prompts" / f"{name}.kept"
        stated = [(str(file), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
        model = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self._model_files(config.model.hf_checkpoint)]
        limits = (config.rollout.rollout_max_prompt_len, config.reward.rm_type, config.reward.environment_names())
        on = [_FORMAT, stated, model, limits, config.data.model_dump(mode="json")]
        self._key = hashlib.sha256(json.dumps(on, sort_keys=True).encode()).hexdigest()

    @staticmethod
    def _model_files(model: Path) -> list[Path]:
        return [path for name in _MODEL_FILES if (path := model / name).is_file()]

    def read(self) -> Sifted | None:
        """The result, if it is there and of this very input."""
        try:
            head, _, bits = self._path.read_bytes().partition(b"\n")
            known = json.loads(head)
            if known["key"] != self._key or len(bits) != (known["size"] + 7) // 8:
                return None
            first = None if known["first"] is None else ConfigError(*known["first"])
            return Sifted(Kept(np.frombuffer(bits, np.uint8), known["size"]), known["left_out"], first)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, sifted: Sifted) -> None:
        """Keeps the result, where the run has a directory that can be written."""
        if not self._root.is_dir():
            return  # nothing of a run is made before it starts
        first = None if sifted.first is None else (sifted.first.field, str(sifted.first.value), sifted.first.expected)
        head = {"key": self._key, "size": sifted.kept.size, "left_out": sifted.left_out, "first": first}
        partial = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            partial.write_bytes(json.dumps(head).encode() + b"\n" + sifted.kept.bits.tobytes())
            partial.replace(self._path)
