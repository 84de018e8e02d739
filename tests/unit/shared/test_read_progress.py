"""Progress of long reading: a bar on a terminal, lines elsewhere, nothing where it is soon done."""

import io
import sys

import pytest

from shared.data import read_progress
from shared.data.read_progress import ReadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("patience", [0, 3600])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_long_work(monkeypatch: pytest.MonkeyPatch, terminal: bool, patience: float) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(read_progress, "PATIENCE_SECONDS", patience)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with ReadProgress("indexing a.jsonl", 4000) as progress:
        progress.at(1000)
        progress.at(4000)
    shown = screen.getvalue()
    if patience:
        assert not shown
    elif terminal:
        assert "indexing a.jsonl" in shown
    else:
        assert shown == "myxo: indexing a.jsonl: 1,000 of 4,000 (25%)\n", "and the next line in ten seconds only"
