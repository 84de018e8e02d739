"""On-policy distillation: asks the teachers, SGLang servers of `algorithm.opd_teachers`, for their log-probs of what the policy generated.

A sample's teachers are those that its prompt's metadata names under `algorithm.opd_teacher_key` (a name, a list of names, or names with
weights), else all, with `opd_teacher_weights`. Weights count relative to one another. What the trainer gets in the sample's attributes,
``teacher_log_probs``, is the weighted mean of the teachers' log-probs: with it the reverse KL is the weighted mean of the KLs to them. With
`opd_top_k` = k come each teacher's k most probable entries, side by side: ``teacher_top_ids`` and ``teacher_top_log_probs``, [R, M k], with
the teachers' weights in ``teacher_top_shares``, [M].
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from shared.config.algorithm import AlgorithmSection
from shared.environment import environment_url
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded, nearest
from shared.runtime.tasks import doubling, gathered
from shared.schema.sample import LOG_PROBS, Sample

ATTRIBUTE, IDS, ENTRIES, SHARES = "teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs", "teacher_top_shares"
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between tries while a teacher cannot be reached or is at fault
IDLE_SECONDS = 3.0  # the time after which idle connections are closed, before SGLang closes its side
ITS_FAULT = (408, 425, 429)  # statuses below 500 at which the same request may succeed later


class TeacherFailed(BadMessage):
    """A teacher refused a sample, or its answer is not of the sample's tokens. It would do so again."""

    def __init__(self, teacher: str, sample: str, problem: str) -> None:
        super().__init__(f"sample {sample}: teacher {teacher}: {problem}")


class _Again(Exception):
    """A try that failed and may succeed later. Its text says why."""


