"""slime's ``remote_rm``; and posts of JSON to servers, again after a pause where that fails.

The server is trusted as little as an environment is (`shared.environment.http_environment`): no redirect, no proxy, a bounded answer.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from services.reward.scorer import Scorer
from shared.config.reward_section import REMOTE, RewardSection
from shared.config.run_config import RunConfig
from shared.environment.environment_url import without_credentials
from shared.environment.http_environment import BlockedAddress, JsonServer
from shared.environment.protocol import MAX_ANSWER, EnvironmentFailed, words
from shared.hooks import reward_values
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.safe_files import parse_json
from shared.runtime.tasks import doubling
from shared.schema.messages import Generated
from shared.schema.sample import Sample, Score

LONGEST_PAUSE = 30.0  # The most seconds between two tries; the first pause is one second, and each is twice the one before


class HttpCalls(JsonServer):
    """Calls to one URL. ``url``: may have a user, a password and a query. ``timeout_s``: for each try. ``tries``: how often a call is made
    at most. ``again``: whether an HTTP status is worth another try."""

    def __init__(
        self,
        label: str,
        url: str,
        connections: int,
        timeout_s: float,
        tries: int,
        headers: Mapping[str, str] | None = None,
        again: Callable[[int], bool] = lambda status: True,
    ) -> None:
        super().__init__(label, url, connections)
        self._timeout, self._tries, self._again, self._headers = timeout_s, tries, again, headers or {}

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
            raise EnvironmentFailed(self.label, words(str(error) or type(error).__name__)) from error
        if not 200 <= status < 300:
            kind = EnvironmentFailed if self._again(status) else _Hopeless
            raise kind(self.label, f"answered with HTTP {status}", words(answer[:200].decode(errors="replace")))
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.label, f"answered with more than {MAX_ANSWER} bytes")
        try:
            return parse_json(answer)
        except ValueError as error:
            raise EnvironmentFailed(self.label, f"answered {words(repr(answer[:60]))}; expected JSON ({words(error)})") from None


class _Hopeless(EnvironmentFailed):
    """Error that another try would not change."""


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
        return await asyncio.gather(*(self._score(sample, key) for sample in samples))

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
    if not config.data.apply_chat_template:
        return lambda sample: sample.prompt_text
    from shared.data.tokenizer import Tokenizer  # tokenizers and jinja2 are for runs that need them

    tokenizer = Tokenizer(config.model.hf_checkpoint)
    return lambda sample: tokenizer.decode(sample.prompt, skip_special_tokens=False)
