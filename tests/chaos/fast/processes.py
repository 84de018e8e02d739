"""The processes of a forked run by their names, as they have written them down (`forking.install`)."""

from pathlib import Path

from tests.chaos.variant import Processes, alive


class ForkedProcesses(Processes):
    """``register``: the directory of names."""

    def __init__(self, register: Path, launcher: int) -> None:
        super().__init__(launcher)
        self._register = register

    def named(self, target: str) -> list[int]:
        found = [(path.stat().st_mtime_ns, int(path.name)) for path in self._register.iterdir() if _text(path) == target]
        return [pid for _, pid in sorted(found)]

    def left(self) -> dict[int, str]:
        return {int(path.name): _text(path) for path in self._register.iterdir() if alive(int(path.name))}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
