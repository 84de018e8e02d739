"""Rewards that a server gives: slime's ``remote_rm``, and a model as judge, of each response or of a whole group by a tournament of pairs.

JSON is posted, again after a pause where that fails. A server is trusted as little as an environment is
(`shared.environment.http_environment`): no redirect, no proxy, a bounded answer.

The forms of a tournament are pure generators: each yields a round, the pairs of samples to be compared, is sent the points of the first of
each pair (1 won, 0 lost, 0.5 a tie; anything between where two answers differ), and returns one reward a sample, in [0, 1]: the share of
the others that it is placed before, a tie counting half. They are those of ArenaRL (https://github.com/Alibaba-NLP/qqr), which normalises
the rewards afterwards; here that is the advantage estimator's part. Pairs are seeded, so that a group that is judged again meets in the
same ones.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import random
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from services.reward.scorer import Scorer
from shared.config.eval_views import eval_views, group_config
from shared.config.reward_section import JUDGE, REMOTE, TOURNAMENT, RewardSection
from shared.config.run_config import RunConfig
from shared.environment.environment_url import without_credentials
from shared.environment.http_environment import BlockedAddress, JsonServer
from shared.environment.protocol import MAX_ANSWER, EnvironmentFailed, shown, words
from shared.hooks import reward_values
from shared.hooks.arguments import model_addresses
from shared.hub import hub_resolve
from shared.runtime.errors import INFRASTRUCTURE, ConfigError, DeadlineExceeded
from shared.runtime.safe_files import parse_json
from shared.runtime.tasks import doubling, gathered
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score

LONGEST_PAUSE = 30.0  # The most seconds between two tries; the first pause is one second, and each is twice the one before


class HttpCalls(JsonServer):
    """Calls to one URL. ``url``: may have a user, a password and a query. ``timeout_s``: for each try. ``tries``: how often a call is made
    at most. ``any_again``: also after an HTTP status that is not one of a passing trouble."""

    def __init__(
        self,
        label: str,
        url: str,
        connections: int,
        timeout_s: float,
        tries: int,
        headers: Mapping[str, str] | None = None,
        any_again: bool = True,
    ) -> None:
        super().__init__(label, url, connections)
        self._timeout, self._tries, self._any_again, self._headers = timeout_s, tries, any_again, headers or {}

    async def post(self, body: object) -> Any:
        """Returns the decoded answer. Raises EnvironmentFailed or DeadlineExceeded, as the last try ended."""
        data = self.encoded(body)
        for _, pause in zip(range(self._tries - 1), doubling(1.0, LONGEST_PAUSE), strict=False):
            try:
                return await self._try(data)
            except _Hopeless as error:
                raise EnvironmentFailed(self.label, error.reason) from error
            except (EnvironmentFailed, DeadlineExceeded):
                await asyncio.sleep(pause + random.random())
        return await self._try(data)

    async def _try(self, data: bytes) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                status, answer, _ = await self.exchange("POST", self.url, data, self._headers)
        except TimeoutError:
            raise DeadlineExceeded("the answer", self.label, self._timeout, "given up") from None
        except BlockedAddress as error:
            raise _Hopeless(self.label, str(error)) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise _Away(self.label, words(str(error) or type(error).__name__)) from error
        if not 200 <= status < 300:
            passes = status in (408, 409, 425, 429) or status >= 500
            kind = _Away if passes else EnvironmentFailed if self._any_again else _Hopeless
            raise kind(self.label, f"answered with HTTP {status}", words(answer[:200].decode(errors="replace")))
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.label, f"answered with more than {MAX_ANSWER} bytes")
        try:
            return parse_json(answer)
        except ValueError as error:
            raise EnvironmentFailed(self.label, f"answered {words(repr(answer[:60]))}; expected JSON ({words(error)})") from None


class _Hopeless(EnvironmentFailed):
    """Error that another try would not change."""


class _Away(EnvironmentFailed):
    """Error of a server that cannot be reached, or not now: no group is its cause."""

    fault = INFRASTRUCTURE


CONNECTIONS = 64  # The most connections of a reward service to the server, as in slime


class RemoteScorer(Scorer):
    """Asks the server at ``rm_url`` for each sample. ``prompt_text``: gives the prompt of a sample as the server gets it."""

    def __init__(self, config: RewardSection, prompt_text: Callable[[Sample], object]) -> None:
        super().__init__(REMOTE, config.environment_concurrency)
        assert config.rm_url is not None  # the run has this environment
        label = f"{REMOTE} at {without_credentials(config.rm_url)}"
        self._calls = HttpCalls(label, config.rm_url, CONNECTIONS, config.rm_timeout, config.rm_tries)
        self._prompt_text = prompt_text

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await gathered(self._score(sample, key) for sample in samples)

    async def close(self) -> None:
        """Closes the connections."""
        await self._calls.close()

    async def _score(self, sample: Sample, key: str | None) -> Score:
        value = await self._calls.post({"prompt": self._prompt_text(sample), "response": sample.text, "label": sample.reference.value})
        try:
            return reward_values.read(value, key)
        except ValueError as error:
            raise EnvironmentFailed(self._calls.label, f"{error}; it answered {words(value)}") from None


def prompt_text(config: RunConfig) -> Callable[[Sample], object]:
    """Returns what gives a sample's prompt as slime has it: as it stands in the file, or as the chat template rendered it. Raises
    ConfigError where that takes the model's tokenizer and there is none."""
    if not any(one.data.apply_chat_template for one in (config, *(view.config for view in eval_views(config)))):
        return lambda sample: sample.prompt_text
    from shared.data.tokenizer import Tokenizer  # tokenizers and jinja2 are for runs that need them

    tokenizer = Tokenizer(hub_resolve.local(config, ("model.hf_checkpoint",), weights=False).model.hf_checkpoint)

    def text(sample: Sample) -> object:
        rendered = group_config(config, sample.group).data.apply_chat_template
        return tokenizer.decode(sample.prompt, skip_special_tokens=False) if rendered else sample.prompt_text

    return text


