"""The examples' functions, called as services call them."""

import asyncio
import io
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.hooks import arithmetic, objective
from examples.search import search_agent
from services.reward.custom_functions import KEEP, REMOVE, SCORE, SEE, Functions
from services.trainer.objective.correction import Statistics
from services.trainer.objective.custom_objective import CustomFunctions, CustomLoss
from services.trainer.objective.loss import PolicyLoss, loss_of
from services.trainer.objective.reduce import denominator, sample_weights
from services.trainer.packing import PackedBatch, pack, spread
from shared.hooks import HookSample, load
from shared.rewards.reward_advantage import reward_advantages
from shared.schema.sample import Sample
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.train_samples import train_sample
from tests.support.valid_messages import example

MODULE = "examples.hooks.arithmetic"


def sample(index: int, text: str, **changes: object) -> Sample:
    return example(Sample, group="g00000003", index=index, text=text, prompt_text="40+2=", label="42", **changes)


@table(("text", "number"), [("42", "42"), ("(02 04)42", "42"), ("41 no. 40+2=42", "42"), ("no. 40+2=", "2"), ("", None), ("(", None)])
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert arithmetic.answer(text) == number


async def test_all_functions_on_one_group(tmp_path: Path) -> None:
    fields = {SCORE: "score", KEEP: "mixed", REMOVE: "without_truncated", SEE: "write_down"}
    sections: dict[str, dict[str, str]] = {"reward": {}, "rollout": {}}
    for field, name in fields.items():
        section, _, key = field.partition(".")
        sections[section][key] = f"{MODULE}:{name}"
    functions = Functions(run_config(tmp_path, **sections))
    group = [sample(0, "42"), sample(1, "41 no. 40+2=42", metadata={"tries": 2}), sample(2, "4", finish="length")]
    scores = await functions.score(group, None)
    assert [(score.reward, score.parts) for score in scores] == [(1.0, {"right": 1.0}), (0.9, {"right": 1.0}), (0.0, {"right": 0.0})]
    verdict = await functions.select(group, scores)
    assert verdict.filtered is None
    assert [score.removed for score in verdict.scores] == [False, False, True]
    assert [(score.reward, score.parts) for score in verdict.scores] == [(score.reward, score.parts) for score in scores]
    for texts, reason in ((["42", "42"], "all_right"), (["1", "2"], "all_wrong")):
        same = [sample(index, text) for index, text in enumerate(texts)]
        assert (await functions.select(same, await functions.score(same, None))).filtered == reason
    lines = [json.loads(line) for line in (tmp_path / "runs" / "test" / "groups.jsonl").read_text().splitlines()]
    assert [line["rewards"] for line in lines] == [[1.0, 0.9, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert {line["prompt"] for line in lines} == {"40+2="}


# --- the example's functions of the objective, called as the trainer calls them

OBJECTIVE = "examples.hooks.objective"
FUNCTIONS = {
    "custom_reward_post_process_path": "less_for_length",
    "custom_advantage_function_path": "fading",
    "custom_tis_function_path": "square_root_weight",
    "custom_pg_loss_reducer_function_path": "by_fixed_length",
}


def loaded(directory: Path, **algorithm: Any) -> tuple[Any, CustomFunctions]:
    config = run_config(directory, algorithm=algorithm)
    return config.algorithm, CustomFunctions.of(config)


def micro_batch(advantages: list[torch.Tensor], weights: Sequence[float]) -> PackedBatch:
    samples = [train_sample([1], [2] * len(advantage), index=index) for index, advantage in enumerate(advantages)]
    return pack(samples, weights).with_fields(advantages=spread(samples, advantages, "advantages"))


def test_rewards_to_loss_by_functions_of_ones_own(tmp_path: Path) -> None:
    config, custom = loaded(tmp_path, gamma=0.5, **{field: f"{OBJECTIVE}:{name}" for field, name in FUNCTIONS.items()})
    samples = [HookSample(reward=1.0, response_length=2 * objective.LONG), HookSample(reward=0.0, response_length=3)]
    raw, rewards = custom.post_processed(samples)
    assert (raw, rewards) == ([1.0, 0.0], [0.8, 0.0])
    masks = [torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)]
    of_own = reward_advantages(config, rewards, ["g", "g"], [0, 1])
    found = custom.advantages(masks, {"rewards": of_own.tolist()})
    np.testing.assert_allclose(found.advantages[0], [0.2, 0.4, 0.8])  # the rewards are as the function made them, not compared
    batch = micro_batch(found.advantages, sample_weights([3, 2], [1, 1]).tolist())
    loss = loss_of(config, custom, 0, Statistics(), denominator([3, 2], [1, 1]))
    assert isinstance(loss, PolicyLoss)
    value, metrics = loss(log_probs(batch, [[-1.0, -1.0, -0.8], [-1.0, -1.0]]), None, batch)
    # the last token's weight is sqrt(e^0.2), within tis_clip; the ratio to the policy itself is 1
    assert metrics["tis"].item() == pytest.approx((2 + np.exp(0.1)) / 6 + 0.5, rel=1e-5)
    expected = -(0.2 + 0.4 + 0.8 * np.exp(0.1)) / objective.DIVISOR / 2
    assert value.item() == pytest.approx(expected, rel=1e-5)
    value, _ = loss(log_probs(batch, [[-1.0, -1.0, 1.0], [-1.0, -1.0]]), None, batch)
    assert value.item() == 0.0  # sqrt(e^2) is over tis_clip


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    config, custom = loaded(tmp_path, loss_type="custom_loss", custom_loss_function_path=f"{OBJECTIVE}:weighted_likelihood")
    loss = loss_of(config, custom, 0, Statistics(), 1.0)
    assert isinstance(loss, CustomLoss)
    batch = micro_batch([torch.full((2,), 2.0), torch.full((1,), -1.0)], sample_weights([2, 1], [1, 1]).tolist())
    logits = torch.zeros(5, 4, requires_grad=True)  # every token has probability 1/4
    value, metrics = loss(logits, batch)
    assert metrics["log_probs"].item() == pytest.approx(np.log(1 / 4), rel=1e-6)
    assert value.item() == pytest.approx(-np.log(1 / 4) * (2.0 - 1.0) / 2, rel=1e-6)
    value.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, batch.loss_mask > 0)


