"""A remote reward gets prompts as slime has them: as they stand in the file, or rendered by the chat template."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.reward.remote_rewards import prompt_text
from shared.data.tokenizer import Tokenizer
from shared.hub import hub_client
from shared.schema.sample import Sample
from tests.support.run_config import run_config

MESSAGES = [{"role": "user", "content": "1+1="}]


def test_a_prompt_is_rendered_where_the_run_does_so(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    rendered = tokenizer.render(MESSAGES, {})
    nothing = np.empty(0, np.int32)
    sample = Sample("g0", 0, tokenizer.encode(rendered), nothing, np.empty(0, np.float32), np.empty(0, np.uint8), [], "stop", "2", "1+1=")
    model = {"hf_checkpoint": str(tiny_model)}
    as_rendered = prompt_text(run_config(tmp_path, model=model, data={"apply_chat_template": True}))
    assert as_rendered(sample) == as_rendered(replace(sample, prompt_text=MESSAGES)) == rendered
    assert prompt_text(run_config(tmp_path, model=model))(sample) == "1+1="
    held_out = replace(sample, group="eval.other.0.0")
    for run in (True, False):
        sets = [{"name": "other", "path": "p", "apply_chat_template": not run}]
        text = prompt_text(run_config(tmp_path, model=model, data={"apply_chat_template": run}, eval={"sets": sets}))
        assert (text(sample), text(held_out)) == ((rendered, "1+1=") if run else ("1+1=", rendered))


def test_a_model_of_the_hub_renders_them_too(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of a run names it; its tokenizer is fetched, and no weights."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(hub_client, "model_directory", lambda hub, name, weights: Path("none") if weights else tiny_model)
    config = run_config(tmp_path, model={"hf_checkpoint": f"hf:Qwen/Qwen3-0.6B@main={'0' * 40}"}, data={"apply_chat_template": True})
    tokens, nothing = Tokenizer(tiny_model).encode("1+1="), np.empty(0, np.int32)
    sample = Sample("g0", 0, tokens, nothing, np.empty(0, np.float32), np.empty(0, np.uint8), [], "stop", "2", MESSAGES)
    assert prompt_text(config)(sample) == "1+1="