MOST_VERDICTS = 100_000  # The most verdicts that a reward service keeps in memory
_BUSY_SECONDS = 30.0


class VerdictCache:
    """The judge's answers, in memory and, where a file is named, in that: reward services of one machine may share it. Raises
    ConfigError for a file that cannot be used. One that fails later is done without."""

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
            while len(self._recent) > MOST_VERDICTS:
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


class JudgeCalls:
    """Asks the judge; the same question is asked once. Raises ConfigError where its key or its cache cannot be had."""

    def __init__(self, run: RunConfig) -> None:
        config = run.reward
        assert config.judge_url is not None  # the run has this environment
        frozen = run.rollout.models.get(config.judge_url)
        self._identity = () if frozen is None else (str(frozen.hf_checkpoint or run.model.hf_checkpoint), frozen.sglang)
        model = model_addresses().get(config.judge_url)
        url = (f"http://{model[0]}:{model[1]}/v1" if model else config.judge_url.rstrip("/")) + "/chat/completions"
        headers = {}
        if config.judge_key_variable is not None:
            if not (key := os.environ.get(config.judge_key_variable)):
                expected = "a variable that is set where the reward service starts"
                raise ConfigError("reward.judge_key_variable", config.judge_key_variable, expected)
            headers["Authorization"] = f"Bearer {key}"
        self._config, self._concurrency = config, asyncio.Semaphore(config.judge_concurrency)
        label = f"{JUDGE} {config.judge_model} at {without_credentials(url)}"
        self._calls = HttpCalls(label, url, config.judge_concurrency, config.judge_timeout, config.judge_tries, headers, any_again=False)
        self._verdicts = VerdictCache(config.judge_cache)
        self._asked: dict[str, asyncio.Task[str]] = {}

    async def said(self, question: str) -> str:
        """Returns what the judge says to a question: now, or when it was asked before.

        Raises EnvironmentFailed or DeadlineExceeded; ValueError where the answer was cut off at its length: its last words decide nothing.
        """
        messages = [{"role": "user", "content": question}]
        body = {"model": self._config.judge_model or self._config.judge_url, "messages": messages, **self._config.judge_sampling}
        asked = hashlib.sha256(json.dumps([self._config.judge_url, *self._identity, body], sort_keys=True).encode()).hexdigest()
        if (known := await asyncio.to_thread(self._verdicts.get, asked)) is not None:
            return known
        if asked not in self._asked:
            self._asked[asked] = asyncio.create_task(self._ask(asked, body))
            self._asked[asked].add_done_callback(lambda _: self._asked.pop(asked))
        return await asyncio.shield(self._asked[asked])

    async def close(self) -> None:
        """Closes the connections and the cache."""
        await self._calls.close()
        await asyncio.to_thread(self._verdicts.close)

    async def _ask(self, asked: str, body: dict[str, Any]) -> str:
        async with self._concurrency:
            answer = await self._calls.post(body)
        try:
            said = answer["choices"][0]["message"]["content"]
        except (TypeError, LookupError):
            said = None
        if not isinstance(said, str):
            expected = "expected a chat completion with choices[0].message.content"
            raise EnvironmentFailed(self._calls.label, f"answered {shown(answer)}; {expected}")
        if answer["choices"][0].get("finish_reason") == "length":
            raise ValueError(f"the answer was cut off at its length, {shown(said[-80:])}; give it more max_tokens in judge_sampling")
        await asyncio.to_thread(self._verdicts.put, asked, said)
        return said


