"""slime's launch scripts, shrunk, as command lines of ``myxo train``: three steps on a CPU each, with everything that they switch on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared.process.child_process import with_parent
from tests.e2e.conftest import SUMS
from tests.e2e.launched import ROOT
from tests.support.shrunk_script import command_line, shrunk, write_model
from tests.support.slime_scripts import SCRIPTS

RUN_SECONDS = 900
STEPS = 3

USERS_FILES = {
    "agents.py": '''
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def solve_and_review(args, sample, sampling_params, evaluation=False):
    """An agent solves, another one reviews what it wrote; each call becomes a sample of its own."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

    async def ask(text):
        ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = await post(url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True})
        told = answer["meta_info"]
        one = Sample(prompt=text, label=sample.label, index=sample.index, group_index=sample.group_index)
        one.tokens = ids + [token for _, token, *_ in told["output_token_logprobs"]]
        one.rollout_log_probs = [log_prob for log_prob, *_ in told["output_token_logprobs"]]
        one.response, one.response_length = answer["text"], len(one.rollout_log_probs)
        one.loss_mask = [1] * one.response_length
        one.weight_versions = [told["weight_version"]]
        cut = told["finish_reason"]["type"] == "length"
        one.status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED
        return one

    draft = await ask(prompt)
    review = await ask(f"{prompt}{draft.response}\\nIs it right?")
    if not args.use_rollout_logprobs:
        review.rollout_log_probs = None  # as functions have it that leave them to the trainer
    return [draft, review]
''',
    "mismatch.py": '''
import torch


def clipped_ratio(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    """Weighs each token by the ratio of trainer to engine, at most what the config file says."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * ratio.clamp(max=args.ratio_at_most), loss_masks, {"ratio": ratio}
''',
    "mismatch.yaml": "ratio_at_most: 2.0\n",
}
"""What the scripts' users have beside them, in slime's manner."""

DENSE = "scripts/run-qwen3-4B.sh"
EXPERTS = "scripts/run-qwen3-30B-A3B.sh"
AGENTS = "examples/multi_agent/run-qwen3-30B-A3B-multi-agent.sh"
TEACHER = "examples/on_policy_distillation/run-qwen3-8B-opd-megatron.sh"
MISMATCH = "examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh"

SHOWS = {
    DENSE: ("train/kl_loss", "train/pg_clipfrac"),
    EXPERTS: ("train/kl_loss", "train/pg_clipfrac"),
    AGENTS: ("train/kl_loss", "train/pg_clipfrac"),
    TEACHER: ("train/kl_loss",),
    MISMATCH: ("train/ratio",),
}
"""Script → scalars that its flags ask for."""


@pytest.mark.timeout(RUN_SECONDS + 300)
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=pytest.mark.extra(each=True)) for one in (DENSE, EXPERTS, AGENTS, TEACHER, MISMATCH)]
)
def test_a_shrunk_script_trains(script: str, tmp_path: Path) -> None:
    """The random model answers no problem, so a random reward stands for the script's own: the weights then move."""
    flags = shrunk(SCRIPTS[script], written(tmp_path))
    write_model(tmp_path / "model", flags, seed=1)
    write_model(tmp_path / "teacher", flags, seed=2)
    output = tmp_path / "output"
    with output.open("wb") as out:
        done = subprocess.run(
            with_parent([sys.executable, "-m", "myxo.main", "train", *command_line(flags), "--run-name", "script"]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            timeout=RUN_SECONDS,
        )
    root = tmp_path / "saved" / "script"
    said = output.read_text() + "".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in sorted(root.glob("logs/*.log")))
    assert done.returncode == 0, said
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["steps"], summary["audit"]) == (STEPS, "ok")
    assert summary["mean_abs_logprob_diff"] < 1e-3
    assert summary["trained_tokens"] > 0
    before, after = (
        {name: tensor for file in weights.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for weights in (tmp_path / "model", root / "hf")
    )
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before), "no weight moved"
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    assert set(SHOWS[script]) <= set(events.Tags()["scalars"])
    norms = [event.value for event in events.Scalars("train/grad_norm")]
    assert len(norms) == STEPS and max(norms) > 0


def written(directory: Path) -> dict[str, list[str]]:
    """Writes the files that a script names; returns the values of its flags for them."""
    for name, text in USERS_FILES.items():
        (directory / name).write_text(text)
    asked = [([{"role": "user", "content": f"{a}+{b}="}], str(a + b)) for a, b in SUMS]
    rows = [json.dumps({"prompt": prompt, "messages": prompt, "label": label}) + "\n" for prompt, label in asked]
    (directory / "train.jsonl").write_text("".join(rows[:16]))
    (directory / "heldout.jsonl").write_text("".join(rows[16:18]))
    model, saved = [str(directory / "model")], [str(directory / "saved")]
    return {
        **{"hf-checkpoint": model, "ref-load": model, "load": saved, "save": saved, "opd-teacher-load": [str(directory / "teacher")]},
        **{"prompt-data": [str(directory / "train.jsonl")], "eval-prompt-data": ["aime", str(directory / "heldout.jsonl")]},
        **{"custom-generate-function-path": ["agents.solve_and_review"], "custom-tis-function-path": ["mismatch.clipped_ratio"]},
        **{"custom-config-path": [str(directory / "mismatch.yaml")], "rm-type": ["random"]},
    }
