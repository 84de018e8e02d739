"""``myxo completion``: what a shell completes by the script."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.myxo.command import Myxo


@pytest.fixture
def script(tmp_path: Path, myxo: Myxo) -> Path:
    code, out, _ = myxo.run("completion", "bash")
    assert code == 0
    path = tmp_path / "myxo.bash"
    path.write_text(out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["sta"], "status"), (["up", "--max-stal"], "--max-staleness"), (["audit", "--js"], "--json"), (["completion", "fi"], "fish")],
)
def test_bash_completes(script: Path, words: Sequence[str], expected: str) -> None:
    typed = f"COMP_WORDS=(myxo {' '.join(words)}); COMP_CWORD={len(words)}"
    asked = f'source {script}; {typed}; "$(complete -p myxo | sed "s/.* -F //; s/ .*//")" myxo; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([shutil.which("bash") or "bash", "-c", asked], capture_output=True, text=True, timeout=60)
    assert expected in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_get_a_script(myxo: Myxo, shell: str) -> None:
    code, out, _ = myxo.run("completion", shell)
    assert code == 0
    assert "myxo" in out
    assert "status" in out


def test_a_shell_that_is_not_known(myxo: Myxo) -> None:
    code, out, err = myxo.run("completion", "cmd")
    assert (code, out) == (2, "")
    assert "cmd" in err