def weights_of(objective: AlgorithmSection, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Returns the teachers of a prompt, each with its weight; the weights' sum is 1. Raises BadMessage for an unknown teacher, and for
    weights that are not positive numbers."""
    key, known = objective.opd_teacher_key, objective.opd_teachers
    named = metadata.get(key)
    if named is None:
        named = objective.opd_teacher_weights or list(known)
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    given = named if isinstance(named, dict) else dict.fromkeys(map(str, names), 1.0)
    for name, weight in given.items():
        if name not in known:
            raise BadMessage(f"metadata.{key}: no teacher {str(name)[:80]!r} in algorithm.opd_teachers; {nearest(str(name), list(known))}")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0.0 < weight < np.inf:
            raise BadMessage(f"metadata.{key}.{name}: weight {str(weight)[:80]}; expected a positive number")
    total = sum(given.values())
    if not given or not total < np.inf:
        raise BadMessage(f"metadata.{key}: {str(named)[:80]}; expected a teacher's name, a list of names, or names with weights")
    return {name: weight / total for name, weight in given.items()}


class Teachers:
    """The teachers of a run. Must be made, used and closed in one event loop. Raises ConfigError for a key that is not set.
    ``temperature``: the rollout's, at which log-probs are asked for as the policy's are taken; SGLang gives those of given tokens at 1."""

    def __init__(self, objective: AlgorithmSection, temperature: float = 1.0) -> None:
        self._objective, headers = objective, {"Content-Type": "application/json"}
        if (variable := objective.opd_teacher_key_variable) is not None:
            if not (key := os.environ.get(variable)):
                raise ConfigError("algorithm.opd_teacher_key_variable", variable, "a variable that is set where the rollout service starts")
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        )
        self._teachers = {
            name: _Teacher(name, url, self._session, objective.opd_teacher_concurrency, temperature)
            for name, url in objective.opd_teachers.items()
        }

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()

    async def taught(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples of a group with their teachers' log-probs. Raises DeadlineExceeded, which names the
        teacher and what it did last; TeacherFailed; BadMessage for metadata that name no teacher."""
        return await gathered(self._taught(sample) for sample in samples)

    async def _taught(self, sample: Sample) -> Sample:
        weights, deadline = weights_of(self._objective, sample.metadata), self._objective.opd_teacher_timeout
        found = await gathered(self._teachers[name].asked(sample, self._objective.opd_top_k, deadline) for name in weights)
        mean = sum(weight * given.log_probs.astype(np.float64) for weight, given in zip(weights.values(), found, strict=True))
        attributes = {**sample.attributes, ATTRIBUTE: np.asarray(mean, np.float32)}
        if self._objective.opd_top_k:
            attributes[IDS] = np.concatenate([given.ids for given in found], 1)
            attributes[ENTRIES] = np.concatenate([given.entries for given in found], 1)
            attributes[SHARES] = np.array(list(weights.values()), np.float32)
        return replace(sample, attributes=attributes)


class _Given(NamedTuple):
    """What a teacher gives of a response: log_probs, float32 [R]; its top entries, ids int32 and entries float32 (log-probs), [R, k]."""

    log_probs: NDArray[np.float32]
    ids: NDArray[np.int32]
    entries: NDArray[np.float32]


class _Teacher:
    """One teacher. url: its server's, with or without the path /generate."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, concurrency: int, temperature: float) -> None:
        self._temperature = temperature
        address = environment_url.parse(url)
        self._url = address.url.removesuffix("/generate") + "/generate"
        self._shown, self._session, self._room = f"{name} at {address.shown}", session, asyncio.Semaphore(concurrency)

    async def asked(self, sample: Sample, k: int, deadline: float) -> _Given:
        """Returns what it says of the sample's response. Asks again, until the deadline, while it is away or at fault."""
        if not len(sample.response):
            return _Given(np.zeros(0, np.float32), np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        body = orjson.dumps(_request(sample, k, self._temperature), option=orjson.OPT_SERIALIZE_NUMPY)
        pauses, reason = doubling(FIRST_PAUSE, LONGEST_PAUSE), "it did not answer"
        try:
            async with self._room, asyncio.timeout(deadline):
                while True:
                    try:
                        return self._read(await self._answer(body, sample), sample, k)
                    except _Again as failed:
                        reason = str(failed)
                    await asyncio.sleep(next(pauses))
        except TimeoutError:
            awaited, action = f"the log-probs of sample {sample.name}", f"the group goes back to the queue; last: {reason}"
            raise DeadlineExceeded(awaited, f"teacher {self._shown}", deadline, action) from None

    async def _answer(self, body: bytes, sample: Sample) -> bytes:
        """Raises TeacherFailed where it refuses the request, _Again where it cannot be reached or fails."""
        try:
            async with self._session.post(self._url, data=body) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        if response.ok:
            return answer
        words = f"HTTP {response.status}: {answer[:200].decode(errors='replace')}"
        if response.status >= 500 or response.status in ITS_FAULT:
            raise _Again(words)
        raise TeacherFailed(self._shown, sample.name, words)

    def _read(self, answer: bytes, sample: Sample, k: int) -> _Given:
        length, what = len(sample.response), "input_token_logprobs"
        try:
            found = orjson.loads(answer)["meta_info"]
            values = np.array([entry[0] for entry in found[what][-length:]], np.float64)
            tokens = np.array([entry[1] for entry in found[what][-length:]], np.int64)
            what = "input_top_logprobs"
            top = [[entry[:2] for entry in entries] for entries in found[what][-length:]] if k else [[]] * length
            entries = np.array(top, np.float64).reshape(length, k, 2)
        except (ValueError, TypeError, LookupError, OverflowError):
            missing = f"gave no {what}{f' of {k} entries' if k else ''}: {answer[:80]!r}"
            raise TeacherFailed(self._shown, sample.name, missing) from None
        if (problem := _problem(values, tokens, sample) or _top_problem(entries)) is not None:
            raise TeacherFailed(self._shown, sample.name, problem)
        return _Given(values.astype(np.float32), entries[..., 1].astype(np.int32), entries[..., 0].astype(np.float32))


def _request(sample: Sample, k: int, temperature: float) -> dict[str, Any]:
    """Returns what SGLang's ``/generate`` is asked: log-probs of given tokens, from the last of the prompt on, and no new ones."""
    return {
        "input_ids": np.concatenate([sample.prompt, sample.response]),
        "sampling_params": {"temperature": temperature, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": len(sample.prompt) - 1,
        "top_logprobs_num": k,
    }


def _problem(values: NDArray[np.float64], tokens: NDArray[np.int64], sample: Sample) -> str | None:
    length = len(sample.response)
    if values.shape != (length,):
        return f"gave {len(values)} log-probs for {length} response tokens"
    # SGLang shows an id at its vocabulary's end, where those of images would be, as 0; its log-prob is the token's own
    others = (tokens != sample.response) & (tokens != 0)
    if others.any():
        at = int(np.argmax(others))
        return f"gave the log-prob of token {tokens[at]} at {at}, not of the response's {sample.response[at]}: is its vocabulary another?"
    wrong = _not_log_probs(values)
    if wrong.any():
        at = int(np.argmax(wrong))
        return f"gave the log-prob {values[at]} at {at}; expected a finite number, at most 0"
    return None


def _top_problem(entries: NDArray[np.float64]) -> str | None:
    ids = entries[..., 1]
    wrong = _not_log_probs(entries[..., 0]) | ~((ids >= 0) & (ids < 2**31))
    if not wrong.any():
        return None
    at, place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    return f"gave (log-prob, id) {entries[at, place].tolist()} as entry {place} at {at}; expected a finite number, at most 0, and an id"


def _not_log_probs(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    least, most = LOG_PROBS
    return ~((values >= least) & (values <= most))
