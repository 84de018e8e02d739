"""A sample for its page: turns, forks, what is in the loss, advantages; and what the trainer's dumps say of its tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.console.pages.sample_pages import prompt_messages, sampled_turns
from services.console.pages.sample_tokens import (
    Fork,
    ShownSample,
    TrainerTokens,
    advantages_of,
    as_text,
    forks,
    safe,
    trainer_tokens,
    turns,
    window,
)
from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import RunConfig
from shared.schema.sample import Sample
from shared.view.group_history import GroupRecord
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example


def sample(index: int = 0, **changes: Any) -> Sample:
    of_tokens = {"log_probs": [-0.5, -1.5, np.nan, -0.1, -2.0], "mask": [1, 1, 0, 1, 1], "segments": [(0, 2, 3), (2, 5, 4)]}
    fields = {"group": "g00000001", "prompt": [1, 2, 3], "response": [10, 11, 12, 13, 14], "text": "all of it", **of_tokens}
    return example(Sample, index=index, **{**fields, **changes})


def group(rewards: tuple[float, ...] = (0.0, 1.0), **changes: Any) -> GroupRecord:
    return GroupRecord("g00000001", 1, 1.0, rewards=rewards, **changes)


def decode(ids: Any) -> str:
    return "".join(chr(87 + token) for token in ids)


def test_turns_are_the_stretches_that_the_model_wrote_and_was_given() -> None:
    found = [(turn.kind, turn.start, turn.end, turn.text) for turn in turns(sample(), decode)]
    assert found == [("sampled", 0, 2, "ab"), ("given", 2, 3, "c"), ("sampled", 3, 5, "de")]
    assert [turn.text for turn in turns(sample(), None)] == [None, None, None], "no tokenizer: no text is made up"
    assert sampled_turns(sample()) == 2
    forked = {"response": np.arange(60, dtype=np.int32), "mask": np.zeros(60, np.uint8), "segments": [(0, 60, 3)]}
    assert sampled_turns(sample(**forked, log_probs=np.array([-1.0] * 5 + [0.0] * 50 + [-1.0] * 5, np.float32))) == 2
    assert sampled_turns(sample(**forked, log_probs=None)) is None, "not known"
    whole = sample(mask=np.ones(5, np.uint8))
    assert [(turn.start, turn.end, turn.text) for turn in turns(whole, None)] == [(0, 5, "all of it")]
    nothing = sample(response=np.empty(0, np.int32), mask=np.empty(0, np.uint8), log_probs=None, segments=[])
    assert turns(nothing, decode) == []


@table(
    ("record", "stale", "expected"),
    [
        (group(), False, [True, True, False, True, True]),
        (group(mask_below=4), False, [False, False, False, True, True]),
        (group(removed=(0,)), False, [False] * 5),
        (group(removed=(1,)), False, [True, True, False, True, True]),
        (group(), True, [False] * 5),
    ],
)
def test_what_is_in_the_loss(record: GroupRecord, stale: bool, expected: list[bool]) -> None:
    assert ShownSample(record, 0, sample(), stale).trained().tolist() == expected


def test_a_window_has_as_many_figures_as_tokens_and_none_where_there_is_none() -> None:
    trainer = TrainerTokens(log_probs=np.array([-0.4, -1.5, np.nan, -np.inf, -2.5]))
    shown = ShownSample(group(), 0, sample())
    found = window(shown, 1, 3, trainer, 0.7, lambda ids: [decode([token]) for token in ids])
    assert (found.first, found.total, found.ids, found.text) == (1, 5, [11, 12, 13], ["b", "c", "d"])
    assert found.log_probs == [-1.5, None, -0.1]
    assert found.trainer_log_probs == [-1.5, None, None], "an infinity is no figure that could be drawn"
    assert found.difference == [0.0, None, None]
    assert found.advantages == [0.7, None, 0.7], "what is not trained has no advantage"
    assert (found.versions, found.trained) == ([3, 4, 4], [True, False, True])
    own = TrainerTokens(advantages=np.array([0.1, 0.2, np.nan, 0.3, 0.4]))
    assert window(shown, 0, 9, own, 0.7, None).advantages == [0.1, 0.2, None, 0.3, 0.4], "the trainer's own count"
    assert window(shown, 77, 9, own, None, None).ids == []


def test_forks_are_the_other_samples_of_the_rollout() -> None:
    first, second = sample(0, rollout=0), sample(1, rollout=0, response=np.array([10, 11, 99, 13, 14], np.int32))
    other, text_only = sample(2, rollout=2), sample(3, rollout=0, prompt=np.empty(0, np.int32), response=np.empty(0, np.int32))
    found = forks([first, second, other, text_only], 0)
    assert found == [Fork(index=1, shared=5), Fork(index=3, shared=None)]
    assert forks([first, second, other, text_only], 2) == []


def test_advantages_are_those_of_the_trainer_or_said_to_be_unknown() -> None:
    grpo = AlgorithmSection()
    whole = [sample(0), sample(1)]
    found, why = advantages_of(group(), whole, grpo)
    scale = np.sqrt(0.5) + 1e-6
    assert (found, why) == ([pytest.approx(-0.5 / scale), pytest.approx(0.5 / scale)], "")
    assert advantages_of(group(), [sample(0, rollout=0), sample(1, rollout=0)], grpo)[0] == [0.0, 0.0]
    assert advantages_of(group(rollouts=(0, 0)), [], grpo)[0] == [0.0, 0.0], "the ledger tells it where the samples are gone"
    roles = [sample(0, role="white"), sample(1, role="black")]
    assert advantages_of(group(), roles, grpo)[0] == [0.0, 0.0], "rewards are compared within a role"
    for changes, word in (
        ({"advantage_estimator": "ppo"}, "ppo"),
        ({"kl_coef": 0.1}, "kl_coef"),
        ({"normalize_advantages": True}, "normalize_advantages"),
        ({"custom_advantage_function_path": "mine.advantages"}, "custom_advantage_function_path"),
    ):
        found, why = advantages_of(group(), whole, grpo.model_copy(update=changes))
        assert found is None
        assert word in why
    assert advantages_of(group(dataset="heldout"), whole, grpo)[0] is None
    assert advantages_of(group(()), [], grpo)[0] is None


@table(
    ("prompt", "expected"),
    [
        ("plain", [("", "plain", "")]),
        ([{"role": "user", "content": "a"}], [("user", "a", "")]),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}], [("assistant", "", '[{"id": 1}]')]),
        ([{"content": [{"type": "text", "text": "x"}]}], [("?", '[{"type": "text", "text": "x"}]', "")]),
        (["odd", 7, None], [("", "odd", ""), ("", "7", ""), ("", "null", "")]),
        ({"a": np.float32(1.5)}, [("", '{"a": 1.5}', "")]),
        (None, [("", "null", "")]),
        ([{"role": 3, "content": "\ud800"}], [("3", "?", "")]),
    ],
)
def test_prompts_of_any_form_are_messages(prompt: Any, expected: list[tuple[str, str, str]]) -> None:
    assert [(message.role, message.text, message.calls) for message in prompt_messages(prompt)] == expected


def test_values_of_metadata_are_text_that_can_be_encoded() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (loop, {1: {2}}, float("nan"), b"bytes", "\udfff", np.arange(3), object()):
        as_text(value).encode()
    assert safe("ok é") == "ok é"


# --- the trainer's dumps


@pytest.fixture
def dumping(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path, debug={"dump_details": str(tmp_path / "de[t]ails")})


def dump(config: RunConfig, samples: list[Sample], rank: int = 0, step: int = 3) -> None:
    """Writes what `services.trainer.dumps` writes of one micro-batch, by its own packing."""
    import torch

    from services.trainer.actor import StepResult
    from services.trainer.batches import MicroBatch, TrainBatch
    from services.trainer.dumps import write_tensors
    from services.trainer.packing import pack, spread

    packed = pack(samples, [1.0] * len(samples))
    values = [torch.arange(len(one.response), dtype=torch.float32) for one in samples]
    fields = {"trainer_log_probs": spread(samples, [-value for value in values], "trainer_log_probs")}
    packed = packed.with_fields(**fields, advantages=spread(samples, [10 + value for value in values], "advantages"))

    class Names:
        batch = type("Batch", (), {"step": step, "version": 1})

        def name(self, index: int) -> str:
            return samples[index].name

    batch = TrainBatch(Names(), np.empty(0), [[MicroBatch(list(range(len(samples))), samples, packed)]])  # type: ignore[arg-type]
    assert config.debug.train_dump is not None
    write_tensors(config.debug.train_dump, batch, list[StepResult](), rank)


def test_the_trainers_tokens_are_those_of_the_sample(dumping: RunConfig) -> None:
    wanted = sample(1, response=np.array([20, 21, 22, 23, 24], np.int32), log_probs=np.zeros(5, np.float32))
    first = sample(0, log_probs=np.zeros(5, np.float32))
    dump(dumping, [sample(7, log_probs=None)], rank=0)
    dump(dumping, [first, wanted], rank=1)
    found = trainer_tokens(dumping, 3, wanted)
    assert found.absent == ""
    assert found.log_probs is not None and found.advantages is not None
    np.testing.assert_array_equal(found.log_probs, [0.0, -1.0, np.nan, -3.0, -4.0])
    np.testing.assert_array_equal(found.advantages, [10.0, 11.0, np.nan, 13.0, 14.0])


def test_why_the_trainers_tokens_are_not_known(dumping: RunConfig, tmp_path: Path) -> None:
    known = sample(0, log_probs=np.zeros(5, np.float32))
    assert "--dump-details" in trainer_tokens(run_config(tmp_path), 3, known).absent
    assert "trained" in trainer_tokens(dumping, None, known).absent
    assert "no file of step 3" in trainer_tokens(dumping, 3, known).absent
    assert "keep_rollouts_tokens" in trainer_tokens(dumping, 3, sample(prompt=np.empty(0, np.int32))).absent
    dump(dumping, [known])
    assert "does not hold" in trainer_tokens(dumping, 3, sample(5)).absent
    assert "another run" in trainer_tokens(dumping, 3, sample(0, response=np.arange(5, dtype=np.int32))).absent
    assert "another run" in trainer_tokens(dumping, 3, sample(0, response=np.arange(900, dtype=np.int32))).absent
    [file] = Path(str(dumping.debug.dump_details)).glob("train_data/*")
    file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read" in trainer_tokens(dumping, 3, known).absent
