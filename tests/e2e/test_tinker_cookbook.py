"""The Tinker cookbook's own recipes, unmodified, against `myxo serve`: supervised, RL with math, preference and distillation learn."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import LaunchedRun
from tests.e2e.test_tinker import CONFIG, KEY, TENANTS, audited, endpoint, installed
from tests.support.tiny_model import TinyModelShape, character_tokenizer, write_tiny_model

pytestmark = [pytest.mark.timeout(1800), pytest.mark.extra]

# Its other requirements are the SDK's, or are here for other reasons; tml-renderers in the version that it asks for is not on PyPI
COOKBOOK = ["tinker-cookbook==0.6.1", "chz", "blobfile", "pyrage", "termcolor", "tml-renderers", "cloudpickle", "tiktoken"]
COOKBOOK += ["pycryptodomex", "lxml", "urllib3"]
MODEL = "Qwen/Qwen3-8B-Base"  # the cookbook chooses the rendering by the name
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, "
    "8, and 9. \\boxed{3}"
)


def rows(path: Path, given: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in given))


def write_data(root: Path) -> None:
    """Lays the data sets that the recipes load by name, and the tokenizer, under relative paths of their names."""
    rng = random.Random(1)
    character_tokenizer().save_pretrained(root / MODEL)
    shown = [
        {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
        {"role": "assistant", "content": SHOWN},
        {"role": "user", "content": "Two?" + SUFFIX},
    ]  # as `rl_loop` asks
    taught = [[*shown, {"role": "assistant", "content": f"\\boxed{{{rng.choice('2345')}}}"}] for _ in range(640)]
    rows(root / "HuggingFaceH4/no_robots/train.jsonl", [{"messages": messages} for messages in taught])
    rows(root / "openai/gsm8k/main/train.jsonl", [{"question": "Two?", "answer": "#### 2"}] * 256)
    (root / "openai/gsm8k/README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n")
    talk = "\n\nHuman: {}?\n\nAssistant: {}".format
    pairs = [{"chosen": talk(word, "yes"), "rejected": talk(word, "no")} for word in ("One", "Two", "Three", "Four") * 16]
    for split in ("train", "test"):
        rows(root / f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
    rows(root / "zwhe99/DeepMath-103K/train.jsonl", [{"question": "Two?" + SUFFIX}] * 256)


def recipe(root: Path, url: str, paths: list[Path], name: str, log: str, **settings: object) -> list[dict[str, Any]]:
    """Runs a recipe as its page says, and returns the metrics of its steps."""
    given = {"base_url": url, "log_path": str(root / log), "model_name": MODEL, **settings}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in given.items())]
    environment = {
        **os.environ, "PYTHONPATH": ":".join(map(str, paths)), "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HOME": str(root / "hub"),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads(line) for line in (root / log / "metrics.jsonl").read_text().splitlines()]


def test_recipes_learn(tmp_path: Path) -> None:
    paths = [installed(COOKBOOK, dependencies=False), installed(["tinker==0.38.0"])]
    write_data(tmp_path)
    write_tiny_model(tmp_path / "model", shape=TinyModelShape(hidden_size=128, intermediate_size=256))
    config = tmp_path / "serve.toml"
    served = CONFIG.format(directory=tmp_path).replace("lora_rank = 8", "lora_rank = 64")
    config.write_text(served.replace("[tinker]", f'[tinker]\ntinker_model_name = "{MODEL}"'))
    (tmp_path / "tenants.json").write_text(json.dumps(TENANTS))
    with LaunchedRun(config, tmp_path / "runs" / "serve", "serve", command="serve") as run:
        url = endpoint(run)

        def learned(name: str, log: str, figure: str, **settings: object) -> list[float]:
            steps = recipe(tmp_path, url, paths, name, log, **settings)
            return [each[figure] for each in steps if figure in each]

        alone, size = {"train_on_what": "last_assistant_message"}, {"lora_rank": 64}
        losses = learned(
            "sl_loop", "supervised", "train_mean_nll", batch_size=16, learning_rate=1e-2, max_steps=40, save_every=4, **alone, **size
        )
        assert losses[-1] < 0.1 * losses[0], losses
        begun, *_, taught = map(json.loads, (tmp_path / "supervised/checkpoints.jsonl").read_text().splitlines())
        rows(tmp_path / "reinforced/checkpoints.jsonl", [{**taught, "name": "taught", "batch": 0}])
        loss = {"loss_fn": "importance_sampling", "max_tokens": 24}
        rewards = learned(
            "rl_loop", "reinforced", "reward/total", batch_size=4, group_size=16, learning_rate=3e-3, max_steps=10, **loss, **size
        )
        assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.2, rewards
        margins = learned("preference.dpo.train", "preferred", "margin", batch_size=8, learning_rate=3e-3, max_steps=8, max_length=512)
        assert margins[-1] > 0.5 > abs(margins[0]), margins
        taught_by = {"teacher_model": MODEL, "teacher_checkpoint": taught["sampler_path"], "eval_every": 0, "save_every": 0}
        groups = {"groups_per_batch": 8, "group_size": 4, "max_tokens": 16, "max_steps": 6, "load_checkpoint_path": begun["state_path"]}
        divergence = learned(
            "distillation.on_policy_distillation", "distilled", "teacher_kl", learning_rate=3e-3, **groups, **taught_by, **size
        )
        assert divergence[-1] < 0.7 * divergence[0], divergence
        assert audited(run)["ok"]
