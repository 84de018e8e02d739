"""Checks samples that functions of the user's made against what the engine answered, and finds which of their text is the model's own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from services.rollout.engine.public_requests import GenerateRequest, PublicRequest
from shared.data.tokenizer import Tokenizer
from shared.hooks.sample_agreement import Answer, compared
from shared.runtime.errors import BadMessage
from shared.runtime.service_base import Service
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.schema.sample import Sample, sampled, token_digest, turns_of

MOST_TOKENS, ANSWER_TOKENS = 1 << 22, 64
"""Sampled tokens that are remembered, 32 MiB, and as how many an answer counts besides its own."""


class EngineAnswers:
    """The newest answers of `/generate`, by the prompt they were given to. ``whole``: all requests were of one prompt's token ids."""

    def __init__(self) -> None:
        self.whole, self._tokens = True, 0
        self._answers: dict[tuple[int, int], list[Answer]] = {}

    def add(self, request: PublicRequest, body: bytes) -> None:
        """Remembers the answer to a request; nothing of one that comes piece by piece, which has no body."""
        try:
            if not isinstance(request, GenerateRequest) or not request.input_ids or isinstance(request.input_ids[0], list):
                raise ValueError("not the token ids of one prompt")
            prompt, given = np.array(request.input_ids, np.int32), orjson.loads(body)
            answers = [_answer(len(prompt), one) for one in (given if isinstance(given, list) else [given])]
            self._answers.setdefault((len(prompt), token_digest(prompt)), []).extend(answers)
            self._tokens += sum(len(ids) + ANSWER_TOKENS for _, ids, _ in answers)
        except (ValueError, TypeError, LookupError):
            self.whole = False
        while self._tokens > MOST_TOKENS:
            self._tokens -= sum(len(ids) + ANSWER_TOKENS for _, ids, _ in self._answers.pop(next(iter(self._answers))))

    def of(self, tokens: NDArray[np.int32]) -> list[Answer]:
        """Returns the answers to the beginnings of a sample's tokens, int32 [T]."""
        keys = ((length, token_digest(tokens[:length])) for length in {length for length, _ in self._answers} if length < len(tokens))
        return [answer for key in keys for answer in self._answers.get(key, ())]


def _answer(start: int, given: dict[str, Any]) -> Answer:
    entries = given["meta_info"].get("output_token_logprobs")
    if entries is None:
        return start, np.array(given["output_ids"], np.int32), None
    return start, np.array([entry[1] for entry in entries], np.int32), np.array([entry[0] for entry in entries], np.float32)


class SampleCheck:
    """Checks the samples of one replica's functions. A doubt is logged once for each function and field."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self._log, self._tokenizer, self._special = service.log, tokenizer, tokenizer.special_tokens
        self._skipped = tokenizer.skipped_tokens
        self.answers = EngineAnswers()
        self._doubted: set[tuple[str, str]] = set()

    def checked(self, sample: Sample, task: Task, prompt: object, called: str | None, mask: Sequence[int] | None = None) -> Sample:
        """Returns a sample with the texts of the model's own turns. Raises BadMessage for one that contradicts itself or the engine.

        Args:
            prompt: as the function was given it. called: the function, by its field and path; None for code of Myxo's own.
            mask: as the function set it, where the sample's own has been cleared since.
        """
        trained = (sample.mask if mask is None or len(mask) != len(sample.mask) else np.asarray(mask)) != 0
        own = sampled(trained, sample.log_probs)
        if called is not None:
            drawn, whole = self._compared(sample, task, prompt, called)
            # where the engine's answers account for all that is trained, log-probs of other tokens are placeholders
            own = drawn if whole and drawn.any() and drawn[trained].all() else own | drawn
        # a function may leave special tokens out of its text: they are no part of an answer then
        plain = task.sampling.skip_special_tokens is True or not any(token in sample.text for token in self._skipped)
        return replace(sample, turns=turns_of(own, sample.response, lambda ids: self._tokenizer.decode(ids, plain)))

    def _compared(self, sample: Sample, task: Task, prompt: object, called: str) -> tuple[NDArray[np.bool_], bool]:
        """Returns which tokens of the response the engine is known to have sampled, bool [R], and whether all of its answers are known.

        Raises BadMessage as `checked`.
        """
        answers = self.answers.of(np.concatenate([sample.prompt, sample.response]))
        given = task.prompt_tokens if sample.prompt_text == prompt else None
        whole = self.answers.whole and task.partial is None  # else its beginning may be another replica's
        own, refused, doubts = compared(sample, given, answers, self._tokenizer.decode, self._special, whole)
        if refused is not None and not is_evaluation(task.group):
            raise BadMessage(f"{called}: sample {sample.name}: {refused}")
        for field in doubts.keys() - {known for by, known in self._doubted if by == called}:
            self._doubted.add((called, field))
            self._log.warning("sample_doubtful", function=called, sample=sample.name, field=field, error=doubts[field])
        return own, whole
