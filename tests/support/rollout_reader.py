"""Reads the files of kept responses whole, for tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from shared.data.rollout_files import RolloutRecord, files, kept_lines


class RolloutReader:
    """Reads the files in ``rollouts/`` of a run, which need not exist. ``torn``: lines that were cut off or are no record, so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.torn = 0

    def heads(self) -> Iterator[RolloutRecord]:
        """Yields all records, oldest first, repeats included; of each only what comes before `_AFTER_HEAD` is read."""
        for _, head in self._lines():
            yield head

    def records(self, wanted: Callable[[RolloutRecord], bool] = lambda head: True) -> Iterator[RolloutRecord]:
        """Yields the wanted records, oldest first, each group's attempt once."""
        seen: set[tuple[str, int]] = set()
        for line, head in self._lines():
            if not wanted(head) or (head.group, head.attempt) in seen:
                continue
            try:
                record = RolloutRecord.model_validate_json(line)
            except ValidationError:
                self.torn += 1
                continue
            seen.add((head.group, head.attempt))
            yield record

    def _lines(self) -> Iterator[tuple[bytes, RolloutRecord]]:
        for path in files(self._directory):
            for _, line, head in kept_lines(path):
                if head is None:
                    self.torn += 1
                else:
                    yield line, head
