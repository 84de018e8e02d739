"""Samples of a function of the user's, against its prompt, its text and what the engine answered."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from shared.hooks.sample_agreement import Answer, compared
from shared.schema.sample import Sample
from tests.support.tables import table

PROMPT, DRAWN, TOOL = [1, 2, 3], [11, 12, 13, 14], [40, 41]
LOG_PROBS = [-0.5, -1.5, -0.25, -2.0]
SPECIAL = "<|end|>"


def decode(ids: Any, skip_special_tokens: bool) -> str:
    """A letter a token; 99 is the special one."""
    return "".join(("" if skip_special_tokens else SPECIAL) if token == 99 else chr(ord("A") + int(token)) for token in ids)


def sample(tokens: list[int], length: int, log_probs: list[float] | None, mask: list[int] | None = None, text: str | None = None) -> Sample:
    prompt, response = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    return Sample(
        group="g1",
        index=0,
        prompt=np.array(prompt, np.int32),
        response=np.array(response, np.int32),
        log_probs=None if log_probs is None else np.array(log_probs, np.float32),
        mask=np.array(mask or [1] * length, np.uint8),
        segments=[(0, length, 0)],
        finish="stop",
        text=decode(response, False) if text is None else text,
    )


def found(one: Sample, *answers: Answer, changed: bool = False, whole: bool = True) -> SimpleNamespace:
    own, refused, doubts = compared(one, None if changed else np.array(PROMPT, np.int32), answers, decode, [SPECIAL], whole)
    return SimpleNamespace(own=own, refused=refused, doubts=doubts)


def answer(start: int, ids: list[int], log_probs: list[float] | None = None) -> Answer:
    return start, np.array(ids, np.int32), None if log_probs is None else np.array(log_probs, np.float32)


FIRST = answer(3, DRAWN, LOG_PROBS)
SECOND = answer(9, [15, 16], [-0.75, -1.0])
TWO_TURNS = [*PROMPT, *DRAWN, *TOOL, 15, 16]


@table(
    ("one", "answers"),
    [
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [FIRST]),
        (sample([*PROMPT, *DRAWN], 4, None), [FIRST]),
        (sample([*PROMPT, *DRAWN[:2]], 2, LOG_PROBS[:2]), [FIRST]),  # cut at a stop of the function's own
        (sample([*PROMPT, 8, *DRAWN], 4, LOG_PROBS), [answer(4, DRAWN, LOG_PROBS)]),  # a prompt with more to it
        (sample(TWO_TURNS, 8, [*LOG_PROBS, 0, 0, -0.75, -1.0], [1, 1, 1, 1, 0, 0, 1, 1]), [FIRST, SECOND]),
        (sample(TWO_TURNS, 2, [-0.75, -1.0]), [FIRST, SECOND]),  # of two turns the last is trained
        (sample([*PROMPT, *DRAWN], 2, LOG_PROBS[2:]), [FIRST]),  # of one answer the end is trained
        (sample([*PROMPT, *DRAWN], 4, [0.0, 0.0, 0.0, -2.0]), [answer(3, DRAWN, [0.0, 0.0, 0.0, -2.0])]),  # a model that is sure
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [answer(3, [11, 12], [-9.0, -9.0]), FIRST]),  # another rollout's answer, of older weights
        (sample([*PROMPT, *DRAWN], 5, [0.0, *LOG_PROBS], [0, 1, 1, 1, 1]), []),  # the prompt ends with the beginning of an answer
        (sample([*PROMPT, *DRAWN, 99], 5, [*LOG_PROBS, -0.1], text=f" {decode(DRAWN, True)}\n"), []),  # special tokens, white space
        (sample([*PROMPT, *DRAWN, 99], 5, [*LOG_PROBS, -0.1], text=decode(DRAWN, True) + SPECIAL), []),
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), []),
    ],
)
def test_what_agrees_is_taken_without_a_word(one: Sample, answers: list[Answer]) -> None:
    agreement = found(one, *answers)
    assert (agreement.refused, agreement.doubts) == (None, {})


@table(
    ("one", "answers", "reason"),
    [
        # two tokens of a tool behind what the engine sampled, and a length without them
        (sample([*PROMPT, *DRAWN, *TOOL], 4, LOG_PROBS, text=decode(DRAWN, True)), [], "response_length is 4, but tokens has 6 behind"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, None, text=decode(DRAWN + TOOL, True)), [], "response_length is 4, but tokens has 6 behind"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, LOG_PROBS, text="?"), [FIRST], "response_length is 4, but the engine had sampled"),
        (sample([*PROMPT, *DRAWN, *TOOL], 4, None, text="?"), [FIRST], "response_length is 4, but the engine had sampled"),
        # tokens without the last one
        (sample([*PROMPT, *DRAWN[:3]], 4, LOG_PROBS), [FIRST], "response_length is 4, and counts the last 1 tokens of the prompt"),
        # a tool without a mask
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), [FIRST], "loss_mask: 2 trained tokens, the first at 4"),
        (sample(TWO_TURNS, 8, [*LOG_PROBS, 0, 0, -0.75, -1.0]), [FIRST, SECOND], "loss_mask: 2 trained tokens, the first at 4"),
        # log-probs of other tokens, and none at all
        (sample([*PROMPT, *DRAWN], 4, [*LOG_PROBS[1:], -0.1]), [FIRST], "rollout_log_probs is -0.1 at 3"),
        (sample([*PROMPT, *DRAWN], 4, [0.0] * 4), [FIRST], "rollout_log_probs is 0 at 3"),
        # none for the second turn, short beside the first
        (
            sample([*PROMPT, *[11] * 900, 15, 16], 902, [*[-0.5] * 900, 0.0, 0.0]),
            [answer(3, [11] * 900, [-0.5] * 900), answer(903, [15, 16], [-0.75, -1.0])],
            "rollout_log_probs is 0 at 901",
        ),
    ],
)
def test_what_contradicts_the_engine_or_itself_is_refused_by_its_field(one: Sample, answers: list[Answer], reason: str) -> None:
    assert reason in (found(one, *answers).refused or "")


@table(
    ("one", "answers", "field"),
    [
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS, text="something else"), [], "response"),
        (sample([7, 7, *DRAWN], 4, LOG_PROBS), [], "tokens"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), [], "rollout_log_probs"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, None), [FIRST], "loss_mask"),
        (sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, -1, -1]), [FIRST], "loss_mask"),  # perhaps another server's
        (sample([*PROMPT, *DRAWN], 4, [0.0] * 4), [answer(3, DRAWN)], "rollout_log_probs"),  # the engine was asked for none
        # other tokens than any answer's: one that began alike, the first one left out, one before it, another in place of the last
        (sample([*PROMPT, *DRAWN], 4, LOG_PROBS), [answer(3, [11, 12, 50], [-9.0, -9.0, -9.0])], "tokens"),
        (sample([*PROMPT, *DRAWN[1:]], 3, LOG_PROBS[1:]), [FIRST], "tokens"),
        (sample([*PROMPT, 8, *DRAWN], 5, [-0.1, *LOG_PROBS]), [FIRST], "tokens"),
        (sample([*PROMPT, *DRAWN[:2], 99], 3, [*LOG_PROBS[:2], 0.0]), [FIRST], "tokens"),
    ],
)
def test_what_may_have_a_reason_is_a_doubt_by_its_field(one: Sample, answers: list[Answer], field: str) -> None:
    agreement = found(one, *answers)
    assert (agreement.refused, [*agreement.doubts]) == (None, [field])


def test_a_prompt_that_the_function_has_changed_is_its_own() -> None:
    assert found(sample([7, 7, *DRAWN], 4, LOG_PROBS), changed=True).doubts == {}


def test_tokens_that_came_by_a_stream_are_a_doubt_alone() -> None:
    agreement = found(sample([*PROMPT, *DRAWN, *TOOL], 6, [*LOG_PROBS, 0, 0]), FIRST, whole=False)
    assert (agreement.refused, {*agreement.doubts}) == (None, {"loss_mask", "tokens"})
    assert agreement.own.tolist() == [True] * 4 + [False] * 2