def question(template: str, sample: Sample, **parts: str) -> str:
    """Returns a template with the ``{name}`` of each part, and of the sample's task, replaced once: what a part holds stays as it is."""
    prompt: Any = sample.prompt_text
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt if isinstance(message, dict))
    known = {"prompt": prompt, "label": sample.label or "", **parts}
    return re.sub(r"\{(\w+)\}", lambda field: known.get(field[1], field[0]), template)


class Judge(Scorer):
    """Asks the judge for each sample."""

    def __init__(self, config: RewardSection, calls: JudgeCalls) -> None:
        super().__init__(JUDGE, config.environment_concurrency)
        self._config, self._calls = config, calls

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        return await gathered(self._score(sample) for sample in samples)

    async def _score(self, sample: Sample) -> Score:
        try:
            verdict = await self._calls.said(question(self._config.judge_prompt, sample, response=sample.text))
            return reward_values.read(score_in(self._config, verdict), None)
        except ValueError as error:
            return Score(reward=0.0, unread=words(f"{JUDGE}: {error}"))


def last_match(field: str, pattern: str, verdict: str) -> str:
    """Returns the last match of a pattern in the judge's words. Raises ValueError where there is none. ``field``: the pattern's."""
    found = re.findall(pattern, verdict)
    if not found:
        raise ValueError(f"no match of {field} in {shown(verdict[-80:])}")
    return str(found[-1]).strip()


def worth(field: str, scores: Mapping[str, float], word: str) -> float:
    """Returns what a word of the judge is worth. Raises ValueError for another. ``field``: of the config, which holds ``scores``."""
    known = {name.casefold(): score for name, score in scores.items()}
    if word.casefold() not in known:
        raise ValueError(f"{shown(word)} is not one of {field}: {', '.join(scores)}")
    return known[word.casefold()]


def score_in(config: RewardSection, verdict: str) -> float:
    """Returns the score in a judge's words. Raises ValueError where there is none."""
    found = last_match("judge_pattern", config.judge_pattern, verdict)
    if config.judge_scores:
        return worth("judge_scores", config.judge_scores, found)
    try:
        return float(found)
    except ValueError:
        raise ValueError(f"{shown(found)} is no number; judge_scores says what words are worth") from None


Round = list[tuple[int, int]]
Form = Generator[Round, list[float], list[float]]


