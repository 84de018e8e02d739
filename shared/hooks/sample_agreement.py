"""Compares a sample that code of the user's made with its prompt, its text, and what the engine answered. Pure.

A sample that contradicts itself or the engine is refused, since it would be trained shifted or with made-up log-probs; where there may be a
reason for what it holds, that is a doubt. The engine's answers are those that are known: a function may have asked other servers, too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.schema.own_turns import runs
from shared.schema.sample import Sample

LOG_PROB_ERROR = 0.01
"""The mean difference up to which log-probs are the engine's: those of another token differ by more, those that were rounded by less."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What the engine sampled behind the first ``start`` tokens of a sample: ids int32 [K], log_probs float32 [K], or None."""

    start: int
    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Agreement:
    """own: bool [R], the tokens that are known to be the engine's. refused: why the sample cannot be trained. doubts: text by field."""

    own: NDArray[np.bool_]
    refused: str | None
    doubts: dict[str, str]


def compared(
    sample: Sample,
    prompt: NDArray[np.int32] | None,
    answers: Sequence[Answer],
    decode: Callable[[NDArray[np.int32], bool], str],
    special: Sequence[str] = (),
    whole: bool = True,
) -> Agreement:
    """Returns what is wrong with a sample.

    Args:
        prompt: int32 [P], that it was made of; None where the function has changed it. answers: to its prompt and to beginnings of it.
        decode: tokens to text, special tokens left out or not. special: the texts of these. whole: no answer is unknown.
    """
    tokens, start, length = np.concatenate([sample.prompt, sample.response]), len(sample.prompt), len(sample.response)
    trained, own, error = sample.mask != 0, np.zeros(len(tokens), np.bool_), np.full(len(tokens), np.inf)
    log_probs = np.concatenate([np.full(start, np.nan), np.full(length, np.nan) if sample.log_probs is None else sample.log_probs])
    complete = False
    for answer in answers:
        count = _common(answer.ids, tokens[answer.start :])
        end = answer.start + count
        own[answer.start : end] = True
        complete |= answer.start <= start < end and count == len(answer.ids)
        if answer.log_probs is not None:
            error[answer.start : end] = np.fmin(error[answer.start : end], np.abs(log_probs[answer.start : end] - answer.log_probs[:count]))
    known = own[start:] & trained & np.isfinite(error[start:])
    shifted = bool(known.any()) and float(error[start:][known].mean()) > LOG_PROB_ERROR
    foreign, doubts = np.flatnonzero(trained & ~own[start:]), dict[str, str]()
    asked, same = any(answer.start == start for answer in answers), _Text(sample.text, decode, special)
    refused = None if prompt is None or asked else _prompt_problem(sample, prompt, tokens, same)
    if refused is None and start and own[start - 1] and (shifted or (sample.log_probs is None and foreign.size)) and not asked:
        refused = f"response_length is {length}, but the engine had sampled tokens before these, the last {length} of tokens"
    elif refused is None and shifted:
        at = int(np.argmax(np.where(known, error[start:], 0)))
        given = f"{log_probs[start + at]:.4g} at {at}"
        refused = f"rollout_log_probs is {given}, which is not what the engine gave for token {tokens[start + at]}"
    zero = max((last - first for first, last in runs(trained & (log_probs[start:] == 0))), default=0)
    if complete and foreign.size:
        what = f"{foreign.size} trained tokens, the first at {foreign[0]} of the response, are none that the engine sampled"
        foreigners = [log_probs[start + first : start + last] for first, last in runs(trained & ~own[start:])]
        if whole and any(len(run) > 1 and not run.any() for run in foreigners):
            refused = refused or f"loss_mask: {what}, and their rollout_log_probs are 0.0; tokens of tools have loss_mask 0"
        doubts["loss_mask"] = f"{what}; tokens of tools have loss_mask 0"
    elif not complete and zero > 1:
        doubts["rollout_log_probs"] = f"{zero} trained tokens in a row have the log-prob 0.0; tokens of tools have loss_mask 0"
    if prompt is not None and not asked and not np.array_equal(sample.prompt[: len(prompt)], prompt):
        doubts["tokens"] = "tokens do not begin with those of the prompt that the function was given"
    if not same.as_of(sample.response):
        doubts["response"] = f"response is not the text of the last response_length = {length} tokens"
    return Agreement(own[start:], refused, doubts)


def _prompt_problem(sample: Sample, prompt: NDArray[np.int32], tokens: NDArray[np.int32], text: "_Text") -> str | None:
    """Returns why the response does not begin where the prompt ends; None where it does, or where the function made another prompt."""
    begin, length = len(sample.prompt), len(sample.response)
    if not np.array_equal(tokens[: len(prompt)], prompt) or begin == len(prompt):
        return None
    if begin < len(prompt):
        return f"response_length is {length}, and counts the last {len(prompt) - begin} tokens of the prompt; it counts those behind it"
    behind = tokens[len(prompt) :]
    if sample.text and not text.as_of(sample.response) and (text.as_of(behind) or text.as_of(behind[:length])):
        return f"response_length is {length}, but tokens has {len(behind)} behind the prompt, and response is their text"
    return None


class _Text:
    """A response's text, to be compared with tokens: white space, special tokens and half a character at the end do not count."""

    def __init__(self, text: str, decode: Callable[[NDArray[np.int32], bool], str], special: Sequence[str]) -> None:
        self._text, self._decode, self._special = text, decode, special

    def as_of(self, ids: NDArray[np.int32]) -> bool:
        if self._text in (self._decode(ids, True), whole := self._decode(ids, False)):
            return True
        return self._plain(self._text) == self._plain(whole)

    def _plain(self, text: str) -> str:
        found = re.sub("|".join(map(re.escape, self._special)), "", text) if self._special else text
        return "".join(found.split()).rstrip("\ufffd")


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Returns how many of the first elements two arrays have in common."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if differ.size else count
