"""What a soak calls growing, and an hour of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.child_process import with_parent
from tests.chaos.soak import growing

ROOT = Path(__file__).resolve().parents[2]
STEPS_PER_HOUR = 500
"""At least."""


def test_what_grows_is_told_from_what_does_not():
    mib = 1 << 20
    flat = [100.0 * mib + (index % 3) * mib for index in range(40)]
    warming = [20.0 * mib] * 9 + [100.0 * mib] * 31
    leaking = [100.0 * mib + 4 * mib * index for index in range(40)]
    few = [36.0] * 20 + [39.0] * 20
    many = [36.0 + index for index in range(40)]
    series = {
        "memory of flat": flat,
        "memory of warming": warming,
        "memory of leaking": leaking,
        "descriptors of few": few,
        "descriptors of many": many,
        "keys in the store": [100.0] * 30 + [250.0] * 10,
        "queued task messages": [0.0] * 20 + [900.0] * 20,
    }
    assert set(growing(series)) == {"memory of leaking", "descriptors of many", "queued task messages"}
    with pytest.raises(ValueError, match="has 3 samples"):
        growing({"memory of flat": [1.0, 2.0, 3.0]})


@pytest.mark.extra
@pytest.mark.timeout(2 * 3600)
def test_an_hour_of_a_run_grows_nothing(request: pytest.FixtureRequest, tmp_path: Path):
    """Twelve minutes where it is of a share that somebody waits for."""
    path, hours = tmp_path / "soak.json", 0.2 if request.config.getoption("extra_share") else 1
    command = [sys.executable, "-m", "tests.chaos", "--hours", str(hours), "--json", str(path)]
    ended = subprocess.run(with_parent(command), cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads(path.read_text())
    assert found["steps"] >= hours * STEPS_PER_HOUR
    assert {"memory of trainer-0", "descriptors of rollout-0", "keys in the store", "queued task messages"} <= found["series"].keys()
