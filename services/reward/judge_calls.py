"""Questions to the judge: a model behind an endpoint that speaks OpenAI's chat completions."""

import asyncio
import hashlib
import json
from typing import Any

from services.reward.http_calls import HttpCalls, from_environment
from services.reward.verdict_cache import VerdictCache
from shared.config.reward_section import JUDGE, RewardSection
from shared.environment.environment_url import without_credentials
from shared.environment.protocol import EnvironmentFailed, shown
from shared.schema.sample import Sample

_AGAIN = (408, 409, 425, 429)


class JudgeCalls:
    """Asks the judge; the same question is asked once. Raises ConfigError where its key or its cache cannot be had."""

    def __init__(self, config: RewardSection) -> None:
        assert config.judge_url is not None  # the run has this environment
        url = f"{config.judge_url.rstrip('/')}/chat/completions"
        headers = {}
        if config.judge_key_variable is not None:
            headers["Authorization"] = f"Bearer {from_environment('reward.judge_key_variable', config.judge_key_variable)}"
        self._config, self._concurrency = config, asyncio.Semaphore(config.judge_concurrency)
        label = f"{JUDGE} {config.judge_model} at {without_credentials(url)}"
        self._calls = HttpCalls(label, url, config.judge_concurrency, config.judge_timeout, config.judge_tries, headers, _may_pass)
        self._verdicts = VerdictCache(config.judge_cache)
        self._asked: dict[str, asyncio.Task[str]] = {}

    async def said(self, question: str) -> str:
        """Returns what the judge says to a question: now, or when it was asked before. Raises EnvironmentFailed or DeadlineExceeded."""
        messages = [{"role": "user", "content": question}]
        body = {"model": self._config.judge_model, "messages": messages, **self._config.judge_sampling}
        asked = hashlib.sha256(json.dumps([self._config.judge_url, body], sort_keys=True).encode()).hexdigest()
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
            raise EnvironmentFailed(
                self._calls.label, f"answered {shown(answer)}; expected a chat completion with choices[0].message.content"
            )
        await asyncio.to_thread(self._verdicts.put, asked, said)
        return said


def task_of(sample: Sample) -> dict[str, str]:
    """Returns what the templates of the judge's questions name of a sample's task."""
    return {"prompt": _text(sample.prompt_text), "label": sample.label or ""}


def _text(prompt: Any) -> str:
    """Returns a prompt as text: of chat messages, each behind its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt if isinstance(message, dict))


def _may_pass(status: int) -> bool:
    return status in _AGAIN or status >= 500
