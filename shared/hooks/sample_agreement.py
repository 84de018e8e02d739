"""Compares a sample that code of the user's made with its prompt, its text, and what the engine answered. Pure.

What contradicts itself or the engine is refused: it would be trained shifted, or with made-up log-probs. What may have a reason is a doubt.
An answer is (start, ids int32 [K], log_probs float32 [K] or None): what the engine sampled behind the first ``start`` tokens.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.schema.sample import Sample, runs

LOG_PROB_ERROR = 0.01
"""The mean difference up to which log-probs are the engine's: those of another token differ by more, those that were rounded by less."""

Tokens = NDArray[np.int32]
Answer = tuple[int, Tokens, NDArray[np.float32] | None]
Decode = Callable[[Tokens, bool], str]
Doubts = dict[str, str]


def compared(
    sample: Sample, prompt: Tokens | None, answers: Sequence[Answer], decode: Decode, special: Sequence[str] = (), whole: bool = True
) -> tuple[NDArray[np.bool_], str | None, Doubts]:
    """Returns which tokens of the response are known to be the engine's, bool [R], why the sample is refused, and doubts by field.

    Args:
        prompt: int32 [P], that it was made of; None where the function has changed it. answers: to its prompt and to beginnings of it.
        decode: tokens to text, special tokens left out or not. special: the texts of these. whole: no answer is unknown.
    """
    tokens, start = np.concatenate([sample.prompt, sample.response]), len(sample.prompt)
    own, error = _sampled(sample, tokens, answers)
    asked = any(first == start for first, _, _ in answers)
    wrong, doubts = _beside_engine(sample, own, error, asked)
    refused = wrong if whole else None
    if wrong is not None and not whole:
        doubts["tokens"] = wrong
    if asked and whole and sample.mask.any() and not own[start:].any():
        doubts["tokens"] = "tokens continue otherwise than any answer of the engine to their prompt"
    if prompt is not None and not asked:
        refused = _prompt_problem(sample, prompt, tokens, decode, special) or refused
        if not np.array_equal(tokens[: len(prompt)], prompt):
            doubts["tokens"] = "tokens do not begin with those of the prompt that the function was given"
    if not _is_text(sample.text, sample.response, decode, special):
        doubts["response"] = f"response is not the text of the last response_length = {len(sample.response)} tokens"
    return own[start:], refused, doubts


def _sampled(sample: Sample, tokens: Tokens, answers: Sequence[Answer]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Returns which of prompt's and response's tokens the engine sampled, bool [T], and how far their log-probs are from its own."""
    own, error = np.zeros(len(tokens), np.bool_), np.full(len(tokens), np.inf)
    log_probs = np.concatenate([np.full(len(sample.prompt), np.nan), _log_probs(sample)])
    for start, ids, given in answers:
        part = slice(start, start + len(ids))
        if not np.array_equal(tokens[part], ids[: len(tokens) - start]):  # another rollout's, perhaps of other weights, which began alike
            continue
        own[part] = True
        if given is not None:
            error[part] = np.fmin(error[part], np.abs(log_probs[part] - given[: len(tokens) - start]))
    return own, error


def _beside_engine(sample: Sample, own: NDArray[np.bool_], error: NDArray[np.float64], asked: bool) -> tuple[str | None, Doubts]:
    """Returns what contradicts the engine's answers, and doubts. ``asked``: the engine was asked with just this prompt."""
    start, length, log_probs, trained = len(sample.prompt), len(sample.response), _log_probs(sample), sample.mask != 0
    foreign, known = runs(trained & ~own[start:]), trained & np.isfinite(error[start:])
    shifted = _shifted(error[start:], known, log_probs)
    if own[start - 1] and not asked and (shifted or (sample.log_probs is None and foreign)):
        return f"response_length is {length}, but the engine had sampled tokens before the last {length} of tokens", {}
    if shifted:
        at = int(np.argmax(np.where(known, error[start:], 0)))
        return f"rollout_log_probs is {log_probs[at]:.4g} at {at}: not what the engine gave for token {sample.response[at]}", {}
    if foreign and own[start : start + 1].any():  # else what the engine sampled first is not known
        return _foreign_problem(foreign, log_probs)
    in_a_row = [last - first for first, last in runs(trained & ~known & (log_probs == 0)) if last - first > 1]
    doubt = f"{max(in_a_row, default=0)} trained tokens in a row have the log-prob 0.0; tokens of tools have loss_mask 0"
    return None, {"rollout_log_probs": doubt} if in_a_row else {}


def _shifted(error: NDArray[np.float64], known: NDArray[np.bool_], log_probs: NDArray[np.float32]) -> bool:
    """Returns whether log-probs are not the engine's: all that are known of it taken together, or two zeros in a row, which are made up."""
    zeros = [error[first:last] for first, last in runs(known & (log_probs == 0)) if last - first > 1]
    return any(float(part.mean()) > LOG_PROB_ERROR for part in [error[known], *zeros] if len(part))


def _foreign_problem(foreign: Sequence[tuple[int, int]], log_probs: NDArray[np.float32]) -> tuple[str | None, Doubts]:
    """Returns what is wrong with runs of trained tokens that the engine has not sampled, as `_beside_engine`."""
    count = sum(last - first for first, last in foreign)
    what = f"{count} trained tokens, the first at {foreign[0][0]} of the response, are none that the engine sampled"
    made_up = any(last - first > 1 and not log_probs[first:last].any() for first, last in foreign)
    return f"loss_mask: {what}; tokens of tools have loss_mask 0" if made_up else None, {"loss_mask": what}


def _prompt_problem(sample: Sample, prompt: Tokens, tokens: Tokens, decode: Decode, special: Sequence[str]) -> str | None:
    """Returns why the response does not begin where the prompt ends; None where it does, or where the function made another prompt."""
    short, length, behind = len(prompt) - len(sample.prompt), len(sample.response), tokens[len(prompt) :]
    if not short or not np.array_equal(tokens[: len(prompt)], prompt):
        return None
    if short > 0:
        counted = f"response_length is {length}, and counts the last {short} tokens of the prompt; it counts those behind it"
        return counted if sample.mask[:short].any() else None
    if not sample.text or _is_text(sample.text, sample.response, decode, special):
        return None
    if any(_is_text(sample.text, ids, decode, special) for ids in (behind, behind[:length])):
        return f"response_length is {length}, but tokens has {len(behind)} behind the prompt, and response is their text"
    return None


def _log_probs(sample: Sample) -> NDArray[np.float32]:
    return np.full(len(sample.response), np.nan, np.float32) if sample.log_probs is None else sample.log_probs


def _is_text(text: str, ids: Tokens, decode: Decode, special: Sequence[str]) -> bool:
    """Returns whether a text is that of tokens, but for white space, special tokens, and half a character at the end."""
    if text in (decode(ids, True), whole := decode(ids, False)):
        return True
    pattern = "|".join([r"\s", r"\ufffd+\s*\Z", *map(re.escape, special)])
    return re.sub(pattern, "", text) == re.sub(pattern, "", whole)
