"""Parquet files read by row number.

A row group is compressed as a whole, so that rows in shuffled order would each cost the decoding of a group. The file is therefore
unpacked once, batch by batch, into an unnamed Arrow file in the temporary directory (``TMPDIR``), which is mapped: memory stays flat.
"""

from __future__ import annotations

import bisect
import tempfile
from pathlib import Path
from typing import Any

from shared.data.read_progress import ReadProgress
from shared.data.rows import Rows
from shared.runtime.errors import ConfigError

BATCH_ROWS = 1024


class ParquetRows(Rows):
    """A Parquet file with random access by row.

    Args:
        path: the file. field: the config field that named it, for errors.

    Raises ConfigError for a file that is none, and where pyarrow is not installed.
    """

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field = path, field
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise ConfigError(field, str(path), "Parquet files need pyarrow: pip install 'myxo[parquet]'") from None
        self._starts = [0]
        try:
            with pyarrow.parquet.ParquetFile(path) as source, tempfile.NamedTemporaryFile(prefix="myxo-prompts-") as unpacked:
                self._unpack(pyarrow, source, unpacked.name)
                self._batches = pyarrow.ipc.open_file(pyarrow.memory_map(unpacked.name))
        except (OSError, pyarrow.ArrowException, ValueError) as error:
            raise ConfigError(field, str(path), f"not a readable Parquet file: {' '.join(str(error).split())}") from None
        if not len(self):
            raise ConfigError(field, str(path), "holds no row; give at least one")
        self._batch: tuple[int, Any] = (-1, None)

    def _unpack(self, pyarrow: Any, source: Any, name: str) -> None:
        plain = [
            field.with_type(field.type.value_type) if pyarrow.types.is_dictionary(field.type) else field for field in source.schema_arrow
        ]
        schema = pyarrow.schema(plain)  # an Arrow file takes one dictionary a column; the groups of a Parquet file have each their own
        with (
            pyarrow.OSFile(name, "wb") as sink,
            pyarrow.ipc.new_file(sink, schema) as writer,
            ReadProgress(f"unpacking {self.path.name}", source.metadata.num_rows) as reading,
        ):
            for batch in source.iter_batches(batch_size=BATCH_ROWS):
                writer.write_batch(batch if batch.schema.equals(schema) else batch.cast(schema))
                self._starts.append(self._starts[-1] + batch.num_rows)
                reading.at(self._starts[-1])

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, row: int) -> str:
        return f"{self.path}:{row + 1}"

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        number = bisect.bisect_right(self._starts, row) - 1
        if self._batch[0] != number:
            self._batch = (number, self._batches.get_batch(number))
        try:
            entry: dict[str, Any] = self._batch[1].slice(row - self._starts[number], 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise ConfigError(self.field, self.where(row), f"not readable: {error}") from None
        return entry
