"""``myxo link`` refuses by name what it cannot use."""

from pathlib import Path

import pytest

from myxo.main import main
from tests.support.tables import table

SERVE = ["--serve", "127.0.0.1:0", "--certificate", "absent.pem", "--key", "absent.pem"]


@table(
    ("words", "error"),
    [
        (["--hub", "http://hub"], "--hub = 'http://hub': expected https://HOST"),
        (["--hub", "https://user:x@hub"], "without credentials"),
        (["--hub", "https://hub/path"], "without credentials or a path"),
        (["--hub", "hub"], "expected https://HOST"),
        (["--hub", "https://hub", "--objects", "store:1"], "--objects = 'store:1': expected with --serve alone"),
        (["--hub", "https://hub", "--nats", "nats"], "--nats = 'nats': expected HOST:PORT"),
        (["--serve", "127.0.0.1:443"], "--certificate"),
        (["--serve", "127.0.0.1:443", *SERVE[2:]], "expected a PEM certificate with its --key"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MYXO_CA_FILE", raising=False)
    assert main(["link", *words]) == 2
    assert error in capsys.readouterr().err
