"""`deploy/slurm/run.sbatch` by those who can read it without a cluster; tests/integration/cluster runs it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "run.sbatch"


@pytest.mark.parametrize("reader", [("bash", "-n"), ("shellcheck",)], ids=lambda words: words[0])
def test_it_is_a_sound_script(reader: tuple[str, ...]) -> None:
    if shutil.which(reader[0]) is None:
        pytest.skip(f"no {reader[0]} here")
    read = subprocess.run([*reader, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stdout + read.stderr


def test_sbatch_reads_its_options_before_the_first_command() -> None:
    lines = SCRIPT.read_text().splitlines()
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and max(options) < first
