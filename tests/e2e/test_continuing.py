"""A run that continues with other values, one that begins with another's weights, and one after a loss of power."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.run.run_directory import checkpoints
from shared.bus import runs
from shared.data.metric_files import MetricDirectory
from tests.e2e.launched import ROOT, LaunchedRun, trained

RUN_SECONDS = 600


def myxo(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "myxo.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)


@pytest.mark.extra(each=True)
@pytest.mark.timeout(3 * RUN_SECONDS)
def test_a_stopped_run_continues_with_other_values_and_another_begins_from_it(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, root = small_run("first", steps=500, staleness=1), tmp_path / "runs" / "first"
    with LaunchedRun(config, root, "first") as run:
        run.until("a step", lambda cards: any(card.gauges.get("step", 0) >= 1 for card in cards if card.service == "trainer"), RUN_SECONDS)
        run.process.terminate()
        assert run.wait(RUN_SECONDS) == 143, run.said()
    frozen = runs.frozen(root)
    assert frozen is not None
    saved = checkpoints(frozen)[-1]
    values = ["--lr", "2e-4", "--eps-clip", "0.1", "--rollout-temperature", "0.8"]
    with LaunchedRun(config, root, "first", [*values, "--num-rollout", str(saved + 2)]) as run:
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
        [change] = summary["changes"]
        expected = {"algorithm.eps_clip: 0.2 → 0.1", "rollout.rollout_temperature: 1.0 → 0.8", "trainer.lr: 0.0001 → 0.0002"}
        assert (change["step"], set(change["changed"])) == (saved, expected)
        assert (summary["audit"], summary["steps"]) == ("ok", saved + 2)
        assert f"continues at step {saved} with" in " ".join(run.output.read_text().split()), run.said()
    rates = {one.step: one.value for one in MetricDirectory(root / "tensorboard").read() if one.tag == "train/lr"}
    assert [rates[step] for step in range(saved + 2)] == pytest.approx([1e-4] * saved + [2e-4] * 2), rates

    refused = myxo("up", config, *values, "--rollout-batch-size", "8")
    assert refused.returncode == 2 and "up CONFIG --from first --name NAME" in " ".join(refused.stderr.split())
    begun = myxo(
        "up",
        config,
        "--from",
        f"first@{saved + 2}",
        "--dir",
        root.parent,
        "--name",
        "second",
        "--rollout-batch-size",
        "2",
        "--num-rollout",
        "1",
    )
    assert begun.returncode == 0, begun.stdout + begun.stderr
    second = runs.frozen(root.with_name("second"))
    assert second is not None and second.sft.sft_data is None and second.model.hf_checkpoint == root.with_name("second") / "beginning"
    weights = (root / "hf" / "model.safetensors").read_bytes()
    assert (second.model.hf_checkpoint / "model.safetensors").read_bytes() == weights

    compared = json.loads(myxo("compare", "first", "second", "--dir", root.parent, "--json").stdout)
    assert compared["config"]["rollout.rollout_batch_size"] == [4, 2]
    assert [one["steps"] for one in compared["results"]] == [saved + 2, 1]
    picture = tmp_path / "compare.png"
    shown = myxo("compare", root, root.with_name("second"), "--picture", picture)
    assert picture.is_file() and "rollout.rollout_batch_size" in shown.stdout, shown.stdout + shown.stderr


SECONDS = 600


@pytest.mark.extra(each=True)
@pytest.mark.timeout(5 * SECONDS)
def test_a_run_goes_on_after_its_servers_were_rolled_back(small_run: Callable[..., Path], tmp_path: Path) -> None:
    config, root, steps = small_run("dark", steps=100, staleness=1), tmp_path / "runs" / "dark", 100
    flags = ["--save-interval", "2", "--keep-checkpoints", "100"]

    def torn(after: int) -> int:
        """Kills a run some steps after that one; returns the step of its newest checkpoint."""
        with LaunchedRun(config, root, "dark", flags) as run:
            run.until(f"{after} steps", lambda cards: trained(cards) >= after + 4, SECONDS)
            run.kill(run.process.pid)
            run.process.wait(60)
        (root / "servers.json").unlink()  # of servers that are dead; the next launcher writes its own
        return max(int(path.name.removeprefix("step_")) for path in (root / "checkpoints").glob("step_*"))

    synced = torn(0)
    servers = ("nats", "valkey")
    for name in servers:
        shutil.copytree(root / name, tmp_path / f"synced-{name}")
    assert torn(synced + 2) > synced
    for name in servers:
        shutil.rmtree(root / name)
        shutil.copytree(tmp_path / f"synced-{name}", root / name)
    with LaunchedRun(config, root, "dark", flags) as run:
        assert run.wait(SECONDS) == 3, run.said()
        assert "`myxo repair RUN` says what would be lost" in run.said()

    looked, mended = (myxo("repair", str(root), *words) for words in ((), ("--yes",)))
    assert looked.returncode == 1 and "they are put aside" in looked.stdout, looked.stdout + looked.stderr
    assert mended.returncode == 0, mended.stdout + mended.stderr
    with LaunchedRun(config, root, "dark", flags) as run:
        run.ended(steps, SECONDS)
