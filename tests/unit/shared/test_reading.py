"""The bar for long reading: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from shared import reading
from shared.reading import Reading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("screen", "patience", "shown"), [(Terminal(), 0, True), (io.StringIO(), 0, False), (Terminal(), 3600, False)])
def test_the_bar_is_for_terminals_and_for_long_work(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, patience: float, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", patience)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Reading("indexing a.jsonl", 10) as progress:
        progress.at(3)
        progress.at(10)
    assert ("indexing a.jsonl" in screen.getvalue()) == shown
    assert shown or not screen.getvalue()
