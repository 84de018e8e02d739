"""The benchmark of agents measures what it says: real gateways, and in the long variant real engines and agents."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.__main__ import PARTS
from benchmarks.agents.figures import misses
from tests.support.service_process import ROOT

pytestmark = pytest.mark.timeout(600)


def measured(directory: Path, *words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The figures of the command, and what it said."""
    file, environment = directory / "figures.json", {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "benchmarks.agents", "--json", str(file), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert file.exists(), done.stderr
    return json.loads(file.read_text()), done


def test_what_a_gateway_adds_is_told_by_format_and_history(tmp_path: Path) -> None:
    found, done = measured(tmp_path, "--parts", "overhead", "--requests", "4", "--at-once", "2")
    assert done.returncode == 0, done.stderr
    assert set(found["overhead"]) == {"chat", "messages", "responses", "generate"}
    for name, rows in found["overhead"].items():
        assert name in done.stdout
        for row in rows.values():
            assert 0 < row["p50_ms"] <= row["p99_ms"] < 60_000 and row["gateway_cpu_ms"] >= 0 and row["requests_per_s"] > 0
        assert {rows[f"long, {count} at once"]["requests"] for count in (1, 2)} == {20, 40}


@pytest.mark.extra
def test_all_parts_with_real_engines(tmp_path: Path) -> None:
    words = ["--sessions", "4", "--crowd", "16", "--turns", "2", "--tokens", "16", "--repetitions", "1", "--requests", "4"]
    found, done = measured(tmp_path, *words)
    assert set(PARTS) < set(found)
    pace, prefixes, crowd = found["pace"], found["prefixes"], found["crowd"]
    assert all(rate > 0 for rate in pace["tokens_per_s"].values())
    kept, spread, none = (prefixes[name]["prefill_tokens"] for name in ("cache and affinity", "cache alone", "affinity alone"))
    assert kept <= spread < none == prefixes["affinity alone"]["prompt_tokens"]
    over = found["oversubscribe"]
    assert over["kept"] == 640 and over["prefill_tokens_of_sessions"] < 2 * 4 * 256, "each beginning is computed once"
    assert crowd["sessions"] == 16 and crowd["lost"] == 0 and crowd["gateway_mb"] > 10
    assert crowd["cpu_s"]["agents"] > 0 < crowd["cpu_s"]["engine"]
    assert done.returncode == bool(misses(found)), done.stderr