def round_robin(count: int, rng: random.Random) -> Form:
    """Each against each: count × (count - 1) / 2 comparisons."""
    pairs = list(itertools.combinations(range(count), 2))
    points = [0.0] * count
    for (first, second), won in zip(pairs, (yield pairs), strict=True):
        points[first] += won
        points[second] += 1 - won
    return placed(points)


def anchor(count: int, rng: random.Random) -> Form:
    """All against the first: count - 1 comparisons. The first one's points are the mean of what it won."""
    return placed((yield from _seeding(count)))


def single_elimination(count: int, rng: random.Random) -> Form:
    """Seeded by `anchor`, then a bracket in which the loser is out: 2 × (count - 1) comparisons. Those that go out in one round are placed
    by their mean points."""
    record = _Record(count)
    for index, points in enumerate((yield from _seeding(count))):
        record.add(index, points)
    going, lost = yield from record.knock_out(_bracket(sorted(range(count), key=record.mean, reverse=True)))
    gone = [lost]
    while len(going) > 1:
        going, lost = yield from record.knock_out(going)
        gone.append(lost)
    return placed_in_order([*going, *_last_out_first(gone, record)])


def double_elimination(count: int, rng: random.Random) -> Form:
    """A sample that has lost twice is out: up to 2 × count - 2 comparisons. Pairs are shuffled for each round. Those that go out in one
    round are placed by their mean points."""
    record, going, fallen = _Record(count), list(range(count)), list[list[int]]()
    while len(going) > 1:
        rng.shuffle(going)
        going, lost = yield from record.knock_out(going)
        fallen.append(lost)
    second, gone = list[int](), list[list[int]]()
    while fallen or len(second) > 1:
        second += fallen.pop(0) if fallen else []
        if len(second) > 1:
            rng.shuffle(second)
            second, lost = yield from record.knock_out(second)
            gone.append(lost)
    final, lost = yield from record.knock_out([*going, *second])
    return placed_in_order([*final, *lost, *_last_out_first(gone, record)])


def swiss(count: int, rng: random.Random) -> Form:
    """⌈log2 count⌉ rounds among neighbours in the table who have not met; ties are broken by the points of the opponents. The one that
    is left over in a round wins it; none twice while others have not."""
    points, met, rested = [0.0] * count, [set[int]() for _ in range(count)], set[int]()
    for _ in range(min(math.ceil(math.log2(count)), count - 1)):
        table = rng.sample(range(count), count)
        table.sort(key=lambda one: points[one], reverse=True)
        if count % 2:
            rests = next((one for one in reversed(table) if one not in rested), table[-1])
            rested.add(rests)
            table.remove(rests)
            points[rests] += 1
        pairs = _neighbours(table, met)
        for (first, second), won in zip(pairs, (yield pairs), strict=True):
            points[first] += won
            points[second] += 1 - won
            met[first].add(second)
            met[second].add(first)
    return placed([(points[one], sum(points[other] for other in met[one])) for one in range(count)])


# By their names in the config
FORMS: dict[str, Callable[[int, random.Random], Form]] = {
    form.__name__: form for form in (round_robin, anchor, single_elimination, double_elimination, swiss)
}


def placed(keys: Sequence[Any]) -> list[float]:
    """Returns the rewards of samples that are ordered by ``keys``, the greatest first; equal ones share their places."""
    others = len(keys) - 1
    return [(sum(key > other for other in keys) + (sum(key == other for other in keys) - 1) / 2) / others for key in keys]


def placed_in_order(order: Sequence[int]) -> list[float]:
    """Returns the rewards, by index, of samples that stand in the order of their places."""
    rewards = [0.0] * len(order)
    for place, index in enumerate(order):
        rewards[index] = 1 - place / (len(order) - 1)
    return rewards


