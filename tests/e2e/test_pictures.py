"""The example whose model learns to see, and one that learns to hear."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launched import ROOT, LaunchedRun
from tests.support.run_config import write_jsonl
from tests.support.tiny_audio import wav, write_tiny_audio_model

RUN_SECONDS = 900


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_tiny_model_learns_the_colour_of_a_square(tmp_path: Path) -> None:
    """Every push reaches the tower that sees: the engine's log-probs stay the trainer's to the end."""
    data = tmp_path / "data"
    subprocess.run([sys.executable, "examples/colours/prepare.py", str(data)], cwd=ROOT, check=True, timeout=300)
    text = (ROOT / "examples/colours/colours.toml").read_text().replace("runs/colours/data", str(data))
    text = text.replace('name = "colours"', f'name = "colours"\ndir = "{tmp_path / "runs"}"')
    (tmp_path / "colours.toml").write_text(text.replace("num_rollout = 40", "num_rollout = 24"))
    root = tmp_path / "runs" / "colours"
    with LaunchedRun(tmp_path / "colours.toml", root, "colours") as run:
        summary = run.ended(24, RUN_SECONDS)
    assert summary["mean_abs_logprob_diff"] < 1e-4
    assert summary["reward_last"] > summary["reward_first"] + 0.15 and summary["accuracy_after"] > summary["accuracy_before"]


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_a_tiny_model_learns_whether_a_tone_is_high(tmp_path: Path) -> None:
    """Every push reaches the tower that hears."""
    write_tiny_audio_model(tmp_path / "data" / "model", alphabet="hl?\nasentiru", std=0.05)
    for name, count in (("train", 256), ("heldout", 32)):
        dice, rows = random.Random(name), list[dict[str, str]]()
        for number in range(count):
            label = dice.choice("hl")
            tone = wav(dice.uniform(0.3, 0.8), dice.uniform(200, 400) if label == "l" else dice.uniform(3000, 5000))
            (tmp_path / "data" / f"{name}{number}.wav").write_bytes(tone)
            rows.append({"prompt": "<audio>?", "sounds": f"{name}{number}.wav", "label": label})
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", rows)
    text = (ROOT / "examples/colours/colours.toml").read_text().replace("runs/colours/data", str(tmp_path / "data"))
    text = text.replace('{ image = "images" }', '{ audio = "sounds" }').replace('trainer_backend = "torch"\n', "")
    text = text.replace('name = "colours"', f'name = "tones"\ndir = "{tmp_path / "runs"}"').replace("num_rollout = 40", "num_rollout = 24")
    (tmp_path / "tones.toml").write_text(text)
    with LaunchedRun(tmp_path / "tones.toml", tmp_path / "runs" / "tones", "tones") as run:
        summary = run.ended(24, RUN_SECONDS)
    assert summary["mean_abs_logprob_diff"] < 1e-4
    assert summary["reward_last"] > summary["reward_first"] + 0.15 and summary["accuracy_after"] > summary["accuracy_before"]
