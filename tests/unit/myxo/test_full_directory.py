"""A run's directory on a disk without room: it is held and let go of, and its logs are closed, without an error."""

import contextlib
from pathlib import Path

from myxo.run.run_directory import RunDirectory
from tests.support.small_disk import small_disk


def test_nothing_that_has_no_room_is_an_error_at_the_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "1m") as disk:
        directory = RunDirectory(disk.path)
        directory.logs.mkdir()
        disk.fill()
        with directory.held(), directory.open_log("launcher") as log:
            with contextlib.suppress(OSError):
                log.write("a line for which there is no room\n" * 4096)
            assert directory.is_held()
        assert not directory.is_held()
