"""A model as judge, over an endpoint that speaks OpenAI's chat completions: what it says of a response holds the reward."""

import asyncio
import hashlib
import json
import re
import sqlite3
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import structlog

from services.reward.http_calls import HttpCalls, from_environment
from services.reward.scorer import Scorer
from shared.config.reward_section import JUDGE, RewardSection
from shared.environment.environment_url import without_credentials
from shared.environment.protocol import EnvironmentFailed, shown, words
from shared.hooks import reward_values
from shared.runtime.errors import ConfigError
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score

KEPT = 100_000
"""The most verdicts that a reward service keeps in memory."""

_BUSY_SECONDS = 30.0
_AGAIN = (408, 409, 425, 429)
_FIELD = re.compile(r"\{(prompt|response|label)\}")


class Judge(Scorer):
    """Asks the judge for each sample; the same question is asked once. Raises ConfigError where its key or its cache cannot be had."""

    def __init__(self, config: RewardSection) -> None:
        super().__init__(JUDGE, config.environment_concurrency)
        assert config.judge_url is not None  # the run has this environment
        url = f"{config.judge_url.rstrip('/')}/chat/completions"
        headers = {}
        if config.judge_key_variable is not None:
            headers["Authorization"] = f"Bearer {from_environment('reward.judge_key_variable', config.judge_key_variable)}"
        self._config, self._concurrency = config, asyncio.Semaphore(config.judge_concurrency)
        label = f"{JUDGE} {config.judge_model} at {without_credentials(url)}"
        tries, timeout_s = config.judge_tries, config.judge_timeout
        self._calls = HttpCalls(
            label, url, config.judge_concurrency, timeout_s, tries, headers, lambda status: status in _AGAIN or status >= 500
        )
        self._verdicts = VerdictCache(config.judge_cache)
        self._asked: dict[str, asyncio.Task[str]] = {}

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await asyncio.gather(*(self._score(sample) for sample in samples))

    async def close(self) -> None:
        """Closes the connections and the cache."""
        await self._calls.close()
        await asyncio.to_thread(self._verdicts.close)

    async def _score(self, sample: Sample) -> Score:
        verdict = await self._verdict(question(self._config, sample))
        try:
            return reward_values.read(score_in(self._config, verdict), None)
        except ValueError as error:
            return Score(reward=0.0, unread=words(f"{JUDGE}: {error}"))

    async def _verdict(self, body: dict[str, Any]) -> str:
        """Returns what the judge says: now, or to the same question before."""
        asked = hashlib.sha256(json.dumps([self._config.judge_url, body], sort_keys=True).encode()).hexdigest()
        if (known := await asyncio.to_thread(self._verdicts.get, asked)) is not None:
            return known
        if asked not in self._asked:
            self._asked[asked] = asyncio.create_task(self._ask(asked, body))
            self._asked[asked].add_done_callback(lambda _: self._asked.pop(asked))
        return await asyncio.shield(self._asked[asked])

    async def _ask(self, asked: str, body: dict[str, Any]) -> str:
        async with self._concurrency:
            answer = await self._calls.post(body)
        try:
            said = answer["choices"][0]["message"]["content"]
        except (TypeError, LookupError):
            said = None
        if not isinstance(said, str):
            raise EnvironmentFailed(
                self._calls.label, f"answered {shown(answer)}; expected a chat completion with choices[0].message.content"
            )
        await asyncio.to_thread(self._verdicts.put, asked, said)
        return said


def question(config: RewardSection, sample: Sample) -> dict[str, Any]:
    """Returns the request for a sample: the template with its prompt, response and label in it, as one message."""
    parts = {"prompt": _text(sample.prompt_text), "response": sample.text, "label": sample.label or ""}
    content = _FIELD.sub(lambda field: parts[field[1]], config.judge_prompt)
    return {"model": config.judge_model, "messages": [{"role": "user", "content": content}], **config.judge_sampling}


def score_in(config: RewardSection, verdict: str) -> float:
    """Returns the score in a judge's words. Raises ValueError where there is none."""
    found = re.findall(config.judge_pattern, verdict)
    if not found:
        raise ValueError(f"no match of judge_pattern in {shown(verdict[-80:])}")
    if config.judge_scores:
        scores = {word.casefold(): score for word, score in config.judge_scores.items()}
        if found[-1].strip().casefold() not in scores:
            raise ValueError(f"{shown(found[-1])} is not one of judge_scores: {', '.join(config.judge_scores)}")
        return scores[found[-1].strip().casefold()]
    try:
        return float(found[-1])
    except ValueError:
        raise ValueError(f"{shown(found[-1])} is no number; judge_scores says what words are worth") from None


def _may_pass(status: int) -> bool:
    return status in _AGAIN or status >= 500


def _text(prompt: Any) -> str:
    """Returns a prompt as text: of chat messages, each behind its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt if isinstance(message, dict))


class VerdictCache:
    """What the judge has said, in memory and, where a file is named, in that: reward services of one machine may share it.

    Raises ConfigError for a file that cannot be used. One that fails later is done without.
    """

    def __init__(self, path: Path | None) -> None:
        self._recent: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (asked TEXT PRIMARY KEY, said TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("reward.judge_cache", str(path), f"expected an SQLite file that can be written: {error}") from None

    def get(self, asked: str) -> str | None:
        """Returns what was said to a question, None where it was not asked."""
        with self._lock:
            if (known := self._recent.get(asked)) is not None:
                return known
            row = next(iter(self._execute("SELECT said FROM verdicts WHERE asked = ?", asked)), None)
            return None if row is None else str(row[0])

    def put(self, asked: str, said: str) -> None:
        """Keeps what was said."""
        with self._lock:
            self._recent[asked] = said
            while len(self._recent) > KEPT:
                self._recent.popitem(last=False)
            self._execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", asked, said)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _execute(self, statement: str, *values: str) -> list[Any]:
        if self._file is None:
            return []
        try:
            return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            structlog.get_logger().warning("judge_cache_failed", error=str(error))
            return []
