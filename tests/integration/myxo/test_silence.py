"""Nothing fails in silence: what goes wrong is told while the run continues and when it ends, and what is hopeless ends it."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.runtime import exit_codes
from tests.integration.myxo.command import COMMAND_SECONDS, Myxo, ended, wait_for

ConfigFile = Callable[..., Path]

pytestmark = pytest.mark.timeout(4 * COMMAND_SECONDS)

TOLD_SECONDS = 15.0

PROMPT_TOO_LONG = "input and 4096 new tokens are more than the 2048 tokens of the model's context"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the run that `config_file` describes."""
    path = tmp_path / "runs" / "test"
    path.mkdir(parents=True)
    return path


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The first line that holds the words and that was printed while the run continued, not in the report at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if "what went wrong" in line:
            break
        if words in line:
            return line
    raise AssertionError(f"{words!r} was never told; {process.communicate()}")


def begun(root: Path) -> Callable[[], bool]:
    return lambda: (root / "checkpoints" / "steps").is_file()


def test_groups_that_all_fail_are_told_and_end_the_run_which_goes_on_when_called_again(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    (root / "refuse").write_text(PROMPT_TOO_LONG)
    config = config_file(rollout={"num_rollout": 2, "max_dead_in_a_row": 8}, eval={"skip_eval_before_train": True})
    code, out, err = myxo.run("up", config, standins=True)
    assert code == exit_codes.RUN_FAILED, f"{out}\n{err}"
    assert "myxo: run test failed: " in err and "groups in a row failed (rollout.max_dead_in_a_row = 8)" in err
    assert PROMPT_TOO_LONG in err
    assert "stopped: 8 groups in a row failed" in out
    report = out[out.index("what went wrong") :]
    assert "dead" in report and PROMPT_TOO_LONG[:50] in " ".join(report.split())
    assert not (root / "servers.json").exists()

    code, out, _ = myxo.run("status", root)
    assert code == 0 and PROMPT_TOO_LONG in out
    code, out, _ = myxo.run("status", root, "--json")
    told = json.loads(out)
    assert (told["phase"], told["running"]) == ("failed", False)
    assert PROMPT_TOO_LONG in told["reason"] and sum(told["dead"].values()) >= 8

    (root / "refuse").unlink()
    code, out, err = myxo.run("up", config, standins=True)
    assert (code, err) == (0, ""), f"{out}\n{err}"
    assert "step 2/2" in out


def test_dead_groups_are_told_at_once_by_lines_and_status_and_when_the_run_is_interrupted(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    config = config_file(rollout={"num_rollout": 1000, "max_dead_in_a_row": 0})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", begun(root))
    (root / "refuse").write_text(PROMPT_TOO_LONG)
    began = time.monotonic()
    assert PROMPT_TOO_LONG[:40] in line_with(process, "dead ")
    assert time.monotonic() - began < TOLD_SECONDS
    code, out, _ = myxo.run("status", root, "--json")
    told = json.loads(out)["troubles"]
    assert code == 0 and told["dead"] > 0 and PROMPT_TOO_LONG in told["dead_reason"] and told["dead_per_minute"] > 0
    process.terminate()
    code, out, err = ended(process)
    assert (code, err) == (143, ""), f"{out}\n{err}"
    assert "what went wrong" in out and PROMPT_TOO_LONG in " ".join(out.split())  # it is a table: texts are broken into lines
    assert "Stopped by SIGTERM" in out


@pytest.mark.extra
def test_a_service_that_dies_of_the_same_again_and_again_ends_the_run_although_it_was_ready(
    myxo: Myxo, config_file: ConfigFile, root: Path
) -> None:
    (root / "pause").write_text("5")
    config = config_file(rollout={"num_rollout": 1000})
    process = myxo.start("up", config, standins=True)
    wait_for("the first checkpoint", begun(root))
    (root / "die").write_text("No space left on device: rollouts")
    began = time.monotonic()
    assert "rollout-0" in line_with(process, "OSError: [Errno 28] No space left on device")
    assert time.monotonic() - began < TOLD_SECONDS
    code, out, err = ended(process)
    assert code == exit_codes.RUN_FAILED, f"{out}\n{err}"
    assert "stopped: rollout-0 ended 3 times with the same error" in out, "the progress tells it"
    assert "myxo: rollout-0 ended 3 times with the same error, and no training step in between: exit code 1: " in err
    assert "No space left on device" in out[out.index("what went wrong") :]
    code, out, _ = myxo.run("status", root)
    assert code == 0 and "Run test failed: rollout-0 ended 3 times" in out
