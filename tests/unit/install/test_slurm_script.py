"""`deploy/slurm/run.sbatch` by those who can read it without a cluster; tests/integration/cluster runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from myxo.run.run_directory import RunDirectory

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


def ran(words: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Runs words of bash with the script's functions."""
    functions = SCRIPT.read_text().rpartition("export MYXO_PYTHON=")[0]
    given = {**os.environ, "MYXO_PYTHON": sys.executable, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(["bash", "-c", f"{functions}\n{words}"], capture_output=True, text=True, env=given, timeout=120, check=False)


def test_services_of_a_node_share_no_port(tmp_path: Path) -> None:
    words = 'keep() { echo "$MYXO_HTTP"; }; service 0 buffer buffer-0 - services.buffer; service 0 reward reward-0 - services.reward'
    assert ran(words, MYXO_HTTP="0.0.0.0:9464", MYXO_STATE=tmp_path).stdout.split() == ["0.0.0.0:0"] * 2


def test_a_second_job_of_a_run_is_refused_as_long_as_the_first_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7")  # as an earlier command left it
    first = "hold; bash -c 'exec 9>&-; (hold) && exit 1; exit 0'; code=$?; echo began; exit $code"
    done = ran(f"export -f hold say; {first}", MYXO_ROOT=tmp_path, SLURM_JOB_ID=12)
    assert (done.returncode, done.stdout) == (0, "began\n") and f"{tmp_path} is in use by job 12" in done.stderr
    assert ran("hold; echo began", MYXO_ROOT=tmp_path, SLURM_JOB_ID=13).stdout == "began\n"
    assert ran("flock() { return 71; }; hold; echo began", MYXO_ROOT=tmp_path).stdout == "began\n", "a file system without locks"
    with RunDirectory(tmp_path).held():
        assert ran("hold; echo began", MYXO_ROOT=tmp_path).returncode == 2
    looking = "(flock --shared 8; sleep 0.3) 8<$MYXO_ROOT/lock & until ! flock --nonblock $MYXO_ROOT/lock true; do :; done"
    assert ran(f"{looking}; hold; echo began", MYXO_ROOT=tmp_path).stdout == "began\n", "beside a command that looks at the lock"


def test_servers_that_were_given_up_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("redis://127.0.0.1:1")
    (tmp_path / "stop").write_text("nats-server ended 6 times in a row")
    assert ran(f"answers 127.0.0.1:1 {tmp_path}/url", MYXO_STATE=tmp_path).returncode == 3