def log_probs(batch: PackedBatch, of_samples: list[list[float]]) -> torch.Tensor:
    values = torch.zeros(batch.tokens.shape)
    values[batch.loss_mask > 0] = torch.tensor([value for row in of_samples for value in row])
    return values.requires_grad_()


# --- agents score what was said last, whole; a debate's judge is paid for the solver whom it names


class Said:
    """A client of OpenAI's, with and without ``async``, whose model says one thing."""

    def __init__(self, text: str) -> None:
        message = SimpleNamespace(content=text, tool_calls=None, model_dump=lambda **_: {})
        self._answer = SimpleNamespace(choices=[SimpleNamespace(message=message)])
        self.chat = SimpleNamespace(completions=self)

    def __call__(self, **_: object) -> "Said":
        return self

    def __enter__(self) -> "Said":
        return self

    def __exit__(self, *_: object) -> None: ...

    def create(self, **_: object) -> Any:
        return self._answer


class SaidLater(Said):
    async def __aenter__(self) -> "Said":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def create(self, **_: object) -> Any:
        return self._answer


ASKED = {"model": "policy", "messages": [], "options": {}}


@table(
    ("said", "label", "right"),
    [
        ("5", "5", 1.0),
        ("(02 04)42", "42", 1.0),
        ("it is -3.", "-3", 1.0),
        ("15", "5", 0.0),
        ("2.5", "5", 0.0),
        ("-5", "5", 0.0),
        (".5", "5", 0.0),
        ("it is...5", "5", 1.0),
        ("5", 5, 1.0),
        ("2.5", 2.5, 1.0),
        ("", "5", 0.0),
    ],
)
def test_a_command_rewards_the_last_number_and_no_end_of_it(
    said: str, label: str | float, right: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openai.OpenAI", Said(said))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({**ASKED, "label": label})))
    monkeypatch.syspath_prepend("examples/agents")
    runpy.run_path("examples/agents/command_agent.py", run_name="__main__")
    assert json.loads(capsys.readouterr().out) == {"reward": right, "length": len(said)}


@pytest.mark.parametrize(
    ("said", "label", "right"),
    [("it is red", "red", 1.0), ("in New  York\n", "New York", 1.0), ("infrared", "red", 0.0), ("York", "New York", 0.0), ("", "red", 0.0)],
)
async def test_a_searched_answer_ends_with_the_words_of_its_label(
    said: str, label: str, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_agent, "AsyncOpenAI", SaidLater(said))
    assert (await search_agent.run({**ASKED, "label": label}, "", ""))["right"] == right


@pytest.mark.parametrize(("choice", "reward"), [("1", 1.5), ("2", 0.0), ("²", 0.0), ("3", 0.0), ("none", 0.0)])
async def test_a_judge_has_the_reward_of_the_answer_that_it_read_under_its_number(
    choice: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("custom_generate_function_path", "examples.compat.debate.generate_with_debate")  # as a worker does: slime's names are there
    debate = sys.modules["examples.compat.debate"]
    later = asyncio.Event()
    answers = iter([("42", later), ("7", None), (choice, None)])

    async def post(url: str, payload: Any) -> Any:
        text, waits = next(answers)
        await waits.wait() if waits else later.set()  # the first one asked answers last
        tokens = [[-1.0, ord(letter)] for letter in text]
        return {"text": text, "meta_info": {"output_token_logprobs": tokens, "finish_reason": {"type": "stop"}}}

    monkeypatch.setattr(debate, "post", post)
    args = SimpleNamespace(solvers=2, bonus=1.5, penalty=0.5, rollout_max_context_len=None, sampling_params={})
    args.sglang_router_ip, args.sglang_router_port = "router", 1
    args.tokenizer = lambda text, **_: {"input_ids": [ord(letter) for letter in text]}
    args.custom_rm_path, args.rm_type, args.rm_url = None, "exact", None
    samples = await debate.run_debate(args, HookSample(prompt="40+2=", label="42"))
    assert [(one.role, one.response, one.reward > 0) for one in samples[:2]] == [("solver", "42", True), ("solver", "7", False)]
    assert samples[2].prompt == "40+2=\n1: 42\n2: 7\nWhich is right? " and (samples[2].role, samples[2].reward) == ("judge", reward)
