"""A checkpoint whose files are not as they were written is told, and payloads stay for the oldest one kept."""

from collections.abc import Callable
from pathlib import Path

from services.trainer.parallel.checkpoint import DIGESTS, damage, set_aside, write_digests
from services.trainer.role_worker import kept_from
from tests.support.tables import table


def _checkpoint(path: Path) -> Path:
    path.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", "checkpoint.json"):
        (path / name).write_bytes(name.encode() * 5000)
    write_digests(path)
    return path


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_files_as_they_were_written_are_sound(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "step_00000002")
    assert [damage(path, rank, 2) for rank in range(2)] == [None, None]
    (path / DIGESTS).unlink()
    assert damage(path) is None  # of an earlier version


@table("spoil", [_truncate, _flip, Path.unlink])
@table("name", ["__0_0.distcp", "__1_0.distcp", "checkpoint.json"])
def test_some_rank_tells_each_damage(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    path = _checkpoint(tmp_path / "step_00000002")
    spoil(path / name)
    for world in (1, 2, 3):
        assert any(name in (damage(path, rank, world) or "") for rank in range(world))


def test_a_damaged_list_of_digests_is_damage(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "step_00000002")
    kept = (path / DIGESTS).read_text()[:40]
    (path / DIGESTS).write_text(kept)
    assert DIGESTS in (damage(path) or "")


def test_what_is_set_aside_has_another_name_and_may_be_gone(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "step_00000002")
    set_aside(path)
    set_aside(path)  # another rank on the same disk
    assert not path.exists() and len(list(tmp_path.glob(".step_00000002.*.damaged"))) == 1


def test_payloads_stay_for_the_oldest_checkpoint_kept() -> None:
    assert kept_from([], 2, 10) == 0
    assert kept_from([0, 4], 2, 10) == 0
    assert kept_from([0, 4, 8], 2, 10) == 4
    assert kept_from([4, 8], 2, 10, room_needed=True) == 8
    assert kept_from([8, 10], 2, 10) == 10
