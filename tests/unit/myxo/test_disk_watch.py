"""A full disk: told while it lasts, over once there is room, and given up after a while."""

from pathlib import Path

import pytest

from myxo.launch.run_servers import DiskFull, DiskWatch
from tests.support.small_disk import small_disk


def test_a_full_disk_is_told_and_then_over(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        watch = DiskWatch(disk.path, 100.0)
        assert not watch.look(0.0) and not watch.text
        disk.fill()
        assert not watch.look(1.0) and "No space left on device" in watch.text
        assert not watch.look(31.0) and "for 30 s now, given up after 100 s" in watch.text
        disk.clear()
        assert watch.look(32.0) and not watch.text
        assert not watch.look(33.0), "once"
        disk.fill()
        watch.look(200.0)
        watch.look(299.0)
        with pytest.raises(DiskFull, match="for 101 s; the run stops, `myxo up` with the same config continues once there is room"):
            watch.look(301.0)