class _Record:
    def __init__(self, count: int) -> None:
        self._points: list[list[float]] = [[] for _ in range(count)]

    def add(self, index: int, points: float) -> None:
        self._points[index].append(points)

    def mean(self, index: int) -> float:
        return sum(self._points[index]) / len(self._points[index]) if self._points[index] else 0.0

    def knock_out(self, going: Sequence[int | None]) -> Generator[Round, list[float], tuple[list[int], list[int]]]:
        """Compares neighbours. Returns the winners, the first of a tie and those without a neighbour among them, and the losers."""
        couples = [[one for one in going[at : at + 2] if one is not None] for at in range(0, len(going), 2)]
        pairs = [(couple[0], couple[1]) for couple in couples if len(couple) == 2]
        lost = list[int]()
        for (first, second), points in zip(pairs, (yield pairs), strict=True):
            self.add(first, points)
            self.add(second, 1 - points)
            lost.append(second if points >= 0.5 else first)
        return [one for couple in couples for one in couple if one not in lost], lost


def _seeding(count: int) -> Generator[Round, list[float], list[float]]:
    won = yield [(other, 0) for other in range(1, count)]
    return [sum(1 - points for points in won) / len(won), *won]


def _bracket(seeds: list[int]) -> list[int | None]:
    """Returns the samples, best first, in an order in which neighbours meet and the best meet last; None: a place that is free."""
    order = [0]
    while len(order) < len(seeds):
        order = [place for one in order for place in (one, 2 * len(order) - 1 - one)]
    return [seeds[place] if place < len(seeds) else None for place in order]


def _last_out_first(gone: list[list[int]], record: _Record) -> list[int]:
    return [one for lost in reversed(gone) for one in sorted(lost, key=record.mean, reverse=True)]


def _neighbours(table: list[int], met: Sequence[set[int]]) -> Round:
    """Returns pairs of the table, each the highest that is left and the next that it has not met, or the next where it has met all."""
    pairs, left = Round(), list(table)
    while left:
        first = left.pop(0)
        second = next((one for one in left if one not in met[first]), left[0])
        left.remove(second)
        pairs.append((first, second))
    return pairs


class GroupJudge(Scorer):
    """Plays the tournament ``judge_tournament`` among the samples of a group; each gets the share of the others that it is placed before. A
    comparison of which the judge's words say no winner is a tie, and counted as ``unread`` for both."""

    def __init__(self, config: RewardSection, calls: JudgeCalls) -> None:
        super().__init__(TOURNAMENT, config.environment_concurrency)
        self._config, self._calls = config, calls

    async def score(self, group: Generated, samples: list[Sample], environment: str, key: str | None) -> list[Score]:
        if len(samples) < 2:
            raise EnvironmentFailed(TOURNAMENT, f"group {group.group} has one sample to be scored: a tournament takes two at least")
        unread: dict[int, str] = {}
        form = FORMS[self._config.judge_tournament](len(samples), random.Random(group.group))
        pairs = next(form)
        while True:
            points = await gathered(self._compared(samples, pair, unread) for pair in pairs)
            try:
                pairs = form.send(points)
            except StopIteration as end:
                return [Score(reward=reward, unread=unread.get(index, "")) for index, reward in enumerate(end.value)]

    async def _compared(self, samples: Sequence[Sample], pair: tuple[int, int], unread: dict[int, str]) -> float:
        """Returns the points of the first of a pair, 0 to 1: where both orders are asked, their mean."""
        first, second = pair
        try:
            there = await self._points(samples[first], samples[second])
            back = await self._points(samples[second], samples[first]) if self._config.judge_both_orders else 1 - there
        except ValueError as error:
            unread[first] = unread[second] = words(f"{TOURNAMENT}: {error}")
            return 0.5
        return (there + 1 - back) / 2

    async def _points(self, first: Sample, second: Sample) -> float:
        """Returns the points of the first where the judge reads it first. Raises ValueError where its words say no winner."""
        said = await self._calls.said(question(self._config.judge_pair_prompt, first, first=first.text, second=second.text))
        found = last_match("judge_pair_pattern", self._config.judge_pair_pattern, said)
        return worth("judge_pair_points", self._config.judge_pair_points, found)
